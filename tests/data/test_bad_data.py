"""Messages about invalid data: the file, the record or line, the value found, and the remedy."""

import gzip
import json
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.data.rows.encode import encode_rows
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from dataset_helpers import (
    alpaca_record,
    data_options,
    load,
    load_error,
    openai_record,
    role_contents,
    sharegpt_record,
    write,
)

RECORDS = [alpaca_record(number) for number in range(24)]


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()


def write_data(name, records):
    return str(write(Path("data") / name, records))


def write_info(**entries):
    write(Path("data/dataset_info.json"), entries)


# --- missing and malformed files --------------------------------------------------------------------------------------


def test_missing_file_is_reported_with_full_path_and_similar_names(tmp_path):
    write_data("train.json", RECORDS)
    message = load_error(dataset="data/trian.json")
    assert str(tmp_path / "data" / "trian.json") in message
    assert "The folder contains: train.json" in message


def test_missing_file_of_an_entry_is_reported_with_the_entry(tmp_path):
    write_info(mine={"file_name": "nope.json"})
    assert f'data/dataset_info.json, "mine": the file "{tmp_path}/data/nope.json" does not exist' in load_error(
        dataset="mine"
    )


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", "[]"), ("a.jsonl", ""), ("a.txt", ""), ("a.csv", "instruction,output\n")]
)
def test_file_without_records_is_rejected(name, content):
    assert "contains no records" in load_error(dataset=write_data(name, content))


def test_latin_1_is_reported_by_line_and_byte():
    text = json.dumps([*RECORDS, {**alpaca_record(1), "output": "Café"}], ensure_ascii=False, indent=1)
    raw = text.encode("latin-1")
    message = load_error(dataset=write_data("a.json", raw))
    assert f"byte 0xe9 at offset {raw.index(0xE9)}" in message
    assert f"data/a.json, line {raw[: raw.index(0xE9)].count(10) + 1}:" in message
    assert '"é"' in message
    assert "iconv -f latin1" in message


@pytest.mark.parametrize("code", ["utf-16", "utf-32"])
def test_other_encoding_is_reported_by_name(code):
    message = load_error(dataset=write_data("a.json", json.dumps(RECORDS).encode(code)))
    assert f"Received: {code.upper()}" in message
    assert f"iconv -f {code} " in message


def test_compressed_file_is_not_reported_as_latin_1():
    message = load_error(dataset=write_data("a.jsonl", gzip.compress(json.dumps(RECORDS[0]).encode())))
    assert "Received: a gzip archive" in message
    assert "gzip -dc" in message


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.txt"])
def test_byte_order_mark_is_accepted(name):
    contents = {
        "a.json": json.dumps(RECORDS), "a.jsonl": "\n".join(map(json.dumps, RECORDS)),
        "a.csv": "instruction,output\nq,a\n", "a.txt": "text\n",
    }  # fmt: skip
    example = load(dataset=write_data(name, b"\xef\xbb\xbf" + contents[name].encode())).train[0]
    assert (example.text or example.messages[0].content)[0] in "Iqt"


def test_truncated_json_lines_file_reports_its_last_line():
    text = "\n".join(map(json.dumps, RECORDS))[:-20]
    message = load_error(dataset=write_data("a.jsonl", text))
    assert "data/a.jsonl, line 24:" in message
    assert "copied completely" in message


def test_all_invalid_lines_are_reported_together():
    lines = [json.dumps(record) for record in RECORDS]
    lines[2], lines[9] = "{broken", lines[9] + ","
    message = load_error(dataset=write_data("a.jsonl", "\n".join(lines)))
    assert "line 3:" in message
    assert "line 10:" in message


@pytest.mark.parametrize(
    ("value", "why"), [("9" * 5000, "too many digits"), ("[" * 9**5 + "]" * 9**5, "nested too deeply")]
)
def test_json_that_python_rejects_is_reported_by_line(value, why):
    record = f'{{"instruction": {value}, "output": "a"}}'
    for after in ("", f"\n{json.dumps(RECORDS[0])}"):
        message = load_error(dataset=write_data("a.jsonl", f"{json.dumps(RECORDS[0])}\n{record}{after}"))
        assert "data/a.jsonl, line 2:" in message
        assert why in message
        assert "copied completely" not in message
    message = load_error(dataset=write_data("a.json", f"[{json.dumps(RECORDS[0])},\n{record}]"))
    assert why in message
    assert "The file is valid up to this position (1 record)" in message
    large = write_data("b.json", f"[{json.dumps(RECORDS[0])},\n{record}]")
    with pytest.raises(UserError, match=why):
        load_datasets(data_options(dataset=large, streaming=True), 0, DataStats(), may_stream=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_record_with_duplicate_key_is_rejected(name, streaming):
    records = [json.dumps(RECORDS[0]), '{"instruction": "Add", "output": "1", "output": "2"}']
    text = "\n".join(records) if name.endswith("l") else f"[{', '.join(records)}]"
    with pytest.raises(UserError, match='it has the duplicate key "output"'):
        read_all(
            load_datasets, data_options(dataset=write_data(name, text), streaming=streaming), 0, DataStats(), streaming
        )


def read_all(read, *arguments):
    return list(read(*arguments).train)


def test_truncated_json_list_reports_the_last_complete_record():
    message = load_error(dataset=write_data("a.json", json.dumps(RECORDS, indent=1)[:-20]))
    assert "The file is valid up to this position (23 records)" in message
    assert "line 120" in message


@pytest.mark.parametrize("indent", [None, 1])
def test_list_wrapped_in_an_object_reports_the_key(indent):
    message = load_error(dataset=write_data("a.json", json.dumps({"version": 1, "data": RECORDS}, indent=indent)))
    assert 'an object with 24 records under the key "data"' in message


def test_one_record_on_one_line_is_a_dataset():
    assert (
        len(load(dataset=write_data("a.json", json.dumps(openai_record(("user", "q"), ("assistant", "a"))))).train) == 1
    )


def test_non_object_records_are_rejected():
    assert "record 2" in load_error(dataset=write_data("a.json", [alpaca_record(1), "text"]))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    ("other", "number"), [("text", 1), (None, 1), (None, 25), ([], 2), (3, 25), ([{"instruction": "q"}], 25)]
)
def test_record_that_is_not_an_object_is_dropped_and_counted(name, other, number, streaming):
    records = [*RECORDS[: number - 1], other, *RECORDS[number - 1 :]]
    path = write_data(name, records if name == "a.json" else "".join(f"{json.dumps(one)}\n" for one in records))
    stats = DataStats()
    options = data_options(dataset=path, on_bad_record="drop", streaming=streaming)
    sets = load_datasets(options, 0, stats, may_stream=streaming)
    assert len([e for e in sets.train.make(range(len(sets.train)), stats) if e is not None]) == len(RECORDS)
    assert f"dropped: not an object: 1 of 25 examples ({path}: {number})" in stats.sentences()


@pytest.mark.parametrize("streaming", [False, True])
def test_records_that_are_not_objects_are_reported_together(streaming):
    path = write_data("a.jsonl", "".join(f"{json.dumps(one)}\n" for one in ["text", *RECORDS[:3], None]))
    options = data_options(dataset=path, streaming=streaming)
    with pytest.raises(UserError) as raised:
        read_all(load_datasets, options, 0, DataStats(), streaming)
    message = str(raised.value)
    assert f"{path}, record 1 (line 1): expected an object with named columns. Received: text" in message
    assert ("Same problem in record 5." in message) == (not streaming)  # records are read one by one then
    assert "on_bad_record: drop" in message


def test_records_without_any_object_are_rejected():
    assert "Received: a\n" in load_error(dataset=write_data("a.json", ["a", "b"]), on_bad_record="drop")
    assert "Received: 1" in load_error(dataset="set", dataset_dir={"set": {"records": [1, 2]}})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        ("instruction,output", True),
        ('"Prompt", "Response"\r', True),
        ("\ufeffid,messages", True),
        ("The prompt, response and answer", False),
        ("instruction", False),
        ("red, green", False),
        ("", False),
    ],
)
def test_csv_file_with_the_suffix_of_text_is_reported(first, is_header, streaming):
    path = write_data("a.txt", f"{first}\nSay red,red\n".encode())
    sets = load_datasets(data_options(dataset=path, streaming=streaming), 0, DataStats(), may_stream=streaming)
    assert len(sets.train) == 2  # it is a note, not an error
    notes = [note for note in sets.notes if "looks like the header of a CSV file" in note]
    assert len(notes) == is_header
    assert all("Rename it to a.csv" in note for note in notes)


def test_unknown_file_types_are_rejected_with_known_ones():
    message = load_error(dataset=write_data("a.xlsx", b"x"))
    assert '".xlsx"' in message
    assert ".json, .jsonl, .csv, .parquet, .arrow, .txt" in message


def test_loading_script_is_never_run():
    write_data("set/a.json", RECORDS)
    write_data("set/script.py", b"raise SystemExit('it was run')")
    assert "script.py" in load_error(dataset="data/set")
    write_info(mine={"script_url": "set"})
    assert "burnish does not run code" in load_error(dataset="mine")


def test_folder_of_several_file_types_is_rejected():
    write_data("set/a.json", RECORDS)
    write_data("set/b.csv", "instruction,output\nq,a\n")
    assert ".csv (1), .json (1)" in load_error(dataset="data/set")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("streaming", [False, True])
def test_single_record_with_a_list_of_messages_is_a_record(name, streaming):
    turns = [{"role": "user", "content": "Say red"}, {"role": "assistant", "content": "red"}]
    path = write_data(name, json.dumps({"turns": turns}))
    options = {"formatting": "openai", "columns": {"messages": "turns"}, "streaming": streaming}
    sets = load_datasets(data_options(dataset=path, **options), 0, DataStats(), may_stream=streaming)
    assert [role_contents(example) for example in sets.train] == [[("user", "Say red"), ("assistant", "red")]]


@pytest.mark.parametrize("streaming", [False, True])
def test_single_line_of_json_lines_is_a_record_with_any_columns(streaming):
    path = write_data("a.jsonl", json.dumps({"answers": [{"text": "red"}], "ask": "Say red", "say": "red"}))
    options = {"formatting": "alpaca", "columns": {"prompt": "ask", "response": "say"}, "streaming": streaming}
    sets = load_datasets(data_options(dataset=path, **options), 0, DataStats(), may_stream=streaming)
    assert [role_contents(example) for example in sets.train] == [[("user", "Say red"), ("assistant", "red")]]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_file_with_wrong_extension_is_rejected(name):
    assert f"data/{name}: invalid or incomplete" in load_error(dataset=write_data(name, b"not at all, not at all"))


def test_csv_row_with_too_many_values_reports_its_line():
    message = load_error(dataset=write_data("a.csv", 'instruction,output\n"two\nlines",a\nq,a,b\n'))
    assert "data/a.csv, line 4: the row has 3 values, but the header has 2 columns" in message


# --- dataset_info.json ------------------------------------------------------------------------------------------------


def test_csv_header_with_duplicate_column_is_rejected():
    assert 'line 1: duplicate column "output" in the header' in load_error(
        dataset=write_data("a.csv", "output,output\na,b\n")
    )


def test_invalid_dataset_info_is_reported_by_line_and_column():
    write_data("dataset_info.json", '{\n "a": {"file_name": "a.json",}\n}')
    assert "data/dataset_info.json, line 2, column" in load_error(dataset="a")


def test_undefined_dataset_names_are_rejected_with_nearest_ones():
    write_info(alpaca_zh={"file_name": "a.json"}, identity={"file_name": "b.json"})
    message = load_error(dataset="alpaca_hz,idntity")
    assert '"alpaca_hz" is neither defined' in message
    assert 'Did you mean "alpaca_zh"?' in message
    assert 'Did you mean "identity"?' in message


def test_dataset_name_without_dataset_info_suggests_files():
    write_data("alpaca_zh_demo.json", RECORDS)
    assert 'Did you mean "alpaca_zh_demo.json"?' in load_error(dataset="alpaca_zh_dem")


@pytest.mark.parametrize("file_name", ["data/a.json", "./data/a.json", "project/data/a.json"])
def test_file_name_that_repeats_dataset_dir_is_explained(file_name):
    write_data("a.json", [{"instruction": "q", "output": "a"}])
    write_info(mine={"file_name": file_name})
    assert '"file_name" is relative to "data". Set "file_name": "a.json".' in load_error(dataset="mine")


@pytest.mark.parametrize("file_name", ["../secret.json", "sub/../../secret.json", "/etc/hostname"])
def test_file_outside_dataset_dir_is_rejected(tmp_path, file_name):
    write(tmp_path / "secret.json", RECORDS)
    write_info(mine={"file_name": file_name})
    assert 'must be inside "data"' in load_error(dataset="mine")


def test_misspelled_entry_keys_are_rejected_together():
    write_info(mine={"file_nam": "a.json", "columns": {"promt": "q"}, "tags": {"role": "from"}, "num_samples": 0})
    message = load_error(dataset="mine")
    for part in ('"file_nam"', 'Did you mean "file_name"', 'Did you mean "prompt"', '"num_samples" must be'):
        assert part in message


def test_key_without_effect_is_not_suggested():
    write_info(mine={"file": "a.json"})
    assert 'unknown key "file". Did you mean "file_name"?' in load_error(dataset="mine")
    write_info(mine={"stage": "sft", "formatting": "alpaca"})
    message = load_error(dataset="mine")
    assert "does not specify a data file or repository. Found: stage, formatting." in message
    assert "unknown key" not in message


def test_keys_of_an_entry_that_describe_it_are_noted_and_have_no_effect():
    write_data("a.json", [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 1}])
    columns = {"messages": "conversations", "role": "from", "content": "value", "id": "id"}
    write_info(
        mine={"file_name": "a.json", "formatting": "sharegpt", "columns": columns, "description": "x", "stage": 1}
    )
    sets = load(dataset="mine")
    assert [note.split(": ", 1)[1] for note in sets.notes] == [
        "these keys have no effect: description, stage, columns.role, columns.content, columns.id."
    ]
    assert role_contents(sets.train[0]) == [("user", "q"), ("assistant", "a")]


def test_columns_that_no_record_has_are_to_be_removed_if_they_are_optional():
    write_data("a.json", [{"instruction": "q", "input": "x", "output": "a"}] * 3)
    usual = {"prompt": "instruction", "query": "input", "response": "output"}
    write_info(mine={"file_name": "a.json", "columns": {**usual, "system": "system", "history": "past"}})
    message = load_error(dataset="mine")
    assert 'the records have no columns "system" and "past". Found: instruction, input, output.' in message
    assert 'Correct the column in "columns", or remove "system" and "history" from it.' in message


def test_key_that_is_similar_to_one_of_the_entry_has_no_effect():
    write_data("a.json", RECORDS)
    write_info(
        mine={"file_name": "a.json", "file_name_eval": "b.json", "tags": {"formatting": "sharegpt", "role_tag": "role"}}
    )
    sets = load(dataset="mine")
    assert sets.notes[0].endswith("these keys have no effect: file_name_eval, tags.formatting.")


@pytest.mark.parametrize(
    "entry",
    [
        {"colums": {}},
        {"format": "sharegpt"},
        {"columns": {"message": "m"}},
        {"columns": {"output": "o"}},
        {"tags": {"role": "r"}},
        {"tags": {"user_tags": "r"}},
    ],
)
def test_misspelled_keys_of_an_entry_with_a_file_are_rejected(entry):
    write_data("a.json", RECORDS)
    write_info(mine={"file_name": "a.json", **entry})
    assert "unknown key" in load_error(dataset="mine")


def test_tags_among_the_columns_are_to_be_moved():
    write_info(
        mine={"file_name": "a.json", "columns": {"messages": "conversation", "role": "role", "content": "content"}}
    )
    message = load_error(dataset="mine")
    assert 'Move it to "tags": {"role_tag": "role"}' in message
    assert 'Move it to "tags": {"content_tag": "content"}' in message


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"file_name": 5}, '"file_name" must be a string. Received: 5'),
        ({"file_name": ""}, '"file_name" must be a string'),
        ({"file_name": "a.json", "columns": 5}, '"columns" must be an object'),
        ({"file_name": "a.json", "columns": {"prompt": 5}}, '"prompt" in "columns" must be a string'),
        ({"file_name": "a.json", "columns": {"user": "q"}, "tags": ["a"]}, '"tags" must be an object'),
        ({"file_name": "a.json", "tags": {"role_tag": ["from"]}}, '"role_tag" in "tags" must be a string'),
        ({"file_name": "a.json", "formatting": 5}, '"formatting" must be a string'),
        ({"file_name": "a.json", "split": 5}, '"split" must be a string'),
    ],
    ids=str,
)
def test_entry_values_of_wrong_type_are_reported(entry, expected):
    write_data("a.json", RECORDS)
    write_info(mine=entry)
    message = load_error(dataset="mine")
    assert expected in message
    assert 'data/dataset_info.json, "mine"' in message


def test_dataset_info_that_is_not_an_object_is_shown():
    write_data("dataset_info.json", "null")
    assert "Received: null" in load_error(dataset="mine")


def test_ranking_dataset_suggests_preference_stage():
    write_data("a.json", RECORDS)
    write_info(mine={"file_name": "a.json", "ranking": True})
    assert "stage: dpo" in load_error(dataset="mine")


def test_missing_column_is_rejected_with_existing_ones():
    write_data("a.json", RECORDS)
    write_info(mine={"file_name": "a.json", "columns": {"prompt": "question", "response": "output"}})
    message = load_error(dataset="mine")
    assert 'no column "question". Found: instruction, input, output.' in message
    assert '"columns": {"prompt": "instruction", "query": "input", "response": "output"}' in message


def test_columns_without_prompt_are_rejected():
    write_data("a.json", RECORDS)
    write_info(mine={"file_name": "a.json", "columns": {"response": "output"}})
    assert '"columns" must contain "prompt"' in load_error(dataset="mine")


def test_dataset_named_twice_is_mentioned():
    write_info(mine={"file_name": "a.json"})
    write_data("a.json", RECORDS)
    sets = load(dataset="mine,mine")
    assert len(sets.train) == 48
    assert 'The dataset "mine" is listed 2 times' in sets.notes[0]


def test_all_invalid_datasets_are_reported_together():
    bad = write_data("bad.json", [*RECORDS[:2], alpaca_record(1, 5)])
    message = load_error(dataset=["data/nope.json", bad], eval_dataset=write_data("empty.json", []))
    assert "nope.json" in message
    assert "contains no records" in message


# --- records ----------------------------------------------------------------------------------------------------------


def test_number_instead_of_text_is_reported_by_record_line_and_column():
    message = load_error(dataset=write_data("a.json", [*RECORDS[:7], alpaca_record(7, 5), *RECORDS]))
    assert 'data/a.json, record 8 (line 37): "output" must be a string. Received: 5' in message
    assert "on_bad_record: drop" in message


def test_record_line_number_counts_blank_lines():
    lines = [json.dumps(RECORDS[0]), "", json.dumps(alpaca_record(1, 5))]
    assert "record 2 (line 3)" in load_error(dataset=write_data("a.jsonl", "\n".join(lines)))


def test_null_answer_is_reported_by_its_location_in_the_record():
    records = [sharegpt_record(("human", "q"), ("gpt", "a")), sharegpt_record(("human", "q"), ("gpt", None))]
    assert 'record 2 (line 14): "conversations[1].value" must be a string' in load_error(
        dataset=write_data("a.json", records)
    )


def test_missing_key_is_reported():
    message = load_error(dataset=write_data("a.json", [*RECORDS, {"instruction": "q", "input": ""}]))
    assert 'record 25 (line 122): the column "output" is missing. Found: instruction, input.' in message


def test_equal_problems_are_grouped_and_others_are_separate():
    records = [
        *RECORDS,
        alpaca_record(1, 5),
        alpaca_record(2, 6),
        {"instruction": "q", "input": ""},
        alpaca_record(3, 7),
    ]
    with pytest.raises(UserError) as raised:
        load(dataset=write_data("a.json", records))
    first, second = map(str, raised.value.problems)
    assert "record 25" in first
    assert "Same problem in records 26, 28." in first
    assert "record 27" in second


def test_bad_records_can_be_dropped_and_are_counted():
    stats = DataStats()
    sets = load(stats=stats, dataset=write_data("a.json", [*RECORDS, alpaca_record(1, 5)]), on_bad_record="drop")
    assert len(sets.train) == 24
    assert stats.seen == 25
    (sentence,) = stats.sentences()
    assert sentence.startswith("dropped:")
    assert "1 of 25 examples (data/a.json: 25)" in sentence


def test_dropping_all_records_is_not_silent():
    assert "record 1" in load_error(
        dataset=write_data("a.json", [alpaca_record(1, 5), alpaca_record(2, 6)]), on_bad_record="drop"
    )


def test_unknown_role_is_rejected_with_known_ones():
    message = load_error(dataset=write_data("a.json", [openai_record(("user", "q"), ("narrator", "a"))]))
    assert '"messages[1].role" must be one of user, assistant, tool' in message
    assert "narrator" in message


def test_media_are_rejected_by_text_only_model():
    path = write_data("a.json", [{**alpaca_record(1), "images": ["a.png"]}, {**alpaca_record(2), "images": []}])
    assert 'contains images ("images"), but this stage supports text only' in load_error(dataset=path)
    assert len(load(dataset=path, on_bad_record="drop").train) == 1
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": "a.png"}]
    assert "image_url" in load_error(dataset=write_data("b.json", [openai_record(("user", parts), ("assistant", "a"))]))


@pytest.mark.parametrize("tools", ['"\\ud83d"', '[{"name": "\\ud83d"}]'])
def test_lone_surrogate_in_tools_is_rejected(tools):
    text = (
        f'[{{"conversations": [{{"from": "human", "value": "q"}}, {{"from": "gpt", "value": "a"}}], "tools": {tools}}}]'
    )
    assert '"tools" is not valid Unicode' in load_error(dataset=write_data("a.json", text))


def test_lone_surrogate_is_rejected_before_tokenization():
    message = load_error(dataset=write_data("a.json", '[{"instruction": "a\\ud83d", "output": "b"}]'))
    assert "unpaired surrogate" in message
    message.encode()  # can be printed


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["NaN", "1e999", "-1", '"2"', "true", "9" * 400])
def test_non_finite_weight_is_rejected(weight):
    text = '[{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": WEIGHT}]}]'
    message = load_error(dataset=write_data("a.json", text.replace("WEIGHT", weight)))
    assert 'record 1 (line 1): "messages[1].weight" must be a finite number of at least 0' in message


def test_run_stops_if_all_answers_are_empty():
    message = load_error(dataset=write_data("a.json", [alpaca_record(1, ""), alpaca_record(2, " \n")]))
    assert "record 1" in message
    assert "the assistant turn is empty." in message


def test_some_empty_answers_are_dropped_and_counted():
    stats = DataStats()
    assert len(load(stats=stats, dataset=write_data("a.json", [*RECORDS, alpaca_record(1, "")])).train) == 24
    assert stats.sentences() == ["dropped: all responses are empty: 1 of 25 examples (data/a.json: 25)"]


def test_empty_answers_stop_the_run_or_are_kept_on_request():
    path = write_data("a.json", [*RECORDS, alpaca_record(1, "")])
    message = load_error(dataset=path, on_empty_target="raise")
    assert "record 25" in message
    assert "on_empty_target: drop" in message
    assert len(load(dataset=path, on_empty_target="keep").train) == 25


def test_conversation_with_one_empty_answer_is_kept_and_counted():
    stats = DataStats()
    path = write_data("a.json", [sharegpt_record(("human", "a"), ("gpt", ""), ("human", "b"), ("gpt", "c"))])
    assert role_contents(load(stats=stats, dataset=path).train[0])[1] == ("assistant", "")
    assert stats.count("kept: a response is empty") == 1


# --- options ----------------------------------------------------------------------------------------------------------


def test_split_that_leaves_no_records_is_rejected():
    path = write_data("a.json", RECORDS)
    assert "holds out 24 of 24 examples" in load_error(dataset=path, val_size=0.9999)
    for val_size in (2.5, float("inf")):
        assert "integer number of examples" in load_error(dataset=path, val_size=val_size)
    assert "val_size and eval_dataset" in load_error(dataset=path, eval_dataset=path, val_size=0.1)


def test_interleave_probs_must_match_number_of_datasets():
    path = write_data("a.json", RECORDS)
    assert "mix_strategy: concat" in load_error(dataset=[path, path], interleave_probs="0.5,0.5")
    message = load_error(dataset=[path, path], interleave_probs="0.5,0.4,0.3", mix_strategy="interleave_under")
    assert "Received: 3 for 2" in message
    assert "sum 1.2" in message


def test_interleave_probs_may_be_rounded():
    path, thirds = write_data("a.json", RECORDS), [0.3333333] * 3
    sets = load(dataset=[path] * 3, interleave_probs=thirds, mix_strategy="interleave_once")
    assert len(sets.train) == 3 * len(RECORDS)


def test_missing_dataset_option_is_reported():
    assert '"dataset" is missing' in load_error()


def test_unwritable_cache_is_reported(monkeypatch):
    write(Path("file"), "in the way")
    monkeypatch.setenv("BURNISH_CACHE", "file")
    sets = load(dataset=write_data("a.json", RECORDS))
    with pytest.raises(UserError, match="BURNISH_CACHE"):
        encode_rows(sets.train, lambda batch, stats: [], DataStats(), fingerprint="x", options=data_options())


def test_dataset_described_twice_is_rejected():
    write(Path("data/dataset_info.json"), '{"mine": {"file_name": "a.json"}, "mine": {"file_name": "b.json"}}')
    assert 'data/dataset_info.json: the JSON cannot be read: it has the duplicate key "mine"' in load_error(
        dataset="mine"
    )


@pytest.mark.parametrize("columns", [{"prompt": 3}, {"prompt": ["question"]}])
def test_columns_that_are_not_texts_are_rejected(columns):
    write_data("a.json", RECORDS)
    assert '"prompt" in "columns" must be a string. Received: ' in load_error(dataset="a.json", columns=columns)


def test_columns_of_another_format_are_rejected_with_its_name():
    write_data("a.json", [{"talk": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}])
    assert "Set formatting: sharegpt or openai." in load_error(dataset="a.json", columns={"messages": "talk"})
