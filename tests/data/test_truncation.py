"""Rows longer than cutoff_len: what is removed, what remains, and how it is reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.chat.plain import PlainOptions, PlainTemplate
from burnish.data.chat.truncate import infer_seqlen
from burnish.data.stats import DataStats
from burnish.loop.types import IGNORE_INDEX, Example, Message, as_lists
from template_cases import CALL, WEATHER, byte_tokenizer, template_options

GOLDEN = Path(__file__).parents[1] / "golden" / "truncation_packing_pretrain.json"
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>\n"
LONG = (Message("user", "question " * 20), Message("assistant", "answer " * 20))


def load(name="chatml", **options):
    tokenizer = byte_tokenizer()
    template = load_template(template_options(template=name, **options), tokenizer)
    configure_tokenizer(template, tokenizer)
    return template, tokenizer


def encode(template, *messages, **options):
    stats = DataStats()
    row = template.encode([Example(messages, source="d.json", number=7, **options)], stats)[0]
    return row, dict(stats.records)


def test_prompts_of_pairs_are_not_kept_after_an_error():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = PlainTemplate(PlainOptions(20, "keep_start", on_too_long="raise"), tokenizer)

    def example(prompt, answer):
        question = Message("user", prompt, train=False)
        return Example(messages=(question, *answer), source="a", number=1)

    answers = [(Message("assistant", text),) for text in ("x" * 30, "y")]
    pair = replace(example("Hello", ()), chosen=answers[0], rejected=answers[1])
    with pytest.raises(UserError, match="more than cutoff_len"):
        template.encode_pairs([pair], DataStats())
    (row,) = template.encode([example("Hey", answers[1])], DataStats())
    assert row["labels"] == [*[IGNORE_INDEX] * 3, *tokenizer.encode("y", add_special_tokens=False)]


def test_turn_lengths_are_shared_as_in_llamafactory():
    answers = [case for case in json.loads(GOLDEN.read_text(encoding="utf-8")) if case["fn"] == "infer_seqlen"]
    assert len(answers) == 9
    for case in answers:
        assert list(infer_seqlen(*case["args"])) == case["out"], case["args"]


@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_plain_texts_are_truncated_as_in_llamafactory_on_request(name):
    from transformers import AutoTokenizer

    case = next(
        case
        for case in json.loads(GOLDEN.read_text(encoding="utf-8"))
        if case["fn"] == "pretrain" and case["template"] == name and not case["packing"]
    )
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN.parent / "tokenizer")
    options = template_options(template=name, truncation="llamafactory", cutoff_len=40, missing_control_tokens="split")
    template = load_template(options, tokenizer)
    configure_tokenizer(template, tokenizer)
    texts = ["Document one. " * 5, "Second doc. " * 40]
    rows = [as_lists(row) for row in template.encode_text([Example(text=text) for text in texts], DataStats())]
    assert rows[0]["input_ids"] == case["out"]["input_ids"][0]
    assert rows[1]["input_ids"] == case["out"]["input_ids"][1][:40]


@pytest.mark.parametrize("cutoff", [60, 61, 97, 150, 300])
def test_truncated_row_keeps_headers_and_end_tokens_and_fills_cutoff_len(cutoff):
    template, tokenizer = load(cutoff_len=cutoff)
    row, message = encode(template, *LONG)
    text = tokenizer.decode(row["input_ids"])
    assert len(row["input_ids"]) == cutoff
    question, answer = text.removeprefix("<|im_start|>user\n").removesuffix(END).split(END + HEADER)
    assert question
    assert LONG[0].content.startswith(question)
    assert answer
    assert LONG[1].content.startswith(answer)
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == answer + END
    assert message == {"truncated: messages shortened to cutoff_len": [("d.json", 7)]}


def test_question_and_answer_lengths_match_infer_seqlen():
    template, _ = load(cutoff_len=200)
    full_row, _ = encode(load()[0], *LONG)
    source, target = full_row["labels"].count(-100), len(full_row["labels"]) - full_row["labels"].count(-100)
    row, _ = encode(template, *LONG)
    prompt_length = row["labels"].count(-100)
    assert (prompt_length, len(row["labels"]) - prompt_length) == infer_seqlen(source, target, 200)


def test_llamafactory_truncation_cuts_end_tokens_and_is_counted():
    template, tokenizer = load(cutoff_len=100, truncation="llamafactory")
    row, message = encode(template, *LONG)
    assert len(row["input_ids"]) == 100
    assert not tokenizer.decode(row["input_ids"]).endswith(END)
    assert message == {
        "truncated: messages shortened to cutoff_len": [("d.json", 7)],
        "kept, but its end-of-turn token does not contribute to the loss": [("d.json", 7)],
    }


def test_turn_that_does_not_fit_is_dropped_with_all_following():
    template, tokenizer = load(cutoff_len=70)
    short = (Message("user", "hi"), Message("assistant", "hello"))
    row, message = encode(template, *short, *LONG, *short)
    assert tokenizer.decode(row["input_ids"]).startswith(
        f"<|im_start|>user\nhi{END}{HEADER}hello{END}<|im_start|>user\nq"
    )
    assert message == {
        "truncated: turns beyond cutoff_len were removed": [("d.json", 7)],
        "truncated: messages shortened to cutoff_len": [("d.json", 7)],
    }
    short_row, message = encode(load(cutoff_len=40)[0], *short, *LONG)
    assert tokenizer.decode(short_row["input_ids"]) == f"<|im_start|>user\nhi{END}{HEADER}hello{END}"
    assert message == {"truncated: turns beyond cutoff_len were removed": [("d.json", 7)]}


def test_last_turn_keeps_its_length_if_only_last_answer_is_trained():
    template, tokenizer = load(cutoff_len=60, mask_history=True)
    short = (Message("user", "hi"), Message("assistant", "hello"))
    row, _ = encode(template, *LONG, *short)
    assert tokenizer.decode(row["input_ids"]).endswith(f"<|im_start|>user\nhi{END}{HEADER}hello{END}")
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "hello" + END


@pytest.mark.parametrize("cutoff", [1, 5])
def test_row_without_space_for_one_turn_is_dropped_and_counted(cutoff):
    for name in ("chatml", "glm4"):
        row, message = encode(load(name, cutoff_len=cutoff)[0], *LONG)
        assert row is None
        assert "dropped: no trainable tokens" in message


def test_long_rows_can_be_dropped_or_raise():
    row, message = encode(load(cutoff_len=100, on_too_long="drop")[0], *LONG)
    assert row is None
    assert message == {"dropped: longer than cutoff_len": [("d.json", 7)]}
    template, _ = load(cutoff_len=100, on_too_long="raise")
    fits = Example((Message("user", "a"), Message("assistant", "b")), source="d.json", number=1)
    examples = [fits, *(Example(LONG, source="d.json", number=number) for number in (2, 3))]
    with pytest.raises(UserError) as raised:
        template.encode(examples, DataStats())
    assert [problem.where for problem in raised.value.problems] == ["d.json, record 2", "d.json, record 3"]
    assert template.encode(examples[:1], DataStats())[0] is not None


def test_long_system_message_is_shortened_before_short_question():
    template, tokenizer = load(cutoff_len=120)
    row, _ = encode(template, Message("user", "who?"), Message("assistant", "me"), system="rules " * 50)
    text = tokenizer.decode(row["input_ids"])
    assert f"who?{END}{HEADER}me{END}" in text
    assert text.startswith("<|im_start|>system\nrules rules")


def test_thought_is_shortened_before_its_answer():
    template, tokenizer = load("qwen3", cutoff_len=120)
    thought = f"<think>\n{'hm ' * 60}\n</think>\n\nforty-two"
    row, _ = encode(template, Message("user", "?"), Message("assistant", thought))
    text = tokenizer.decode(row["input_ids"])
    assert text.endswith(f"\n</think>\n\nforty-two{END}")
    assert len(row["input_ids"]) == 120


def test_tool_calls_and_tool_lists_are_never_truncated():
    tools = json.dumps([WEATHER])
    message = (
        Message("user", "weather? " * 9),
        Message("function", CALL),
        Message("observation", "cold " * 99),
        LONG[1],
    )
    full_row, _ = encode(load("qwen")[0], *message, tools=tools)
    template, tokenizer = load("qwen", cutoff_len=len(full_row["input_ids"]) - 300)
    row, reasons = encode(template, *message, tools=tools)
    text = tokenizer.decode(row["input_ids"])
    assert json.dumps({"type": "function", "function": WEATHER}) in text
    assert CALL in text
    assert "truncated: messages shortened to cutoff_len" in reasons
    short_row, reasons = encode(load("qwen", cutoff_len=300)[0], *message, tools=tools)
    assert short_row is None  # the tools alone are longer
    assert "truncated: turns beyond cutoff_len were removed" in reasons


def test_truncated_text_keeps_its_eos():
    template, tokenizer = load("default", cutoff_len=10)
    stats = DataStats()
    row = as_lists(template.encode_text([Example(text="once upon a time", source="d", number=1)], stats)[0])
    assert tokenizer.decode(row["input_ids"]) == "once upon</s>"
    assert stats.count("truncated: messages shortened to cutoff_len") == 1
    full_row = as_lists(template.encode_text([Example(text="once upon a time")], DataStats(), truncate=False)[0])
    assert tokenizer.decode(full_row["input_ids"]) == "once upon a time</s>"


def test_truncated_completion_keeps_eos_and_shares_length_with_prompt():
    template, tokenizer = load("default", cutoff_len=12)
    row = template.encode([Example(prompt="p" * 30, completion="c" * 30)], DataStats())[0]
    assert tokenizer.decode(row["input_ids"]) == "pppppp" + "ccccc</s>"


def test_template_closed_by_one_eos_keeps_it():
    template, tokenizer = load("glm4", cutoff_len=60)
    row, _ = encode(template, *LONG)
    assert len(row["input_ids"]) == 60
    assert tokenizer.decode(row["input_ids"]).endswith("</s>")
    assert "<|assistant|>\nanswer" in tokenizer.decode(row["input_ids"])


def test_packing_can_reserve_one_token():
    tokenizer = byte_tokenizer()
    template = load_template(template_options(template="chatml", cutoff_len=97), tokenizer, cutoff_len=96)
    configure_tokenizer(template, tokenizer)
    assert len(encode(template, *LONG)[0]["input_ids"]) == 96
