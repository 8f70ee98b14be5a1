"""Streamed records and rows: random access to files of each type, with examples and rows created on access."""

import csv
import io
import json

import pyarrow
import pyarrow.ipc
import pytest

from burnish.config.errors import UserError
from burnish.data.batches.batching import collate_padded
from burnish.data.batches.loader import RowLoader, StepPartition
from burnish.data.reading.files import read_records
from burnish.data.reading.record_index import open_table
from burnish.data.rows.streamed import StreamedRows
from burnish.data.sets.examples import ListedExamples
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats, drop_reason
from burnish.loop.types import IGNORE_INDEX, Example
from dataset_helpers import alpaca_record, data_options, load, write

LINES = [json.dumps({"text": f"line {number} é", "n": [number]}, ensure_ascii=False) for number in range(12)]
FILES = {
    "lines": "\n".join(LINES),
    "a trailing line end": "\n".join(LINES) + "\n",
    "blank lines and Windows line ends": "\r\n \r\n".join(LINES) + "\r\n\r\n",
    "lines with blanks of Unicode": "\n\u3000\n \x1c\n".join(LINES) + "\n\u00a0",
    "a byte order mark": "\ufeff" + "\n".join(LINES),
    "a list": "[" + ", ".join(LINES) + "]",
    "a list on several lines": json.dumps([json.loads(line) for line in LINES], indent=2) + "\n\n",
    "a list after a byte order mark": "\ufeff \n[" + ",\n".join(LINES) + "\n]",
    "an empty list": "[ ]",
    "an empty file": "",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_index_gives_the_same_records_as_reading(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    assert list(open_table(path)) == list(read_records(path))


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
def test_table_gives_the_same_records_as_reading(tmp_path, suffix, text):
    path = write(tmp_path / f"a{suffix}", text.encode())
    table = open_table(path)
    read = list(read_records(path))
    assert [table[index] for index in reversed(range(len(table)))] == read[::-1]
    if suffix == ".csv":
        rows = [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")) if row]
        assert [list(row.values()) for row in read] == rows[1:]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_file_rows_are_read_one_by_one(tmp_path, kind):
    table = pyarrow.Table.from_pylist([{"n": number, "text": ["é"] * number} for number in range(10)])
    opened = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    rows = open_table(tmp_path / "a.arrow")
    assert [rows[index] for index in (9, 0, 4, 3)] == [table.to_pylist()[index] for index in (9, 0, 4, 3)]
    assert len(rows) == 10


def test_csv_row_with_too_many_values_is_rejected_before_first_step(tmp_path):
    path = write(tmp_path / "a.csv", 'a,b\n1,"x\ny"\n2,y,z\n')
    with pytest.raises(UserError, match=r"a.csv, line 4: the row has 3 values, but the header has 2 columns"):
        open_table(path)


def test_index_reports_the_invalid_line_it_meets(tmp_path):
    index = open_table(write(tmp_path / "a.jsonl", "\n".join([*LINES[:5], "", '{"text": "cut', *LINES[5:]])))
    assert index[4] == json.loads(LINES[4])
    assert index[6] == json.loads(LINES[5])
    with pytest.raises(UserError, match=r"a.jsonl, line 7: invalid JSON"):
        index[5]


@pytest.mark.parametrize("text", ['[{"a": 1} {"a": 2}]', '[{"a": 1}, {"a": ', '[{"a": 1},]', "[1"])
def test_invalid_list_is_rejected_as_by_reading(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    with pytest.raises(UserError) as expected:
        list(read_records(path))
    with pytest.raises(UserError) as indexed:
        open_table(path)
    assert indexed.value.problems == expected.value.problems


def load_streamed(**options):
    return load_datasets(data_options(streaming=True, **options), 7, DataStats(), may_stream=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_samples": 3}, {"val_size": 2}, {"mix_strategy": "interleave_over"},
     {"mix_strategy": "interleave_under", "interleave_probs": [0.3, 0.7]}],
    ids=str,
)  # fmt: skip
def test_streamed_datasets_have_the_same_examples_as_loaded_ones(tmp_path, options):
    a = write(tmp_path / "a.jsonl", [alpaca_record(number) for number in range(7)])
    b = write(tmp_path / "b.json", [alpaca_record(number) for number in range(100, 104)])
    info = {"a": {"file_name": str(a)}, "b": {"file_name": str(b), "num_samples": 6}}
    settings = {"dataset": ["a", "b"], "dataset_dir": info, **options}
    streamed, loaded = load_streamed(**settings), load(seed=7, **settings)
    assert list(streamed.train) == list(loaded.train)
    assert {name: list(examples) for name, examples in streamed.eval.items()} == {
        n: list(examples) for n, examples in loaded.eval.items()
    }
    assert streamed.notes == loaded.notes


def test_held_out_records_are_counted_once_when_streaming(tmp_path):
    path, stats = write(tmp_path / "a.jsonl", [alpaca_record(n, f"{n} <image>") for n in range(7)]), DataStats()
    options = data_options(streaming=True, dataset=[str(path)], val_size=3)
    load_datasets(options, 7, stats, may_stream=True)
    assert stats.count("kept: <image> is tokenized as plain text") == 3


def test_invalid_record_is_reported_when_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", [alpaca_record(number, 5 if number == 30 else "yes") for number in range(40)])
    train = load_streamed(dataset=str(path)).train
    assert len(train.make(range(30), DataStats())) == 30
    with pytest.raises(UserError, match=r'a.jsonl, record 31 \(line 31\): "output" must be a string'):
        train.make([30], DataStats())
    stats = DataStats()
    assert load_streamed(dataset=str(path), on_bad_record="drop").train.make([29, 30], stats)[1] is None
    assert stats.sentences() == [f"dropped: a column is missing or of the wrong type: 1 of 2 examples ({path}: 31)"]


# --- rows -------------------------------------------------------------------------------------------------------------


def number_rows(count):
    """Return streamed rows that consist of their number. Multiples of five have no row."""

    def encode(examples, stats):
        for example in examples:
            if example.number % 5 == 0:
                stats.add(drop_reason("a fifth"), example)
        stats.seen += len(examples)
        numbers = [example.number for example in examples]
        return [None if n % 5 == 0 else {"input_ids": [n] * (n % 3 + 1), "labels": [n]} for n in numbers]

    return StreamedRows(ListedExamples([Example(text="", source="a", number=n) for n in range(count)]), encode)


def test_each_example_is_counted_once_for_repeated_rows():
    rows = number_rows(12)
    rows.__getitems__([0, 1, 5])
    rows.__getitems__([1, 5, 6])
    rows.__getitems__([0, 5])
    stats = rows.statistics()
    assert stats.seen == 4
    assert stats.records == {"dropped: a fifth": [("a", 0), ("a", 5)]}


def test_example_without_row_has_no_weight_and_shifts_no_other_row():
    loader = RowLoader(number_rows(12), batch_of, StepPartition(2, 2), seed=0)
    loader.options.train_sampling_strategy = "sequential"
    groups = list(loader.step_batches())
    labels = [[first_labels(batch) for batch in group.batches] for group in groups]
    assert labels == [[[1], [2, 3]], [[4], [6, 7]], [[8, 9], [11]]]
    assert [group.cursor["position"] for group in groups] == [4, 8, 12]


def test_micro_batch_without_rows_is_blank():
    loader = RowLoader(number_rows(6), batch_of, StepPartition(1, 1), seed=0)
    loader.options.train_sampling_strategy = "sequential"
    assert [first_labels(group.batches[0]) for group in loader.step_batches()] == [[], [1], [2], [3], [4], []]


def batch_of(rows):
    return collate_padded([{**row, "labels": row["labels"] + row["input_ids"][1:]} for row in rows], pad_id=0)


def first_labels(batch):
    return [row[0] for row in batch["labels"].tolist() if row[0] != IGNORE_INDEX]
