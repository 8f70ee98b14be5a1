"""Parsing of responses: streamed pieces equal the complete response; characters, stop strings, reasoning, tool
calls."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from burnish.data.chat.table import table
from burnish.data.chat.tools.tool_calls import Call
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS
from burnish.inference.replies.replies import ParsedReply, Reply, read_whole
from burnish.inference.replies.reply_forms import ReplyForm, form_of, opens_thought

SPECIAL = ["<|im_end|>", "<|im_start|>", "[TOOL_CALLS]", "<|tool_call>", "<tool_call|>", "<|tool>", "<tool|>"]
SCRIPTS = [
    "plain",
    "naïve café",
    "北京的天气很好。",
    "Привет, мир",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "👍🏽 👩‍👩‍👧 🇮🇹",
    "a\ufffdb",
]
OFFERED = {"get_weather": {"properties": {"city": {"type": "string"}}}, "f": {}}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer, so that each non-ASCII character has several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    result.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    return result


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def feed_randomly(reply: Reply, ids: list[int], random_: random.Random) -> ParsedReply:
    """Feed the ids in chunks of random sizes, and return the parsed response."""
    result, position, tokens = ParsedReply(), 0, 0
    while position < len(ids):
        size = random_.randint(1, 3)
        pieces = reply.feed(ids[position : position + size])
        tokens += sum(piece.tokens for piece in pieces)
        result.add(pieces)
        position += size
    pieces = reply.end()
    assert tokens + sum(piece.tokens for piece in pieces) <= len(ids)
    return result.add(pieces)


@pytest.mark.parametrize("text", SCRIPTS)
def test_streamed_characters_are_complete_and_join_to_the_text(tokenizer, text: str) -> None:
    reply, ids = Reply(ReplyForm(), tokenizer), ids_of(tokenizer, text)
    pieces = [piece.text for i in ids for piece in reply.feed([i])]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + "".join(piece.text for piece in reply.end()) == text


def test_incomplete_final_character_is_emitted_as_replacement(tokenizer) -> None:
    ids = ids_of(tokenizer, "天气")[:-1]
    assert read_whole(ids, ReplyForm(), tokenizer).content == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "stop", "content", "stops"),
    [
        ("one two three", ["two"], "one ", True),
        ("one two three", ["three!", "ree"], "one two th", True),
        ("one two three", ["x"], "one two three", False),
        ("one tw", ["two"], "one tw", False),
        ("aab", ["ab"], "a", True),
        ("good \n\n\n day", ["\n\n"], "good ", True),
        ("天气很好", ["很"], "天气", True),
    ],
)
def test_stop_string_across_tokens_ends_the_text(tokenizer, text, stop, content, stops) -> None:
    for seed in range(4):
        reply = Reply(ReplyForm(), tokenizer, stop=stop)
        ids, result = ids_of(tokenizer, text), ParsedReply()
        for i in ids:
            result.add(reply.feed([i]))
        assert reply.has_stopped == stops, seed
        assert result.add(reply.end()).content == content


@pytest.mark.parametrize(
    ("text", "in_thought", "thought", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\nHm.\n\nOr.\n</think>\n\nYes.", True, "Hm.\n\nOr.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes, <think> is a word.", False, "", "Yes, <think> is a word."),
        ("<think>\nHm.", False, "Hm.", ""),
        ("Yes.\n\nAnd <b>no</b>.", False, "", "Yes.\n\nAnd <b>no</b>."),
        (" Yes.", False, "", " Yes."),
    ],
)
def test_thoughts_are_separated_from_content(tokenizer, text, in_thought, thought, content) -> None:
    ids = ids_of(tokenizer, text)
    for seed in range(6):
        result = feed_randomly(Reply(ReplyForm(), tokenizer, in_thought=in_thought), ids, random.Random(seed))
        assert (result.thought, result.content) == (thought, content)


def form_named(tool_format: str) -> ReplyForm:
    around = {"mistral": ("[TOOL_CALLS]", ""), "gemma4": ("<|tool>", "<tool|>")}.get(tool_format, ("", ""))
    return ReplyForm(reader=TOOL_FORMATS[tool_format].reader, around_calls=around)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.names())
def test_streamed_calls_match_the_complete_response(tokenizer, tool_format: str) -> None:
    calls = [Call("get_weather", {"city": "北京"}), Call("f", {"a": [1, {"b": "x"}], "c": "it's"})]
    calls = calls[: 1 if tool_format == "glm4" else 2]
    form = form_named(tool_format)
    head, tail = form.around_calls
    text = f"{head} {TOOL_FORMATS[tool_format].write(calls)}{tail}"
    preceding = "" if form.reader.only_at_start else "I will look.\n"
    for seed in range(5):
        ids = ids_of(tokenizer, preceding + text + "<|im_end|>")
        result = feed_randomly(Reply(form, tokenizer, offered=OFFERED), ids, random.Random(seed))
        assert result.calls == calls
        assert result.content.strip() == preceding.strip()


# In the format glm4_moe, calls have no end marker, so a call without its last argument is also valid.
@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS.names() if name != "glm4_moe"])
def test_truncated_call_is_never_a_partial_call(tokenizer, tool_format: str) -> None:
    calls = [Call("get_weather", {"city": "Rome"})]
    text = TOOL_FORMATS[tool_format].write(calls).strip()
    for end in range(len(text)):
        result = read_whole(ids_of(tokenizer, text[:end]), form_named(tool_format), tokenizer, offered=OFFERED)
        assert result.calls in ([], calls)
        assert result.calls or result.content == text[:end]


def test_call_of_a_function_not_offered_is_content(tokenizer) -> None:
    text = TOOL_FORMATS["qwen"].write([Call("rm", {"path": "/"})])
    result = read_whole(ids_of(tokenizer, text), form_named("qwen"), tokenizer, offered=OFFERED)
    assert (result.calls, result.content) == ([], text)
    assert read_whole(ids_of(tokenizer, text), form_named("qwen"), tokenizer).content == text


def test_content_continues_after_apparent_call(tokenizer) -> None:
    text = "See <tool_call>\nnot json\n</tool_call> and <tool_call>, which is a word."
    for seed in range(5):
        reply = Reply(form_named("qwen"), tokenizer, offered=OFFERED)
        assert feed_randomly(reply, ids_of(tokenizer, text), random.Random(seed)).content == text


def test_first_call_can_be_the_last(tokenizer) -> None:
    text = TOOL_FORMATS["qwen"].write([Call("f", {}), Call("f", {"a": 1})])
    reply = Reply(form_named("qwen"), tokenizer, offered=OFFERED, only_one_call=True)
    assert ParsedReply().add(reply.feed(ids_of(tokenizer, text))).calls == [Call("f", {})]
    assert reply.has_stopped


def test_control_tokens_are_hidden_unless_requested(tokenizer) -> None:
    ids = ids_of(tokenizer, "a<|im_start|>b<|im_end|>")
    assert read_whole(ids, ReplyForm(), tokenizer).content == "ab"
    reply = Reply(ReplyForm(), tokenizer, skips_special=False, stop_ids=[tokenizer.eos_token_id])
    assert ParsedReply().add([*reply.feed(ids), *reply.end()]).content == "a<|im_start|>b"


def test_randomly_chunked_streams_match_complete_responses(tokenizer) -> None:
    words = ["<think>", "</think>", "\n", "\n\n", "<tool_call>", "</tool_call>", "a", " ", "天", "<", '{"name": "f", ',
             '"arguments": {}}', "stop"]  # fmt: skip
    for seed in range(400):
        random_ = random.Random(seed)
        ids = ids_of(tokenizer, "".join(random_.choices(words, k=random_.randint(1, 12))))
        extra = {
            "offered": OFFERED,
            "stop": random_.choice([[], ["stop", "op"]]),
            "in_thought": random_.random() < 0.3,
        }
        reply = Reply(form_named("qwen"), tokenizer, **extra)
        expected = ParsedReply().add([*reply.feed(ids), *reply.end()])
        assert feed_randomly(Reply(form_named("qwen"), tokenizer, **extra), ids, random_) == expected, tokenizer.decode(
            ids
        )


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.names())
def test_whitespace_around_calls_does_not_depend_on_chunks(tokenizer, tool_format: str) -> None:
    """Also after an apparent call, which is content."""
    write, random_ = TOOL_FORMATS[tool_format].write, random.Random(1)
    call, unknown = write([Call("f", {"a": 1})]), write([Call("unknown", {"a": 1})])
    for text in (
        f"{unknown}\n{call}",
        f"{call}\n\n{call}",
        f"Hi\n{call} \n{call}\n",
        f" {unknown} {call} \n{unknown}\n",
    ):
        ids, form = ids_of(tokenizer, text), form_named(tool_format)
        reply = Reply(form, tokenizer, offered=OFFERED)
        expected = ParsedReply().add([*reply.feed(ids), *reply.end()])
        for _ in range(4):
            assert feed_randomly(Reply(form, tokenizer, offered=OFFERED), ids, random_) == expected


def test_prompt_ending_in_open_thought_is_detected(tokenizer) -> None:
    form = ReplyForm()
    assert opens_thought(ids_of(tokenizer, "<|im_start|>assistant\n<think>\n"), form, tokenizer)
    assert not opens_thought(ids_of(tokenizer, "<think>\n\n</think>\n\n"), form, tokenizer)


CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}CALL{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
CALL_TEMPLATES = {
    "qwen": '<tool_call>\n{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}\n</tool_call>',
    "llama3": '{{ {"name": c.function.name, "parameters": c.function.arguments} | tojson }}',
    "": "(calls {{ c.function.name }})",
}


@pytest.mark.parametrize("tool_format", CALL_TEMPLATES)
def test_tool_format_of_chat_template_is_detected_by_rendering(tokenizer, tool_format: str) -> None:
    from burnish.data.chat.choose import load_template
    from burnish.run.plan.plan import RunOptions

    options = RunOptions()
    tokenizer.chat_template = CHATML.replace("CALL", CALL_TEMPLATES[tool_format])
    try:
        assert form_of(load_template(options, tokenizer)).tool_format == tool_format
    finally:
        tokenizer.chat_template = None


def test_every_template_has_a_tool_call_parser() -> None:
    assert all(TOOL_FORMATS[spec.tool_format].reader for spec in table().values())
