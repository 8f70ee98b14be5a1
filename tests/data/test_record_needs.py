"""The record types and additional columns that a stage can request."""

import json
from random import Random

import pytest

from burnish.config.errors import UserError
from burnish.data.options import DataOptions
from burnish.data.sets.formats import FORMATS
from burnish.data.sets.preferences import with_other_answers
from burnish.data.sets.records import RecordNeeds
from burnish.data.sets.sources import load_datasets
from burnish.data.sets.trl import examples_of, trl_layout
from burnish.data.stats import DataStats, drop_reason
from burnish.data.template_arguments import NO_TEMPLATE, arguments_of
from burnish.loop.types import Example


def examples(folder, rows, needs, **overrides):
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = DataOptions(dataset=[str(file)], **overrides)
    return list(load_datasets(options, 0, DataStats(), bool(overrides.get("streaming")), needs=needs).train)


@pytest.mark.parametrize(
    "rows",
    [
        [{"instruction": "Hi", "input": ""}],
        [{"instruction": "Hi", "output": None}],
        [{"messages": [{"role": "user", "content": "Hi"}]}],
        [{"conversations": [{"from": "human", "value": "Hi"}]}],
        [{"prompt": [{"role": "user", "content": "Hi"}]}],
    ],
)
def test_prompts_do_not_require_answers(tmp_path, rows):
    (example,) = examples(tmp_path, rows, RecordNeeds("prompts"))
    assert [(message.role, message.text) for message in example.messages] == [("user", "Hi")]


def test_text_prompt_does_not_require_completion(tmp_path):
    (example,) = examples(tmp_path, [{"prompt": "Hi"}], RecordNeeds("prompts"))
    assert (example.prompt, example.completion) == ("Hi", None)
    with pytest.raises(UserError):
        examples(tmp_path, [{"prompt": "Hi"}], RecordNeeds())


@pytest.mark.parametrize("streaming", [False, True])
def test_extra_columns_of_a_record_are_kept_with_its_example(tmp_path, streaming):
    rows = [{"instruction": "Hi", "output": "Ho", "solution": "42"}, {"instruction": "Hi", "output": "Ho"}]
    needs = RecordNeeds(columns=("solution",), stage="grpo")
    result = examples(tmp_path, rows, needs, streaming=streaming)
    assert [example.extra for example in result] == [{"solution": "42"}, {"solution": None}]
    with pytest.raises(UserError, match=r'stage: grpo requires the column "solution".*Found: instruction'):
        examples(tmp_path, rows[1:], needs)


def test_extra_column_that_is_nested_too_deeply_is_rejected(tmp_path):
    deep, flat = json.loads("[" * 500 + "]" * 500), json.loads("[" * 50 + "]" * 50)
    rows = [{"instruction": "Hi", "output": "Ho", "solution": value} for value in (flat, {"a": deep})]
    needs = RecordNeeds(columns=("*",), stage="grpo")
    with pytest.raises(UserError, match=r'record 2 .*"solution" is nested more than 100 levels deep'):
        examples(tmp_path, rows, needs)
    assert len(examples(tmp_path, rows, needs, on_bad_record="drop")) == 1


def test_extra_columns_are_part_of_the_fingerprint(tmp_path):
    rows = [{"instruction": "Hi", "output": "Ho", "solution": "42"}]
    file = tmp_path / "rows.jsonl"
    hashes = set()
    for solution in ("42", "43"):
        file.write_text(json.dumps({**rows[0], "solution": solution}))
        for columns in ((), ("solution",)):
            options = DataOptions(dataset=[str(file)])
            hashes.add(load_datasets(options, 0, DataStats(), needs=RecordNeeds(columns=columns)).fingerprint)
    assert len(hashes) == 3


def test_format_can_define_its_own_record_type(tmp_path, monkeypatch):
    monkeypatch.setattr(FORMATS, "_members", dict(FORMATS._members))

    @FORMATS.register("rated", columns={"prompt": "question", "response": "answer", "stars": "stars"}, holds="ratings")
    def rated(record):
        """An answer with a number of stars."""
        return record.example(prompt=record.text("prompt"), completion=record.text("response"),
                              margin=record.value("stars"))  # fmt: skip

    rows = [{"question": "Hi", "answer": "Ho", "stars": 4}]
    (example,) = examples(tmp_path, rows, RecordNeeds("ratings"))
    assert (example.prompt, example.completion, example.margin) == ("Hi", "Ho", 4)
    with pytest.raises(UserError, match="do not match a known format"):
        examples(tmp_path, rows, RecordNeeds())


@pytest.mark.parametrize("prompt", ["Hi", [{"role": "user", "content": "Hi"}]])
def test_columns_without_a_required_part_are_rejected(tmp_path, prompt):
    message = '"columns" must contain "response" for the format prompt_completion'
    with pytest.raises(UserError, match=message):
        examples(tmp_path, [{"q": prompt}], RecordNeeds(), formatting="prompt_completion", columns={"prompt": "q"})


def test_label_of_token_ids_that_is_a_list_is_rejected():
    values = {"prompt_ids": [1], "completion_ids": [2], "label": [True]}
    with pytest.raises(UserError, match='"label" must be true or false'):
        examples_of([(values, "set", 1)], trl_layout("unpaired", values), DataStats(), "raise")


@pytest.mark.parametrize("margin", ["NaN", "1e400", "-1e400", f"1{'0' * 400}", "true"])
def test_margin_that_is_no_finite_number_is_rejected(tmp_path, margin):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "Hi", "chosen": "Hello", "rejected": "No", "margin": {margin}}}')
    with pytest.raises(UserError, match='"margin" must be a finite number'):
        load_datasets(DataOptions(dataset=[str(file)]), 0, DataStats(), needs=RecordNeeds("pairs", stage="rm"))


@pytest.mark.parametrize("kind", ["pairs", "unpaired"])
@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_without_prompt_begin_with_it(tmp_path, kind, streaming):
    hi, texts = {"role": "user", "content": "Hi"}, ("Hello", "No")
    answers = [[hi, {"role": "assistant", "content": text}] for text in texts]
    needs = RecordNeeds(kind, stage="dpo" if kind == "pairs" else "kto")
    example = examples(
        tmp_path, [dict(zip(("chosen", "rejected"), answers, strict=True))] * 2, needs, streaming=streaming
    )[0]
    assert [(message.role, message.text) for message in example.messages][:1] == [("user", "Hi")]
    if kind == "pairs":
        assert [answer[-1].text for answer in (example.chosen, example.rejected)] == [*texts]


def test_text_pairs_without_prompt_begin_with_it(tmp_path):
    rows = [{"chosen": "Capital of France? Paris", "rejected": "Capital of France? Rome"}]
    (example,) = examples(tmp_path, rows, RecordNeeds("pairs", stage="dpo"))
    assert (example.prompt, example.chosen, example.rejected) == ("Capital of France?", " Paris", " Rome")


def test_pair_in_one_column_names_the_column(tmp_path):
    rows = [{"instruction": "q", "input": "", "output": ["good", "bad"]}]
    with pytest.raises(UserError, match=r'"output" is a list of responses\. Write the better one to "chosen"'):
        examples(tmp_path, rows, RecordNeeds("pairs", stage="dpo"))


# --- pairs, described by an entry -------------------------------------------------------------------------------------


def pairs(rows, **entry):
    info = {"mine": {"records": rows, "ranking": True, **entry}}
    options = DataOptions(dataset=["mine"], dataset_dir=info)
    return list(load_datasets(options, 0, DataStats(), needs=RecordNeeds("pairs", stage="dpo")).train)


@pytest.mark.parametrize("columns", [{}, {"columns": {"chosen": "chosen", "rejected": "rejected"}}])
def test_pair_whose_responses_begin_with_the_prompt_needs_no_prompt_column(columns):
    def turns(answer):
        return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]

    (example,) = pairs([{"chosen": turns("Ho"), "rejected": turns("Hu")}], **columns)
    assert [(message.role, message.text) for message in example.messages] == [("user", "Hi")]
    assert [[message.text for message in answer] for answer in (example.chosen, example.rejected)] == [["Ho"], ["Hu"]]
    (example,) = pairs([{"chosen": "Hi\nHo", "rejected": "Hi\nHu"}], **columns)
    assert (example.prompt, example.chosen, example.rejected) == ("Hi", "\nHo", "\nHu")


@pytest.mark.parametrize(
    ("record", "entry", "remedy"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {},
         "Set formatting: prompt_completion to use the prompts only. To train on the pairs, set stage: dpo without "
         "online: true."),
        ({"chosen": "q a", "rejected": "q b"}, {}, 'Add a column "prompt" to use the prompts only.'),
        ({"prompt": "q", "completion": "a", "label": True}, {}, "To train on the labels, set stage: kto."),
        ({"prompt": "q", "good": "a", "bad": "b"}, {"columns": {"chosen": "good", "rejected": "bad"}},
         "Remove chosen, rejected from its entry to use the prompts only."),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"ranking": True}, "Remove ranking from its entry"),
    ],
)  # fmt: skip
def test_error_explains_how_to_use_prompts_of_preference_data(record, entry, remedy):
    options = DataOptions(dataset=["mine"], dataset_dir={"mine": {"records": [record] * 4, **entry}})
    with pytest.raises(UserError, match=r"Expected: prompts\.") as raised:
        load_datasets(options, 0, DataStats(), needs=RecordNeeds("prompts", stage="online_dpo"))
    assert remedy in str(raised.value)


@pytest.mark.parametrize("prompt", ["instruction", "question"])
def test_pairs_with_a_prompt_that_columns_omit_are_rejected_with_its_name(prompt):
    rows = [{prompt: "Say red", "good": "red", "bad": "blue"}]
    with pytest.raises(UserError, match='"columns" must contain "prompt"') as raised:
        pairs(rows, columns={"chosen": "good", "rejected": "bad"})
    assert f'Add "prompt": "{prompt}" to "columns".' in str(raised.value)


@pytest.mark.parametrize("prompt", ["instruction", "question"])
def test_format_of_an_entry_without_formatting_is_alpaca(prompt):
    rows = [{prompt: "Say red", "input": "now", "chosen": "red", "rejected": "blue"}]
    columns = {"prompt": prompt, "query": "input", "chosen": "chosen", "rejected": "rejected"}
    (example,) = pairs(rows, columns=columns)
    assert [message.text for message in example.messages] == ["Say red\nnow"]


@pytest.mark.parametrize("seed", range(20))
def test_mismatched_response_is_the_nearest_preceding_one_with_another_text(seed):
    random = Random(seed)
    texts = [random.choice("ab" if seed % 2 else "aaab") for _ in range(random.randrange(1, 9))]
    examples = [Example(prompt="p", completion=text, tag=True) for text in texts]
    expected = []
    for index, text in enumerate(texts):
        preceding = [texts[index - offset] for offset in range(1, len(texts))]  # wraps around
        expected.append(next((other for other in preceding if other != text), text))
    assert [example.other for example in with_other_answers(examples)] == expected


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"instruction": "Hi", "output": "Ho", "gold": "4"}, {"answer": "gold"}),
        ({"prompt": [{"role": "user", "content": "Hi"}], "gold": "4"}, {"answer": "gold"}),
        ({"q": "Hi", "gold": "4"}, {"prompt": "q", "answer": "gold"}),
    ],
)
@pytest.mark.parametrize("is_described", [False, True])
def test_columns_of_reward_functions_can_be_renamed(tmp_path, row, columns, is_described):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    options = DataOptions(dataset=[str(file)], columns=columns)
    if is_described:
        info = {"set": {"file_name": str(file), "columns": columns}}
        options = DataOptions(dataset=["set"], dataset_dir=info)
    sets = load_datasets(options, 0, DataStats(), needs=RecordNeeds("prompts", ("*",), stage="grpo"))
    (example,) = sets.train
    assert example.messages[0].text == "Hi"
    assert (example.extra["answer"], example.extra["gold"]) == ("4", "4")
    assert not any("no effect" in note for note in sets.notes)


def test_missing_column_of_a_renamed_one_is_reported(tmp_path):
    rows = [{"instruction": "Hi", "output": "Ho", "gold": "4"}]
    with pytest.raises(UserError, match=r'no column "gld".+ Did you mean "gold"'):
        examples(tmp_path, rows, RecordNeeds("prompts", ("*",), stage="grpo"), columns={"answer": "gld"})


@pytest.mark.parametrize("label", ["true", 3, None])
def test_label_of_another_type_is_quoted(tmp_path, label):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": label}]
    with pytest.raises(UserError, match=f'"label" must be true or false. Received: {json.dumps(label)}\n'):
        examples(tmp_path, rows, RecordNeeds("unpaired"))


def test_labels_may_be_floating_point_numbers(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": 1.0}, {"prompt": "a", "completion": "c", "label": 0.0}]
    assert [example.tag for example in examples(tmp_path, rows, RecordNeeds("unpaired"))] == [True, False]


def test_reason_that_applies_to_both_responses_is_counted_once():
    chosen, rejected, stats = DataStats(), DataStats(), DataStats(seen=2)
    examples = [Example(source="set", number=number) for number in (1, 2)]
    for side, number in ((chosen, 0), (rejected, 0), (rejected, 1)):
        side.add(drop_reason("no text"), examples[number])
    stats.merge_sides(chosen, rejected)
    assert stats.sentences() == ["dropped: no text: 2 of 2 examples (set: 1, 2)"]


@pytest.mark.parametrize("kind", ["answers", "prompts", "pairs"])
@pytest.mark.parametrize("streaming", [False, True])
def test_template_arguments_of_a_record_are_read(tmp_path, kind, streaming):
    row = {"prompt": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False, "x": None}}
    answer = [{"role": "assistant", "content": "b"}]
    row |= (
        {"chosen": answer, "rejected": [{**answer[0], "content": "c"}]} if kind == "pairs" else {"completion": answer}
    )
    columns = ("*",) if kind == "prompts" else ()
    (example,) = examples(tmp_path, [row], RecordNeeds(kind, columns, stage=kind), streaming=streaming)
    assert arguments_of(example) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("loud", 'must be an object. Received: "?loud'),
        (["loud"], "must be an object. Received: "),
        ({"messages": []}, 'contains "messages", which is set by burnish'),
        ({"a b": 1}, 'contains "a b", which is not a name of a variable'),
    ],
)
def test_invalid_template_arguments_are_rejected_with_their_record(tmp_path, value, expected):
    row = {"instruction": "a", "output": "b", "chat_template_kwargs": value}
    with pytest.raises(UserError, match=expected):
        examples(tmp_path, [row], RecordNeeds())


def test_template_arguments_may_be_json_text(tmp_path):
    row = {"instruction": "a", "output": "b", "chat_template_kwargs": '{"mood": "calm"}'}
    assert arguments_of(examples(tmp_path, [row], RecordNeeds())[0]) == {"mood": "calm"}


def test_template_arguments_of_plain_text_are_counted(tmp_path):
    file, stats = tmp_path / "rows.jsonl", DataStats()
    row = {"prompt": "a", "completion": "b", "chat_template_kwargs": {"mood": "calm"}}
    file.write_text(json.dumps(row), encoding="utf-8")
    load_datasets(DataOptions(dataset=[str(file)]), 0, stats, needs=RecordNeeds())
    assert stats.count(NO_TEMPLATE) == 1


@pytest.mark.parametrize("prompt", [None, 3, {"role": "user", "content": "Hi"}])
def test_prompt_of_another_type_is_rejected_with_both_forms(tmp_path, prompt):
    with pytest.raises(UserError, match='"prompt" must be text or a list of messages'):
        examples(tmp_path, [{"prompt": prompt, "completion": "Ho"}], RecordNeeds())
