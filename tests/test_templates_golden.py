"""The rows that LLaMA-Factory makes of the same records, token for token (shared/spec/golden)."""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from burnish.core.types import Example, Message
from burnish.data.tally import Tally
from burnish.data.templates import TemplateOptions, fit_tokenizer, load_template
from burnish.data.truncate import EncodingOptions

GOLDEN = Path(__file__).parents[1].parent / "shared" / "spec" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the golden rows are not beside this checkout")

ROLES = {"human": "user", "gpt": "assistant", "function_call": "function", "observation": "observation"}
# No golden row is exempt: of what LLaMA-Factory is known to do wrong, the rows show only that template "empty" trains
# no eos, and burnish does the same where that template is named (docs/decisions/0010-templates-as-data.md).
EXEMPT: set[tuple[str, str]] = set()


def options(**given):
    """Options as the golden rows need them. Their tokenizer lacks some templates' control tokens, hence "split"."""
    values = vars(TemplateOptions()) | vars(EncodingOptions()) | {"missing_control_tokens": "split"}
    return SimpleNamespace(**values | given)


def read_alpaca(record):
    turns = [message for pair in record["history"] for message in zip(("user", "assistant"), pair, strict=True)]
    turns.append(("user", "\n".join(filter(None, [record["instruction"], record["input"]]))))
    return turns + ([("assistant", record["output"])] if record["output"] is not None else []), record["system"]


def read_sharegpt(record):
    said, system = record["conversations"], record["system"]
    if said[0]["from"] == "system":
        system, said = said[0]["value"], said[1:]
    return [(ROLES[turn["from"]], turn["value"]) for turn in said], system


@cache
def examples():
    found = {}
    for case in json.loads((GOLDEN / "conversations.json").read_text(encoding="utf-8")):
        read = {"alpaca": read_alpaca, "sharegpt": read_sharegpt}[case["formatting"]]
        turns, system = read(case["record"])
        messages = tuple(Message(role, content) for role, content in turns)
        found[case["case"]] = Example(messages, system, case["record"].get("tools", ""), source=case["case"], number=1)
    return found


def golden_rows():
    rows = defaultdict(list)
    if GOLDEN.exists():
        for line in (GOLDEN / "sft_rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[row["template"]].append(row)
    return rows


@pytest.mark.parametrize(
    ("name", "rows"), golden_rows().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_named_template_gives_the_golden_rows(name, rows):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tokenizer")
    for row in rows:
        truncation = "llamafactory" if row["options"]["cutoff_len"] == 64 else "content"
        template = load_template(options(template=name, truncation=truncation, **row["options"]), tokenizer)
        fit_tokenizer(template, tokenizer)
        tally = Tally()
        made = template.encode([examples()[row["case"]]], tally)[0]
        where = (row["case"], row["options"])
        if row.get("dropped"):
            assert made is None, where
            assert sum(count for _, count in tally) == 1, where
        else:
            assert made is not None, where
            assert made["input_ids"] == row["input_ids"], where
            assert made["labels"] == row["labels"], where
