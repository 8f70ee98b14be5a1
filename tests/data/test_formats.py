"""Records of each format become the expected examples."""

import json

import pytest

from burnish.config.errors import UserError
from burnish.data.sets.formats import FORMATS, convert_records
from burnish.data.sets.records import Layout
from burnish.data.sets.turns import OPENAI_TAGS
from burnish.data.stats import DataStats
from burnish.loop.types import Message
from dataset_helpers import (
    alpaca_record,
    load,
    load_error,
    load_records,
    openai_record,
    role_contents,
    sharegpt_record,
    write,
)

ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}


def load_record(record, **entry):
    return load_records([record], **entry)[0]


# --- alpaca -----------------------------------------------------------------------------------------------------------


def test_instruction_and_input_form_one_question():
    record = {"instruction": "Add.", "input": "3 + 4", "output": "7", "system": "Be exact.", "history": []}
    example = load_record(record, columns=ALPACA)
    assert role_contents(example) == [("user", "Add.\n3 + 4"), ("assistant", "7")]
    assert example.system == "Be exact."


@pytest.mark.parametrize("empty", ["", None])
def test_empty_input_adds_no_line(empty):
    assert role_contents(load_record({"instruction": "Add.", "input": empty, "output": "7"}))[0] == ("user", "Add.")


@pytest.mark.parametrize("history", [[["a", "b"]], '[["a", "b"]]'], ids=["list", "JSON string"])
def test_history_precedes_as_turns(history):
    record = {"instruction": "c", "input": "", "output": "d", "history": history, "system": ""}
    assert role_contents(load_record(record, columns=ALPACA)) == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ]


def test_history_that_is_no_list_is_reported():
    record = {"instruction": "c", "input": "", "output": "d", "history": "a, b", "system": ""}
    message = load_error(dataset="set", dataset_dir={"set": {"records": [record], "columns": ALPACA}})
    assert '"history" must be a list of pairs [prompt, response]' in message


def test_unmapped_column_is_not_read():
    record = {**alpaca_record(1), "input": "unread", "history": [["a", "b"]], "system": "unread"}
    example = load_record(record, columns={"prompt": "instruction", "response": "output"})
    assert role_contents(example) == [("user", "Is 1 a number?"), ("assistant", "yes")]
    assert example.system is None


def test_mapped_column_may_first_appear_in_a_late_record():
    late = [alpaca_record(number) for number in range(30)] + [{**alpaca_record(30), "system": "s"}]
    assert load_records(late, columns={**ALPACA, "history": None})[-1].system == "s"
    message = load_error(dataset="set", dataset_dir={"set": {"records": late, "columns": ALPACA}})
    assert 'no column "history"' in message


def test_unmapped_system_column_is_mentioned():
    sets = load(dataset="set", dataset_dir={"set": {"records": [{**alpaca_record(1), "system": "Be brief."}]}})
    assert sets.train[0].system is None
    assert 'the column "system" is ignored' in "".join(sets.notes)


def test_null_output_is_a_question_without_answer():
    assert role_contents(load_record({**alpaca_record(1), "output": None})) == [("user", "Is 1 a number?")]


def test_prompt_column_alone_is_plain_text():
    example = load_record({"text": "Once upon a time"}, columns={"prompt": "text"})
    assert (example.text, example.messages) == ("Once upon a time", ())


# --- sharegpt ---------------------------------------------------------------------------------------------------------


def test_sharegpt_roles_are_converted():
    turns = [("human", "q"), ("function_call", "{}"), ("observation", "o"), ("gpt", "a")]
    example = load_record(sharegpt_record(*turns), formatting="sharegpt")
    assert [role for role, _ in role_contents(example)] == ["user", "function", "observation", "assistant"]


def test_system_message_overrides_system_column():
    columns = {"messages": "conversations", "system": "system"}
    record = sharegpt_record(("system", "from the turn"), ("human", "q"), ("gpt", "a"))
    example = load_record({**record, "system": "from the column"}, formatting="sharegpt", columns=columns)
    assert example.system == "from the turn"
    assert role_contents(example)[0] == ("user", "q")
    without = {**sharegpt_record(("human", "q"), ("gpt", "a")), "system": "from the column"}
    assert load_record(without, formatting="sharegpt", columns=columns).system == "from the column"


def test_tags_rename_keys_and_roles():
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "asker", "assistant_tag": "answerer"}
    record = {"talk": [{"who": "asker", "what": "q"}, {"who": "answerer", "what": "a"}]}
    example = load_record(record, formatting="sharegpt", columns={"messages": "talk"}, tags=tags)
    assert role_contents(example) == [("user", "q"), ("assistant", "a")]


def test_openai_files_are_read_as_sharegpt_with_tags():
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    example = load_record(
        openai_record(("system", "s"), ("user", "q"), ("assistant", "a")),
        formatting="sharegpt", columns={"messages": "messages"}, tags=tags,
    )  # fmt: skip
    assert (example.system, role_contents(example)) == ("s", [("user", "q"), ("assistant", "a")])


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_json_text_for_any_file_type(tools):
    record = {**sharegpt_record(("human", "q"), ("gpt", "a")), "tools": tools}
    example = load_record(record, formatting="sharegpt", columns={"messages": "conversations", "tools": "tools"})
    assert json.loads(example.tools) == [{"name": "f"}]


def test_turns_out_of_order_are_left_to_the_template():
    example = load_record(sharegpt_record(("human", "a"), ("human", "b"), ("gpt", "c")), formatting="sharegpt")
    assert [role for role, _ in role_contents(example)] == ["user", "user", "assistant"]


# --- openai -----------------------------------------------------------------------------------------------------------


def test_openai_system_message_is_unchanged():
    plain, spoken = load_records(
        [
            openai_record(("user", "q"), ("assistant", "a")),
            openai_record(("system", "s"), ("user", "q"), ("assistant", "a")),
        ],
        formatting="openai",
    )
    assert not plain.system
    assert spoken.system == "s"


def call(name, arguments, **more):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        **more,
    }


def test_tool_calls_become_json_with_parsed_arguments():
    record = {"messages": [{"role": "user", "content": "q"}, call("f", '{"x": "ü"}', content=None)]}
    role, content = role_contents(load_record(record, formatting="openai"))[1]
    assert role == "function"
    assert content == '[{"name": "f", "arguments": {"x": "ü"}}]'


def test_parallel_tool_results_stay_separate_for_the_template():
    record = openai_record(("user", "q"), ("assistant", "x"), ("tool", "one"), ("tool", "two"), ("assistant", "a"))
    record["messages"][1] = call("f", {})
    assert role_contents(load_record(record, formatting="openai"))[2:4] == [
        ("observation", "one"),
        ("observation", "two"),
    ]


def test_empty_tool_list_means_no_tools():
    record = openai_record(("user", "q"), ("assistant", "a")) | {"tools": []}
    columns = {"messages": "messages", "tools": "tools"}
    assert (
        load_record(record, formatting="openai", columns=columns).tools == ""
    )  # LLaMA-Factory: an empty system message


def test_thought_before_a_call_is_kept_and_other_text_is_counted():
    thought = {"messages": [{"role": "user", "content": "q"}, call("f", {}, content="<think>\nhm\n</think>")]}
    spoken = {"messages": [{"role": "user", "content": "q"}, call("f", {}, content="Let me see.")]}
    stats = DataStats()
    sets = load(stats=stats, dataset="set", dataset_dir={"set": {"records": [thought, spoken], "formatting": "openai"}})
    assert role_contents(sets.train[0])[1][1].startswith("<think>\nhm\n</think>\n\n[{")
    assert role_contents(sets.train[1])[1][1].startswith("[{")
    assert [places for reason, places in stats.records.items() if "text alongside a tool call" in reason] == [
        [("set", 2)]
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_a_message_precedes_its_content(key):
    thought = "<think>\nhm\n</think>\n\n"
    turns = [
        {"role": "user", "content": "q", key: "not a response"},
        {"role": "assistant", "content": "a", key: "hm\n"},
        {"role": "user", "content": "q"},
        call("f", {}, content=None, **{key: "hm"}),
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], key: "hm"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": thought + "a", key: "hm"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, key: "hm"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", key: None},
    ]
    texts = [text for role, text in role_contents(load_record({"messages": turns}, formatting="openai"))]
    answers = ["a", '[{"name": "f", "arguments": {}}]', "a", "a", ""]
    assert texts[0] == "q"
    assert texts[1::2] == [*(thought + answer for answer in answers), "a"]


def test_reasoning_of_another_type_is_rejected():
    record = openai_record(("user", "q"), ("assistant", "a"))
    record["messages"][1]["reasoning_content"] = {"text": "hm"}
    with pytest.raises(UserError, match=r'"messages\[1\].reasoning_content" must be a string'):
        load_record(record, formatting="openai")


def test_text_between_reasoning_and_call_is_counted():
    record = {"messages": [{"role": "user", "content": "q"}, call("f", {}, content="Well.", reasoning_content="hm")]}
    stats = DataStats()
    sets = load(stats=stats, dataset="set", dataset_dir={"set": {"records": [record], "formatting": "openai"}})
    assert role_contents(sets.train[0])[1][1].startswith("<think>\nhm\n</think>\n\n[{")
    assert any("text alongside a tool call" in reason for reason in stats.records)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": "hello"}, r'"messages" must be a list of messages that is not empty. Received: "hello"'),
        ({"conversations": []}, r'"conversations" must be a list of messages that is not empty. Received: \[\]'),
        (
            {"messages": [{"speaker": "user", "text": "hi"}]},
            r'have neither the key "role" nor "from". Found: speaker, text.\n.*formatting: openai, .*"role_tag"',
        ),
    ],
)
def test_column_of_messages_that_are_not_recognized_is_described(record, expected):
    with pytest.raises(UserError, match=expected):
        load_record(record)


def test_text_parts_are_joined():
    record = openai_record(
        ("user", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]), ("assistant", "a")
    )
    assert role_contents(load_record(record, formatting="openai"))[0] == ("user", "Hello")


def test_message_can_set_its_train_flag_and_weight():
    record = openai_record(
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")
    )
    record["messages"][1]["train"] = False
    record["messages"][3]["weight"] = 0
    record["messages"][5]["weight"] = 0.5
    train_and_weight = [
        (m.train, m.weight) for m in load_record(record, formatting="openai").messages if m.role == "assistant"
    ]
    assert train_and_weight == [(False, 1.0), (False, 1.0), (None, 0.5)]


# --- prompt and completion, text --------------------------------------------------------------------------------------


def test_prompt_and_completion_stay_text():
    example = load_record({"prompt": "2 + 2 =", "completion": " 4"})
    assert (example.prompt, example.completion, example.messages) == ("2 + 2 =", " 4", ())


def test_only_completion_of_two_message_lists_is_trained():
    before = openai_record(("user", "a"), ("assistant", "b"), ("user", "c"))["messages"]
    example = load_record({"prompt": before, "completion": openai_record(("assistant", "d"))["messages"]})
    assert role_contents(example)[-1] == ("assistant", "d")
    assert [message.train for message in example.messages] == [False, False, False, None]


def test_line_of_text_is_a_text_record(tmp_path):
    write(tmp_path / "a.txt", "first\n\nthird\n")
    assert [example.text for example in load(dataset=str(tmp_path / "a.txt")).train] == ["first", "", "third"]


# --- which format it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (alpaca_record(1), "alpaca"),
        (sharegpt_record(("human", "q"), ("gpt", "a")), "sharegpt"),
        (openai_record(("user", "q"), ("assistant", "a")), "openai"),
        ({"conversations": openai_record(("user", "q"), ("assistant", "a"))["messages"]}, "openai"),
        ({"messages": sharegpt_record(("human", "q"), ("gpt", "a"))["conversations"]}, "sharegpt"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"text": "t", "url": "u"}, "text"),
        ({**alpaca_record(1), "text": "rendered"}, "alpaca"),
    ],
)
def test_format_of_a_path_is_detected_and_reported(tmp_path, record, name):
    path = write(tmp_path / "a.json", [record, record])
    sets = load(dataset=str(path))
    assert len(sets.train) == 2
    assert f"{path}: detected format {name} (" in sets.notes[0]


def test_detected_format_uses_optional_columns_and_names_unused_ones(tmp_path):
    path = write(tmp_path / "a.json", [{**alpaca_record(1), "system": "s", "history": [["a", "b"]], "id": 7}])
    sets = load(dataset=str(path))
    assert sets.train[0].system == "s"
    assert len(sets.train[0].messages) == 4
    assert "ignored columns: id" in sets.notes[0]


@pytest.mark.parametrize("before", [1, 30])
def test_optional_column_first_present_in_a_later_record_is_read(tmp_path, before):
    """Also behind the records that the format is recognized by."""
    records = [alpaca_record(number) for number in range(before)]
    path = write(tmp_path / "a.json", [*records, {**alpaca_record(1), "system": "s", "history": [["a", "b"]]}])
    train = load(dataset=str(path)).train
    assert [example.system for example in train] == [None] * before + ["s"]
    assert len(train[-1].messages) == 4
    write(path, [*records, {**alpaca_record(1), "images": ["a.png"]}])
    assert 'the record contains images ("images"), but this stage supports text only' in load_error(dataset=str(path))


def test_unknown_columns_are_rejected_with_a_working_suggestion(tmp_path):
    path = write(tmp_path / "a.json", [{"prompt_text": "q", "answer_text": "a"}])
    message = load_error(dataset=str(path))
    assert "Found: prompt_text, answer_text" in message
    proposal = message.split("columns: ")[-1]
    sets = load(dataset=str(path), formatting="alpaca", columns=proposal)
    assert role_contents(sets.train[0]) == [("user", "q"), ("assistant", "a")]


def test_ambiguous_format_is_rejected_until_one_is_chosen(tmp_path):
    path = str(write(tmp_path / "a.json", [{**alpaca_record(1), **openai_record(("user", "q"), ("assistant", "a"))}]))
    message = load_error(dataset=path)
    assert "alpaca" in message
    assert "openai" in message
    assert role_contents(load(dataset=path, formatting="openai").train[0])[0] == ("user", "q")


@pytest.mark.parametrize("more", [{"chosen": "a", "rejected": "b"}, {"label": True}])
def test_preference_columns_suggest_preference_stage(tmp_path, more):
    path = str(write(tmp_path / "a.json", [{**openai_record(("user", "q"), ("assistant", "a")), **more}]))
    assert "stage: dpo" in load_error(dataset=path) or "stage: kto" in load_error(dataset=path)
    assert len(load(dataset=path, formatting="openai").train) == 1


def test_alternative_role_names_are_accepted_and_reported(tmp_path):
    path = str(write(tmp_path / "a.json", [openai_record(("human", "q"), ("gpt", "a"))]))
    sets = load(dataset=path)
    assert role_contents(sets.train[0]) == [("user", "q"), ("assistant", "a")]


def test_alternative_role_names_are_counted_by_record(tmp_path):
    path = write(
        tmp_path / "a.json",
        [openai_record(("user", "q"), ("assistant", "a")), openai_record(("human", "q"), ("gpt", "a"))],
    )
    stats = DataStats()
    load(dataset=str(path), stats=stats)
    assert f'kept: the role "gpt" is treated as assistant: 1 of 2 examples ({path}: 2)' in stats.sentences()
    assert f'kept: the role "human" is treated as user: 1 of 2 examples ({path}: 2)' in stats.sentences()


@pytest.mark.parametrize("query", [{}, {"input": None}, {"input": ""}], ids=str)
def test_null_instruction_is_rejected_without_another_question(tmp_path, query):
    path = write(
        tmp_path / "a.json", [{"instruction": "q", "output": "a"}, {"instruction": None, "output": "a", **query}]
    )
    assert '"instruction" is null, so the record has no prompt' in load_error(dataset=str(path))
    assert "record 2 (line" in load_error(dataset=str(path))


def test_input_alone_is_a_question(tmp_path):
    path = write(tmp_path / "a.json", [{"instruction": None, "input": "q", "output": "a"}])
    assert role_contents(load(dataset=str(path)).train[0]) == [("user", "q"), ("assistant", "a")]


def test_format_is_registered_as_one_function(monkeypatch, tmp_path):
    monkeypatch.setattr(FORMATS, "_members", dict(FORMATS._members))

    @FORMATS.register("riddle", columns={"riddle": "riddle", "solution": "solution"})
    def riddle(record):
        """A riddle and its solution."""
        return record.example(
            messages=(Message("user", record.text("riddle")), Message("assistant", record.text("solution")))
        )

    path = str(write(tmp_path / "a.json", [{"riddle": "What has keys?", "solution": "A piano."}]))
    assert role_contents(load(dataset=path).train[0]) == [("user", "What has keys?"), ("assistant", "A piano.")]
    assert "solution" in load_error(dataset=str(write(tmp_path / "b.json", [{"riddle": "?"}])), formatting="riddle")


def test_golden_conversations_match_llamafactory(golden_folder):
    """LLaMA-Factory's converters also drop turns that are out of order, which burnish's templates do."""
    cases = json.loads((golden_folder / "conversations.json").read_text(encoding="utf-8"))
    for case in cases:
        record, is_alpaca = case["record"], case["formatting"] == "alpaca"
        columns = ALPACA if is_alpaca else {"messages": "conversations", "tools": "tools", "system": "system"}
        example = load_record(record, formatting=case["formatting"], columns=columns)
        if is_alpaca:
            answer = [] if record["output"] is None else [record["output"]]
            expected = [text for pair in record["history"] for text in pair]
            expected += ["\n".join(filter(None, [record["instruction"], record["input"]])), *answer]
        else:
            expected = [turn["value"] for turn in record["conversations"] if turn["from"] != "system"]
        assert [message.content for message in example.messages] == expected, case["case"]
        assert (example.system or "") == (
            record["system"] or ("Be brief." if "system" in case["case"] and not is_alpaca else "")
        )


@pytest.mark.parametrize("answers", [("q a", "q b"), ("a", "b")])
def test_text_pair_with_null_prompt_is_rejected(answers):
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    values = dict(zip(("chosen", "rejected"), answers, strict=True))
    layout = Layout("preference", columns, tags=OPENAI_TAGS)
    with pytest.raises(UserError, match='"prompt" is null, so the record has no prompt'):
        convert_records([({"prompt": None, **values}, "a.json", 1)], layout, DataStats())
    (example,) = convert_records([({"prompt": "x", **values}, "a.json", 1)], layout, DataStats())
    assert (example.prompt, example.chosen) == ("x", answers[0])
