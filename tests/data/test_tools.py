"""Tools and tool calls: parsing of records, rejected input, and equal output of the Jinja templates."""

import json

import pytest

from burnish.config.errors import UserError
from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.chat.tools.tool_calls import Call
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS, describe_tools, exact_jinja
from burnish.data.chat.tools.tools import ToolError, read_calls
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from template_cases import CALL, CALLS, TOOLS, WEATHER, byte_tokenizer, example, template_options

THOUGHT, TAGS = ("<think>\n", "\n</think>\n\n"), ("<tool_call>", "</tool_call>")
PARSED = Call("get_weather", {"city": "Paris", "unit": "c"})


def test_all_13_tool_formats_exist():
    assert sorted(TOOL_FORMATS.names()) == [
        "default", "gemma4", "glm4", "glm4_moe", "lfm2", "ling", "llama3", "minimax1", "minimax2", "mistral", "qwen",
        "qwen3_5", "seed_oss",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "before", "calls"),
    [
        (CALL, "", [PARSED]),
        (f"[{CALL}, {CALL}]", "", [PARSED, PARSED]),
        (f"<think>\nhm\n</think>\n\n{CALL}", "<think>\nhm\n</think>\n\n", [PARSED]),
        (f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "I look.\n", [PARSED]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "\n", [PARSED, PARSED]),
    ],
)
def test_calls_are_parsed_with_preceding_text(content, before, calls):
    assert read_calls(content, THOUGHT, TAGS) == (before, calls)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("call the weather", "not valid JSON"),
        (f"I look. {CALL}", "not valid JSON"),
        ('{"name": "f"}', 'has no "name" or "arguments"'),
        ('["f"]', 'has no "name" or "arguments"'),
        ("[]", "an empty list of tool calls"),
        ('{"name": "f", "arguments": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 9**5, "not valid JSON"),
    ],
)
def test_invalid_calls_are_rejected(content, message):
    with pytest.raises(ToolError, match=message):
        read_calls(content, THOUGHT, TAGS)


@pytest.mark.parametrize("tools", ["{", '{"name": "f"}', '["f"]', '[{"description": "nameless"}]'])
def test_invalid_tool_lists_are_rejected(tools):
    with pytest.raises(ToolError, match=r"tools are not|a tool has no name"):
        describe_tools(tools, "default")


def test_no_tools_give_no_text():
    assert describe_tools("[]", "qwen") == ""


@pytest.mark.parametrize("name", ["glm4_moe", "lfm2", "minimax2", "qwen3_5", "seed_oss"])
def test_per_argument_formats_accept_text_arguments(name):
    write = TOOL_FORMATS[name].write
    assert write([Call("f", '{"a": 1}')]) == write([Call("f", {"a": 1})])
    with pytest.raises(ToolError, match="not a JSON object"):
        write([Call("f", [1])])


@pytest.mark.parametrize("name", [*TOOL_FORMATS.names(), "phi4_mini"])
def test_transformers_chat_template_renders_as_trained(name):
    row, tokenizer = TOOL_FORMATS[name], byte_tokenizer()

    def render(source, **variables):
        tokenizer.chat_template = exact_jinja(row.macros + source)
        return tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, **variables)

    for tools in TOOLS:
        assert render(row.tools, tools=tools) == row.describe(tools)
    for turn in CALLS[: 1 if name == "glm4" else None]:
        wrapped = [{"type": "function", "function": call} for call in turn]
        expected = row.write([Call(**call) for call in turn])
        assert render(row.calls, calls=turn) == render(row.calls, calls=wrapped) == expected


def test_tool_format_can_be_overridden():
    tokenizer = byte_tokenizer()
    template = load_template(template_options(template="qwen", tool_format="mistral"), tokenizer)
    configure_tokenizer(template, tokenizer)
    message = (Message("user", "x"), Message("function", CALL))
    text = tokenizer.decode(
        template.encode([Example(message, tools=json.dumps([WEATHER]))], DataStats())[0]["input_ids"]
    )
    assert "[AVAILABLE_TOOLS] [" in text
    assert text.endswith(f"assistant\n[{CALL}]<|im_end|>")  # with plain slots, as in LLaMA-Factory
    with pytest.raises(UserError, match="qwem"):
        load_template(template_options(template="qwen", tool_format="qwem"), tokenizer)


def test_empty_tool_list_renders_no_tools_section():
    tokenizer = byte_tokenizer()
    template = load_template(template_options(template="qwen"), tokenizer)
    case = {"messages": [("user", "a"), ("assistant", "b")], "system": "S", "tools": "[]"}
    assert "Tools" not in tokenizer.decode(template.encode([example(case)], DataStats())[0]["input_ids"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen", "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>"),
        ("youtu", "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|Assistant|>"),
        ("minimax2", "<response>one</response>\n<response>two</response>[e~["),
        ("llama3", "ipython<|end_header_id|>\n\none\ntwo<|eot_id|>"),
        ("glm4", "<|observation|>\none\ntwo<|assistant|>"),
    ],
)
def test_parallel_tool_results_are_tagged_individually(name, expected):
    tokenizer = byte_tokenizer("<tool_response>", "</tool_response>")  # special tokens, but text in records
    template = load_template(template_options(template=name), tokenizer)
    configure_tokenizer(template, tokenizer)
    answers = [Message("observation", message) for message in ("one", "two")]
    call = Message("function", json.dumps(CALLS[0][0]))
    row = template.encode([Example((Message("user", "x"), call, *answers, Message("assistant", "y")))], DataStats())[0]
    assert expected in tokenizer.decode(row["input_ids"])
    tags = {tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_response>", "</tool_response>")}
    assert sum(token in tags for token in row["input_ids"]) == expected.count("tool_response>")
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLS[0][0]}]},
        *({"role": "tool", "content": message} for message in ("one", "two")),
        {"role": "assistant", "content": "y"},
    ]
    tokenizer.chat_template = template.jinja()
    assert tokenizer.apply_chat_template(chat, return_dict=False) == row["input_ids"]
