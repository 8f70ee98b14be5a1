"""A saved tokenizer's chat template renders the training text, token for token, for every named template."""

import json

import pytest

from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.chat.table import table
from burnish.data.chat.tools.tools import ToolError, function_schema
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from representative import representative
from template_cases import CONVERSATIONS, FAST_TEMPLATES, byte_tokenizer, example, template_options, to_chat_messages

THINKING = [{}, {"mask_history": True}, {"enable_thinking": False}, {"enable_thinking": None, "mask_history": True}]


def load_and_save(name, tokenizer, **options):
    """Load a template and set the tokenizer's chat template as it is saved after training."""
    template = load_template(template_options(template=name, **options), tokenizer)
    configure_tokenizer(template, tokenizer)
    tokenizer.chat_template = template.jinja()
    return template


def is_unsupported(label, spec):
    """Tell whether a template drops this case: several calls in glm4's format, calls after words of other templates."""
    return {
        "tools at once": spec.tool_format == "glm4",
        "tool after a thought": spec.thought_words != ("<think>\n", "\n</think>\n\n"),
        "tool in tags": spec.tool_call_words != ("<tool_call>", "</tool_call>"),
    }.get(label, False)


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", representative(table(), FAST_TEMPLATES))
def test_saved_chat_template_renders_trained_tokens(name):
    spec = table()[name]
    tokenizer = byte_tokenizer()
    for options in THINKING if name in ("qwen3", "glm4_7", "gpt_oss", "gemma4") else THINKING[:1]:
        template = load_and_save(name, tokenizer, **options)
        for label, case in CONVERSATIONS.items():
            row = template.encode([example(case)], DataStats())[0]
            if row is None:
                assert is_unsupported(label, spec)
                continue
            tools = [function_schema(tool) for tool in json.loads(case["tools"])] if case["tools"] else None
            if spec.tool_list_format in ("phi4_mini", "seed_oss") and tools:
                tools = json.loads(case["tools"])  # they print each tool as it is, with or without "type": "function"
            chat = to_chat_messages(example(case), spec)
            result = tokenizer.apply_chat_template(
                chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            assert result["input_ids"] == row["input_ids"], label
            if not spec.efficient_eos and not options.get("mask_history"):
                # With efficient_eos, the label EOS is at the position of another token, which no mask can represent.
                assert [bool(m) for m in result["assistant_masks"]] == [i != -100 for i in row["labels"]], label
            prompt = tokenizer.apply_chat_template(
                chat[:-1], tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert prompt == template.prompt(example(case)), label


def test_response_header_is_rendered_only_on_request():
    tokenizer = byte_tokenizer()
    requests = [{"role": "user", "content": "hi"}]
    for name, header in {
        "qwen": "<|im_start|>assistant\n",
        "alpaca": "\n\n### Response:\n",
        "default": "Assistant:",
    }.items():
        load_and_save(name, tokenizer)
        without = tokenizer.apply_chat_template(requests, tokenize=False)
        assert tokenizer.apply_chat_template(requests, tokenize=False, add_generation_prompt=True) == without + header


def test_results_of_several_tools_are_one_message():
    tokenizer = byte_tokenizer()
    load_and_save("qwen", tokenizer)
    chat = [{"role": "user", "content": "hi"}, *({"role": "tool", "content": text} for text in ("one", "two"))]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    expected = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert f"<|im_start|>user\n{expected}<|im_end|>\n" in text
    assert text.count("<|im_start|>user") == 2


def test_role_without_slots_is_rejected_by_name():
    tokenizer = byte_tokenizer()
    load_and_save("qwen", tokenizer)
    with pytest.raises(Exception, match="does not support the role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


def test_thinking_can_be_disabled_at_inference():
    tokenizer = byte_tokenizer()
    load_and_save("qwen3", tokenizer)
    options = {"conversation": [{"role": "user", "content": "hi"}], "tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(**options).endswith("assistant\n")
    assert tokenizer.apply_chat_template(**options, enable_thinking=False).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )
    load_and_save("qwen3", tokenizer, enable_thinking=False)
    assert tokenizer.apply_chat_template(**options).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.apply_chat_template(**options, enable_thinking=True).endswith("assistant\n")


def test_unsupported_parallel_calls_are_rejected_by_encoder_and_jinja_template():
    tokenizer = byte_tokenizer()
    template = load_and_save("glm4", tokenizer)
    case = CONVERSATIONS["tools at once"]
    stats = DataStats()
    assert template.encode([example(case)], stats) == [None]
    assert [reason for reason, _ in stats] == [
        "dropped: several tool calls in a turn, which the glm4 tool format does not support"
    ]
    with pytest.raises(ToolError, match="several tool calls"):
        template.prompt(example(case))
    with pytest.raises(Exception, match="several tool calls"):
        tokenizer.apply_chat_template(to_chat_messages(example(case), table()["glm4"]), tokenize=False)


def test_text_in_parts_is_rendered_as_text():
    tokenizer = byte_tokenizer()
    template = load_and_save("llama3", tokenizer)
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "ho"}]
    row = template.encode([Example((Message("user", "hi"), Message("assistant", "ho")))], DataStats())[0]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == row["input_ids"]


@pytest.mark.parametrize("name", ["qwen", "qwen3", "llama3", "gemma", "mistral", "alpaca", "gpt_oss", "glm4"])
def test_retrained_model_reads_its_saved_template_as_trained(name):
    tokenizer = byte_tokenizer()
    template = load_and_save(name, tokenizer)
    reloaded = load_template(template_options(), tokenizer)
    for label in ("one turn", "system, three turns", "thoughts"):
        first, second = (t.encode([example(CONVERSATIONS[label])], DataStats())[0] for t in (template, reloaded))
        assert second["input_ids"] == first["input_ids"], label
        # glm4 and gpt_oss train EOS at the first token of the next turn; a chat template can mark only EOS itself.
        differ = [
            position for position, (a, b) in enumerate(zip(first["labels"], second["labels"], strict=True)) if a != b
        ]
        turns = len(CONVERSATIONS[label]["messages"]) // 2
        assert len(differ) == (turns - 1 if name in ("glm4", "gpt_oss") else 0), label
