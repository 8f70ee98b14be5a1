"""Conversations, tools and a tokenizer for template tests, created in memory and equal on every machine."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.data.chat.choose import TemplateOptions
from burnish.data.chat.table import table
from burnish.data.chat.tools.tools import read_calls
from burnish.data.chat.truncate import EncodingOptions
from burnish.loop.types import Example, Message

FAST_TEMPLATES = {
    "alpaca",
    "chatml",
    "default",
    "deepseek3",
    "gemma",
    "glm4",
    "gpt_oss",
    "llama2",
    "llama3",
    "mistral",
    "phi4",
    "qwen3",
}
"""Representative templates, tested in ``make test-fast``."""


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "templates.json").read_text(encoding="utf-8"))
"""LLaMA-Factory's rows of the cases below (golden/make_templates_golden.py)."""

WEATHER = {
    "name": "get_weather",
    "description": "Look up weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "city name"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "查询",
        "description": '查\n询 "q"',
        "parameters": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": []},
        "response": {"type": "object", "description": "r"},
    },
}
TOOLS = [[WEATHER], [SEARCH, WEATHER], [{"name": "now", "parameters": {"type": "object", "properties": {}}}]]
CALLS = [
    [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "c"}}],
    [
        {"name": "get_weather", "arguments": {"city": '東京 "x"', "n": 3, "f": 1.5, "yes": True, "none": None}},
        {"name": "查询", "arguments": {"l": [1, "a", {"q": "r", "B": False}], "o": {"b": 1, "a": "{key}{value}"}}},
    ],
]
CALL, CALLS_AT_ONCE = json.dumps(CALLS[0][0]), json.dumps(CALLS[1], ensure_ascii=False)


def _case(*messages, system="", tools=None):
    roles = ("user", "assistant") * len(messages)
    message = [m if isinstance(m, tuple) else (roles[at], m) for at, m in enumerate(messages)]
    return {"messages": message, "system": system, "tools": json.dumps(tools, ensure_ascii=False) if tools else ""}


CONVERSATIONS = {
    "one turn": _case("hi", "hello there"),
    "system, three turns": _case("hi", "hello", "name?", "I am.", "bye", "see you", system="Be brief."),
    "unicode": _case(
        "  spaces \n\n日本語 😀🏽 café ", " réponse\n\n```py\nx=1\n```\n", "{{content}} {x}", "{{ ok }} }}{{"
    ),
    "thoughts": _case("1", "<think>\na\n</think>\n\nb", "2", "c", "3", "<think>\nd\n</think>\n\n\ne", system="S"),
    "half a thought": _case("1", "open</think>\n\na", "2", "<think>b"),
    "tools unused": _case("hi", "hello", tools=TOOLS[0]),
    "tool": _case("w?", ("function", CALL), ("observation", '{"t": 1}'), "cold", "thanks", "np", tools=TOOLS[0]),
    "tool after a thought": _case(
        "w?", ("function", f"<think>\nsee\n</think>\n\n{CALL}"), ("observation", "1"), "<think>\nok\n</think>\n\ncold",
        system="S", tools=TOOLS[1],
    ),
    "tool in tags": _case(
        "w?", ("function", f"I call.\n<tool_call>\n{CALL}\n</tool_call>"), ("observation", "1"), "cold", tools=TOOLS[1]
    ),
    "tools at once": _case("w?", ("function", CALLS_AT_ONCE), ("observation", "[1, 2]"), "done", tools=TOOLS[1]),
    "observation first": _case(("observation", '{"x": 1}'), "one", system="S", tools=TOOLS[0]),
    "long": _case(
        *(f"{word} number {at} " * 6 for at in range(4) for word in ("question", "reply")), system="Long. " * 9
    ),
}  # fmt: skip


def _random_case(seed):
    """Return a random conversation: unusual texts, with calls, observations and thoughts in any order."""
    draw = random.Random(seed)
    texts = [
        "hi",
        "日本語",
        "😀🏽",
        "\n",
        "  ",
        "{{content}}",
        "a\\nb",
        "\r\n",
        "<b>",
        "'q' \"d\"",
        "Assistant:",
        "word " * 9,
    ]

    def text(least=0):
        return "".join(draw.choice(texts) for _ in range(draw.randint(least, 6)))

    def answer():
        if draw.random() < 0.4:
            calls = [{"name": draw.choice("fg"), "arguments": {text(1): draw.choice([text(), 7, None, [True]])}}]
            return "function", json.dumps(calls, ensure_ascii=draw.random() < 0.5)
        thought = draw.choice(
            ["", "", f"<think>\n{text()}\n</think>\n\n", "<think>\n\n</think>\n\n", f"{text()}</think>"]
        )
        return "assistant", thought + text()

    turns = [(draw.choice(["user", "user", "observation"]), text()) for _ in range(draw.randint(2, 4))]
    messages = [message for question in turns for message in (question, answer())]
    return _case(*messages, system=draw.choice(["", text()]), tools=draw.choice([None, TOOLS[0], TOOLS[2]]))


RANDOM_CASES = {f"drawn {seed}": _random_case(seed) for seed in range(6)}
OPTIONS = [
    {},
    {"mask_history": True},
    {"train_on_prompt": True},
    {"enable_thinking": False},
    {"enable_thinking": None, "mask_history": True},
    {"mask_history": True, "preserve_thinking": True},
    {"cutoff_len": 150},
    {"cutoff_len": 230, "mask_history": True},
]


def example(case, name=""):
    messages = tuple(Message(role, content) for role, content in case["messages"])
    return Example(messages, case["system"], case["tools"], source=name, number=1)


def byte_tokenizer(*more, bos="<s>", eos="</s>"):
    """Return a tokenizer with a token per byte and per control token of all named templates. Those of burnish's own
    templates are last, so that the other ids are those of the golden rows."""
    tokens = {bos: None, eos: None, "<think>": None, "</think>": None, "<tool_call>": None, "</tool_call>": None}
    for _, spec in sorted(table().items(), key=lambda row: row[0] not in GOLDEN["rows"]):
        tokens |= dict.fromkeys((*spec.control_tokens, *spec.stop_words))
    vocab = {byte: at for at, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*filter(None, tokens), *more])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


def template_options(**options):
    """Return template options as one flat object, as components receive them."""
    return SimpleNamespace(**(vars(TemplateOptions()) | vars(EncodingOptions()) | options))


def to_chat_messages(turns, spec):
    """Return the messages in the format of transformers."""
    chat = [{"role": "system", "content": turns.system}] if turns.system else []
    for message in turns.messages:
        if message.role == "function":
            content, calls = read_calls(message.content, spec.thought_words, spec.tool_call_words)
            tool_calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
            chat.append({"role": "assistant", "content": content, "tool_calls": tool_calls})
        else:
            chat.append({"role": {"observation": "tool"}.get(message.role, message.role), "content": message.content})
    return chat
