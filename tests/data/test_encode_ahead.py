"""Rows that are encoded while the loop runs: the same weights as from rows that were encoded before it, whoever encodes
them, wherever the run is cut; records are read where they lie."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc

import pyarrow
import pyarrow.ipc
import pytest

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.data.batches.stream import LateReader, RowStream, StepPartition
from burnish.data.reading import record_index
from burnish.data.reading.files import read_records
from burnish.data.reading.record_index import RecordIndex
from burnish.data.reading.tables import TABLES
from burnish.data.rows.ahead import AheadRows
from burnish.data.rows.encode import place_ahead
from burnish.data.sets.examples import ListedExamples
from burnish.data.sets.sources import load_datasets
from burnish.data.tally import Tally
from burnish.loop.types import IGNORE_INDEX
from burnish.run import prepare
from data_sets import data_options, load, qa, write
from runs import KILLS_ITSELF_AFTER_STEP_FIVE, same_weights
from small_run import as_words, make_user, records

pytestmark = pytest.mark.run

# --- records where they lie -------------------------------------------------------------------------------------------

LINES = [json.dumps({"text": f"line {number} é", "n": [number]}, ensure_ascii=False) for number in range(12)]
FILES = {
    "lines": "\n".join(LINES),
    "a line end behind the last": "\n".join(LINES) + "\n",
    "blank lines and Windows line ends": "\r\n \r\n".join(LINES) + "\r\n\r\n",
    "a byte order mark": "\ufeff" + "\n".join(LINES),
    "a list": "[" + ", ".join(LINES) + "]",
    "a list over lines": json.dumps([json.loads(line) for line in LINES], indent=2) + "\n\n",
    "a list behind a byte order mark": "\ufeff \n[" + ",\n".join(LINES) + "\n]",
    "an empty list": "[ ]",
    "nothing": "",
}


@pytest.mark.parametrize("block", [3, 50, 1 << 20])
@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_an_index_gives_the_records_that_reading_gives(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr(record_index, "_BLOCK", block)
    path = write(tmp_path / "a.json", text)
    index = RecordIndex(path)
    assert list(index) == list(read_records(path))


CSV = {
    "quotes": 'a,b\n1,"x\ny, ""z"""\n2,é\u2028é\n',
    "Windows line ends and blank rows": 'a,b\r\n\r\n1,"x\r\ny"\r\n\r\n2,z',
    "old line ends": 'a,b\r1,"x\ry"\r2,z\r',
    "a byte order mark": "\ufeffa,b\n1,x\n",
    "a header alone": "a,b\n",
    "nothing": "",
}
TEXT = {
    "lines": "one\n\ntwo \x0b\u2028 é\n", "Windows line ends": "one\r\n\r\ntwo",
    "old line ends": "one\rtwo\r\r\nthree\r",
    "a byte order mark": "\ufeffone\ntwo", "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "text"),
    [*((".csv", text) for text in CSV.values()), *((".txt", text) for text in TEXT.values())],
    ids=[*(f"csv: {name}" for name in CSV), *(f"text: {name}" for name in TEXT)],
)
def test_a_table_gives_the_records_that_reading_gives(tmp_path, suffix, text):
    path = write(tmp_path / f"a{suffix}", text.encode())
    table = TABLES[suffix](path)
    read = list(read_records(path))
    assert [table[index] for index in reversed(range(len(table)))] == read[::-1]
    if suffix == ".csv":
        rows = [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")) if row]
        assert [list(row.values()) for row in read] == rows[1:]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_rows_of_an_arrow_file_are_asked_for_one_by_one(tmp_path, kind):
    table = pyarrow.Table.from_pylist([{"n": number, "text": ["é"] * number} for number in range(10)])
    opened = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    rows = TABLES[".arrow"](tmp_path / "a.arrow")
    assert [rows[index] for index in (9, 0, 4, 3)] == [table.to_pylist()[index] for index in (9, 0, 4, 3)]
    assert len(rows) == 10


def test_a_csv_row_with_too_many_values_is_refused_before_the_first_step(tmp_path):
    path = write(tmp_path / "a.csv", 'a,b\n1,"x\ny"\n2,y,z\n')
    with pytest.raises(UserError, match=r"a.csv, line 4: the row has 3 values, and the header names 2 columns"):
        TABLES[".csv"](path)


def test_a_table_holds_where_its_records_are_and_not_what_they_say(tmp_path):
    paths = [write(tmp_path / "a.csv", "a,b\n" + '"x, y",zz\n' * 40_000), write(tmp_path / "a.txt", "x y z\n" * 40_000)]
    tracemalloc.start()
    tables = [TABLES[path.suffix](path) for path in paths]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, tables)) == 80_000
    assert held < 80_000 * 16 * 1.5  # two numbers of eight bytes a record


def test_an_index_names_the_broken_line_it_meets(tmp_path):
    index = RecordIndex(write(tmp_path / "a.jsonl", "\n".join([*LINES[:5], "", '{"text": "cut', *LINES[5:]])))
    assert index[4] == json.loads(LINES[4])
    assert index[6] == json.loads(LINES[5])
    with pytest.raises(UserError, match=r"a.jsonl, line 7: the line is not whole JSON"):
        index[5]


@pytest.mark.parametrize("text", ['[{"a": 1} {"a": 2}]', '[{"a": 1}, {"a": ', '[{"a": 1},]', "[1"])
def test_a_broken_list_is_refused_as_reading_refuses_it(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    with pytest.raises(UserError) as read:
        list(read_records(path))
    with pytest.raises(UserError) as indexed:
        RecordIndex(path)
    assert indexed.value.problems == read.value.problems


def lazily(**given):
    options = {"encode_ahead": True, **given}
    return load_datasets(data_options(**options), 7, Tally(), may_run_ahead=True)


@pytest.mark.parametrize(
    "given",
    [{}, {"max_samples": 3}, {"val_size": 2}, {"mix_strategy": "interleave_over"},
     {"mix_strategy": "interleave_under", "interleave_probs": [0.3, 0.7]}],
    ids=str,
)  # fmt: skip
def test_sets_that_stay_in_their_files_have_the_examples_of_those_that_are_loaded(tmp_path, given):
    a = write(tmp_path / "a.jsonl", [qa(number) for number in range(7)])
    b = write(tmp_path / "b.json", [qa(number) for number in range(100, 104)])
    info = {"a": {"file_name": str(a)}, "b": {"file_name": str(b), "num_samples": 6}}
    named = {"dataset": ["a", "b"], "dataset_dir": info, **given}
    stays, loaded = lazily(**named), load(seed=7, **named)
    assert list(stays.train) == list(loaded.train)
    assert {name: list(some) for name, some in stays.eval.items()} == {n: list(some) for n, some in loaded.eval.items()}
    assert stays.notes == loaded.notes


def test_what_is_wrong_with_a_record_is_said_when_it_is_met(tmp_path):
    path = write(tmp_path / "a.jsonl", [qa(number, 5 if number == 30 else "yes") for number in range(40)])
    train = lazily(dataset=str(path)).train
    assert len(train.make(range(30), Tally())) == 30
    with pytest.raises(UserError, match=r'a.jsonl, record 31 \(line 31\): "output" must be text'):
        train.make([30], Tally())
    tally = Tally()
    assert lazily(dataset=str(path), on_bad_record="drop").train.make([29, 30], tally)[1] is None
    assert tally.sentences() == [f"dropped: a column is missing or of the wrong type: 1 of 2 rows ({path}: 31)"]


# --- rows -------------------------------------------------------------------------------------------------------------


def number_rows(count, folder, fails=()):
    """Rows that hold their number, none for every fifth; who encoded them is counted."""
    asked = []

    def encode(numbers):
        asked.extend(numbers)
        if set(numbers) & set(fails):
            raise UserError("broken")
        return [None if n % 5 == 0 else {"input_ids": [n] * (n % 3 + 1), "labels": [n]} for n in numbers], Tally()

    return AheadRows(encode, count, folder, batch_size=8), asked


def wait_for(rows, count):
    import time

    end = time.monotonic() + 20
    while rows.num_encoded < count and time.monotonic() < end:
        time.sleep(0.01)
    assert rows.num_encoded == count


def test_rows_are_the_same_whether_they_are_encoded_before_or_where_they_are_wanted(tmp_path):
    alone, _ = number_rows(100, tmp_path / "alone")
    expected = alone.some(range(100))
    rows, asked = number_rows(100, tmp_path / "rows")
    order = list(reversed(range(100)))
    with rows.going_ahead():
        rows.follow(order)
        wait_for(rows, 100)
        assert rows.some(order) == [expected[number] for number in order]
    assert asked == [], "the loop encoded what another process had"
    again, asked = number_rows(100, tmp_path / "rows")
    assert list(again) == expected
    assert asked == []


def test_what_a_stopped_run_encoded_is_not_encoded_again(tmp_path):
    rows, _ = number_rows(60, tmp_path)
    rows._write_segment(list(range(20, 40)), lambda: True)
    again, asked = number_rows(60, tmp_path)
    assert [row and row["labels"] for row in again.some([19, 20, 21, 41])] == [[19], None, [21], [41]]
    assert asked == [19, 41]


@pytest.mark.parametrize(("age_s", "processes", "left"), [(0, "1", 0), (9e5, "2", 0), (-60, "2", 1)])
def test_overwriting_the_cache_removes_what_earlier_runs_encoded_and_not_what_other_ranks_did(
    tmp_path, monkeypatch, age_s, processes, left
):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WORLD_SIZE", processes)
    options = data_options(overwrite_cache=True)
    segment = place_ahead(ListedExamples(), {"a": 1}, options) / "segment-000000"
    segment.mkdir(parents=True)
    os.utime(segment, (time.time() - age_s,) * 2)
    assert len(list(place_ahead(ListedExamples(), {"a": 1}, options).glob("segment-*"))) == left


def test_an_example_that_cannot_be_encoded_is_left_to_the_loop(tmp_path):
    rows, _ = number_rows(40, tmp_path, fails=[17])
    with rows.going_ahead():
        rows.follow(range(40))
        wait_for(rows, 32)  # without the batch that holds it
        assert rows.some([16])[0] == {"input_ids": [16, 16], "labels": [16]}
        with pytest.raises(UserError, match="broken"):
            rows.some([17])


def test_a_gap_weighs_nothing_and_moves_no_other_row_into_another_step(tmp_path):
    rows, _ = number_rows(12, tmp_path)
    flat = RowStream(rows, batch_of, StepPartition(2, 2), seed=0, read=LateReader(rows, batch_of))
    flat.options.train_sampling_strategy = "sequential"
    groups = list(flat.groups())
    labels = [[learned(batch) for batch in group.batches] for group in groups]
    assert labels == [[[1], [2, 3]], [[4], [6, 7]], [[8, 9], [11]]]
    assert [group.cursor["position"] for group in groups] == [4, 8, 12]


def test_a_micro_batch_of_gaps_is_blank(tmp_path):
    rows, _ = number_rows(6, tmp_path)
    stream = RowStream(rows, batch_of, StepPartition(1, 1), seed=0, read=LateReader(rows, batch_of))
    stream.options.train_sampling_strategy = "sequential"
    assert [learned(group.batches[0]) for group in stream.step_batches()] == [[], [1], [2], [3], [4], []]


def batch_of(rows):
    from burnish.data.batches.batching import collate_padded

    return collate_padded([{**row, "labels": row["labels"] + row["input_ids"][1:]} for row in rows], pad_id=0)


def learned(batch):
    return [row[0] for row in batch["labels"].tolist() if row[0] != IGNORE_INDEX]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return make_user(tmp_path, dropout=0.1, save_steps=4, plot_loss=False)


def run(given, folder=None, **more):
    given = {**given, **more}
    return main(["train", *as_words(given if folder is None else {**given, "output_dir": str(folder)})])


def test_the_weights_are_those_of_rows_encoded_before_with_and_without_a_kill(tmp_path, user):
    assert run(user, tmp_path / "before", encode_ahead=False) == 0
    assert run(user, tmp_path / "ahead", encode_ahead=True) == 0
    assert same_weights(tmp_path / "before", tmp_path / "ahead")
    words = as_words({**user, "encode_ahead": True, "output_dir": str(tmp_path / "cut"), "overwrite_cache": True})
    child = subprocess.Popen([sys.executable, "-c", KILLS_ITSELF_AFTER_STEP_FIVE, *words], stdout=subprocess.DEVNULL)
    assert child.wait() == -signal.SIGKILL
    assert run(user, tmp_path / "cut", encode_ahead=True) == 0
    assert same_weights(tmp_path / "before", tmp_path / "cut")


def test_rows_that_are_dropped_are_counted_and_the_cache_changes_nothing(tmp_path, user, capsys):
    some = records(24)
    some[3]["output"] = some[7]["output"] = ""
    write(tmp_path / "data.json", some)
    assert run(user, tmp_path / "first", encode_ahead=True) == 0
    assert "dropped: all its answers are empty: 2 of 24 rows" in "".join(capsys.readouterr())
    assert run(user, tmp_path / "second", encode_ahead=True) == 0
    assert same_weights(tmp_path / "first", tmp_path / "second")


def test_a_bad_record_stops_the_run_where_it_is_met_and_the_checkpoints_stay(tmp_path, user, capsys, monkeypatch):
    some = records(24)
    some[23]["output"] = 5
    write(tmp_path / "data.json", some)
    given = {**user, "encode_ahead": True, "train_sampling_strategy": "sequential", "preprocessing_batch_size": 1}
    monkeypatch.setattr(prepare, "LOOKED_AT", 2)
    assert run(given) == 2
    said = "".join(capsys.readouterr())
    assert "data.json, record 24 (line " in said
    assert '"output" must be text. Received: 5' in said
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


def test_explain_says_that_the_rest_is_encoded_while_training(user, capsys):
    assert main(["explain", *as_words({**user, "encode_ahead": True})]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "24 rows" in said
    assert "the rest is encoded while training" in said


@pytest.mark.parametrize("other", [{"packing": True}, {"group_by_length": True}, {"tokenized_path": "rows"}])
def test_what_needs_all_rows_first_is_refused(user, capsys, other):
    assert run(user, encode_ahead=True, **other) == 2
    assert f'"encode_ahead" is true, and {next(iter(other))} needs all rows' in "".join(capsys.readouterr())


def test_a_set_that_cannot_be_large_is_not_indexed_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "some.json"
    path.write_text(json.dumps([{"instruction": "{" * 4, "output": "b"}] * 10), encoding="utf-8")
    assert not record_index.may_hold_more([path], 50)
    assert record_index.may_hold_more([path], 49)
    assert record_index.may_hold_more([path, path], 50)
    monkeypatch.setattr(record_index.RecordIndex, "spans", lambda *given: pytest.fail("indexed"))
    assert len(load_datasets(data_options(dataset=[str(path)]), 0, Tally(), may_run_ahead=True).train) == 10
