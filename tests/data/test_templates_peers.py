"""LLaMA-Factory's 124 named templates and 13 tool formats compared with its output (golden/make_templates_golden.py),
and other named templates compared with a stored rendering (golden/own_templates.json: name -> text).
"""

import json
from hashlib import sha256
from itertools import groupby
from pathlib import Path

import pytest

from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.chat.table import table
from burnish.data.chat.tools.tool_calls import Call
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from representative import representative
from template_cases import (
    CALLS,
    CONVERSATIONS,
    FAST_TEMPLATES,
    GOLDEN,
    OPTIONS,
    RANDOM_CASES,
    TOOLS,
    byte_tokenizer,
    example,
    template_options,
)  # fmt: skip

EXPECTED = json.loads((Path(__file__).parents[1] / "golden" / "own_templates.json").read_text(encoding="utf-8"))


def render(name):
    """Return two turns as text, with trained parts in ⟦ ⟧."""
    tokenizer = byte_tokenizer()
    template = load_template(template_options(template=name), tokenizer)
    configure_tokenizer(template, tokenizer)
    turns = [Message("user", "Hi."), Message("assistant", "Yes?"), Message("user", "Bye."), Message("assistant", "So.")]
    (row,) = template.encode([Example(tuple(turns), "Be kind.")], DataStats())
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    parts = [(trained, tokenizer.decode([i for i, _ in part])) for trained, part in groupby(pairs, lambda p: p[1] >= 0)]
    return "".join(f"⟦{text}⟧" if trained else text for trained, text in parts)


def test_rendering_shows_trained_tokens():
    assert render("chatml") == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
        "⟦Yes?<|im_end|>\n⟧<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n⟦So.<|im_end|>\n⟧"
    )


def test_templates_missing_in_llamafactory_match_stored_renderings():
    assert {name: render(name) for name in table() if name not in GOLDEN["rows"]} == EXPECTED


def test_table_contains_every_llamafactory_template():
    assert len(GOLDEN["rows"]) == 124
    assert set(GOLDEN["rows"]) <= set(table())


@pytest.mark.parametrize("name", representative(GOLDEN["rows"], FAST_TEMPLATES))
def test_template_rows_match_llamafactory(name):
    golden = GOLDEN["rows"][name]
    tokenizer = byte_tokenizer()
    excluded = golden["without"].split(", ")
    examples = [example(case, label) for label, case in (CONVERSATIONS | RANDOM_CASES).items() if label not in excluded]
    assert len(examples) > 4
    configure_tokenizer(load_template(template_options(template=name), tokenizer), tokenizer)
    for options, expected in zip(OPTIONS, golden["rows"].split(), strict=True):
        if expected != "-" and (table()[name].reasoning or not {"enable_thinking", "preserve_thinking"} & set(options)):
            template = load_template(template_options(template=name, truncation="llamafactory", **options), tokenizer)
            rows = [[row["input_ids"], row["labels"]] for row in template.encode(examples, DataStats()) if row]
            assert sha256(json.dumps(rows).encode()).hexdigest()[:8] == expected, options


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_tool_format_matches_llamafactory(name):
    tool_format = TOOL_FORMATS[name]
    turns = [[Call(**call) for call in turn] for turn in CALLS]
    if name == "glm4":
        turns = turns[:1]  # it does not support several calls
    assert [tool_format.write(turn) for turn in turns] == GOLDEN["tool texts"][f"{name} calls"]
    if name != "llama3":  # burnish uses a fixed date instead of the current one
        assert [tool_format.describe(tools) for tools in TOOLS] == GOLDEN["tool texts"][f"{name} tools"]
