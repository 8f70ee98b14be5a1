"""All 124 named templates and 13 tool formats against LLaMA-Factory's (golden/make_templates_golden.py)."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from burnish.data.tally import Tally
from burnish.data.template_table import table
from burnish.data.templates import fit_tokenizer, load_template
from burnish.data.tools import TOOL_FORMATS, Call
from template_cases import CALLS, CONVERSATIONS, DRAWN, OPTIONS, TOOLS, byte_tokenizer, example, template_options

GOLDEN = json.loads((Path(__file__).parent / "golden" / "templates.json").read_text(encoding="utf-8"))


def test_the_table_holds_every_named_template():
    assert len(table()) == 124
    assert set(table()) == set(GOLDEN["rows"])


@pytest.mark.parametrize("name", table())
def test_a_template_gives_the_rows_that_llamafactory_gives(name):
    golden = GOLDEN["rows"][name]
    tokenizer = byte_tokenizer()
    left_out = golden["without"].split(", ")
    examples = [example(case, label) for label, case in (CONVERSATIONS | DRAWN).items() if label not in left_out]
    assert len(examples) > 4
    fit_tokenizer(load_template(template_options(template=name), tokenizer), tokenizer)
    for given, expected in zip(OPTIONS, golden["rows"].split(), strict=True):
        if expected != "-" and (table()[name].reasoning or not {"enable_thinking", "preserve_thinking"} & set(given)):
            template = load_template(template_options(template=name, truncation="llamafactory", **given), tokenizer)
            rows = [[row["input_ids"], row["labels"]] for row in template.encode(examples, Tally()) if row]
            assert sha256(json.dumps(rows).encode()).hexdigest()[:8] == expected, given


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_a_tool_format_writes_what_llamafactory_writes(name):
    tool_format = TOOL_FORMATS[name]
    turns = [[Call(**call) for call in turn] for turn in CALLS]
    if name == "glm4":
        turns = turns[:1]  # it has no way to write two calls
    assert [tool_format.write(turn) for turn in turns] == GOLDEN["tool texts"][f"{name} calls"]
    if name != "llama3":  # it names a fixed date, not the day of tokenising
        assert [tool_format.describe(listed) for listed in TOOLS] == GOLDEN["tool texts"][f"{name} tools"]
