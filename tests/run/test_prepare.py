"""Tokenized rows are cached: reused with their counts when, and only when, their inputs are unchanged."""

import importlib
import json
import multiprocessing
import os
import pickle
import sys
from array import array
from pathlib import Path

import pytest

from burnish.config.errors import Problem, UserError
from burnish.config.registry import Member
from burnish.data.rows import encode as encode_module
from burnish.data.rows.encode import encode_rows
from burnish.data.rows.row_set import ListedRows
from burnish.data.rows.store import MANIFEST
from burnish.data.stats import DataStats, drop_reason
from burnish.loop.types import IGNORE_INDEX, Example, Message
from burnish.losses.base import OBJECTIVES
from burnish.losses.lm import SftObjective
from burnish.run.plan.options import RunOptions
from burnish.run.prepare import SAMPLE_SIZE, encode, encode_checked, sample_of
from burnish.utils.work import set_watcher
from dataset_helpers import data_options
from recording import RecordingProgress


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def examples(count, first=0):
    return [
        Example(messages=(Message("user", "q"), Message("assistant", str(n))), source="a.json", number=n + 1)
        for n in range(first, first + count)
    ]


class Encoder:
    """Encodes example n as n % 5 + 1 tokens and drops every seventh example; records the batch sizes."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch, stats):
        self.batches.append(len(batch))
        return [self.row(example, stats) for example in batch]

    def row(self, example, stats):
        n = int(example.messages[-1].content)
        if n % 7 == 0:
            stats.add(drop_reason("a seventh"), example)
            return None
        row = {"input_ids": [n] * (n % 5 + 1), "labels": [IGNORE_INDEX] * (n % 5) + [n]}
        return {**row, "loss_weights": [0.1] * (n % 5 + 1)} if n % 3 == 0 else row


def prepared(count=100, encode=None, stats=None, fingerprint="f", **options):
    return encode_rows(
        examples(count),
        encode or Encoder(),
        stats or DataStats(),
        fingerprint=fingerprint,
        options=data_options(**options),
    )


def test_encoded_rows_are_read_back_unchanged():
    encode, stats = Encoder(), DataStats()
    expected = [row for row in Encoder()(examples(100), DataStats()) if row is not None]
    rows = prepared(encode=encode, stats=stats)
    assert list(rows) == expected
    assert rows[-1] == expected[-1]
    assert rows[3:9:2] == expected[3:9:2]
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert all(type(token) is int for token in rows[0]["input_ids"])


def test_lengths_and_sources_are_known_without_reading_rows():
    rows = prepared()
    assert list(rows.lengths) == [len(row["input_ids"]) for row in rows]
    assert list(rows.origins) == [n for n in range(100) if n % 7]


def test_rows_in_memory_equal_rows_on_disk(tmp_path):
    in_memory = encode_rows(examples(100), Encoder(), DataStats(), fingerprint="f")
    assert list(in_memory) == list(prepared())
    assert list(in_memory.lengths) == list(prepared().lengths)


def test_examples_are_encoded_in_batches():
    encode = Encoder()
    prepared(2500, encode)
    assert encode.batches == [1000, 1000, 500]
    encode = Encoder()
    prepared(100, encode, preprocessing_batch_size=30)
    assert encode.batches == [30, 30, 30, 10]


def test_long_examples_are_encoded_in_smaller_batches(monkeypatch):
    sizes = (30, 40, 50, 60, 101, 10, 90, 1)
    examples = [Example(text="x" * size, source="a.json", number=number) for number, size in enumerate(sizes, start=1)]
    monkeypatch.setattr(encode_module, "BATCH_CHARACTERS", 100)
    batches = []

    def encode(batch, stats):
        batches.append([len(example.text) for example in batch])
        return [{"input_ids": [len(example.text)]} for example in batch]

    rows = encode_rows(examples, encode, DataStats(), fingerprint="f")
    assert batches == [[30, 40], [50], [60], [101], [10, 90], [1]]
    assert [row["input_ids"] for row in rows] == [[size] for size in sizes]
    assert list(rows.origins) == list(range(8))
    assert encode_rows([], encode, DataStats(), fingerprint="f").lengths == array("q")


def test_encoded_rows_are_found_in_the_cache():
    first, again = Encoder(), Encoder()
    assert list(prepared(encode=first)) == list(prepared(encode=again))
    assert again.batches == []


def test_dropped_examples_are_counted_on_a_cache_hit():
    first, again = DataStats(), DataStats()
    prepared(stats=first)
    prepared(stats=again)
    assert first.sentences() == again.sentences()
    assert again.records["dropped: a seventh"][1] == ("a.json", 8)


def test_changed_settings_or_data_are_encoded_again():
    prepared()
    for change in ({"fingerprint": "g"}, {"count": 101}):
        encode = Encoder()
        prepared(encode=encode, **change)
        assert encode.batches, change


def test_same_text_in_another_file_is_counted_under_its_name():
    prepared()
    moved, stats = [Example(e.messages, source="b.json", number=e.number) for e in examples(100)], DataStats()
    encode_rows(moved, Encoder(), stats, fingerprint="f", options=data_options())
    assert {source for source, _ in stats.records["dropped: a seventh"]} == {"b.json"}


def test_overwrite_cache_encodes_again():
    prepared()
    encode = Encoder()
    prepared(encode=encode, overwrite_cache=True)
    assert encode.batches


def test_one_of_several_processes_overwrites_the_cache(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    prepared(overwrite_cache=True)
    encode = Encoder()
    prepared(encode=encode, overwrite_cache=True)
    assert encode.batches == []


def test_truncated_cache_entry_is_encoded_again(tmp_path):
    expected = list(prepared())
    (values,) = (tmp_path / "cache" / "rows").glob("*/rows.arrow")
    os.truncate(values, 40)
    encode = Encoder()
    assert list(prepared(encode=encode)) == expected
    assert encode.batches


def test_interrupted_encoding_leaves_no_files(tmp_path):
    class Stops(Encoder):
        def __call__(self, batch, stats):
            if self.batches:
                raise KeyboardInterrupt
            return super().__call__(batch, stats)

    with pytest.raises(KeyboardInterrupt):
        prepared(encode=Stops(), preprocessing_batch_size=10)
    assert not [path for path in (tmp_path / "cache" / "rows").iterdir() if path.is_dir()]
    encode = Encoder()
    prepared(encode=encode)
    assert encode.batches == [100]


def test_examples_without_rows_give_an_empty_dataset():
    rows = encode_rows(examples(1), Encoder(), DataStats(), fingerprint="f", options=data_options())
    assert len(rows) == 0
    assert list(rows) == list(rows.lengths) == []


def test_label_per_row_stays_a_number():
    rows = encode_rows(
        examples(3), lambda batch, stats: [{"input_ids": [1, 2], "labels": 1} for _ in batch], DataStats(),
        fingerprint="f", options=data_options(),
    )  # fmt: skip
    assert rows[2] == {"input_ids": [1, 2], "labels": 1}


def test_rows_are_passed_to_another_process_by_folder_name():
    rows = prepared(2000)
    sent = pickle.dumps(rows)
    assert len(sent) < 1000
    assert pickle.loads(sent)[5] == rows[5]


def test_tokenization_reports_progress_by_batch():
    recorder = RecordingProgress()
    set_watcher(recorder)
    try:
        encode_rows(
            examples(25), Encoder(), DataStats(), fingerprint="f", options=data_options(preprocessing_batch_size=10)
        )
    finally:
        set_watcher(None)
    assert recorder.calls == [("Tokenizing", 25, "records"), 10, 10, 5, "end"]


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_cores(monkeypatch):
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes cannot be forked here")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


@pytest.mark.run
def test_several_processes_give_the_same_rows_and_counts(two_cores):
    one, two = DataStats(), DataStats()
    parent = os.getpid()

    def encode(batch, stats):
        assert os.getpid() != parent
        return Encoder()(batch, stats)

    expected = list(prepared(stats=one, fingerprint="one"))
    result = prepared(
        encode=encode, stats=two, fingerprint="two", preprocessing_num_workers=16, preprocessing_batch_size=10
    )
    assert list(result) == expected
    assert one.records == two.records


@pytest.mark.run
def test_error_in_a_worker_process_keeps_its_problems(two_cores):
    def encode(batch, stats):
        raise UserError([Problem("one.", where="a.json"), Problem("two.")])

    with pytest.raises(UserError) as caught:
        prepared(encode=encode, preprocessing_num_workers=2, preprocessing_batch_size=10)
    assert [problem.what for problem in caught.value.problems] == ["one.", "two."]


@pytest.mark.run
def test_an_encoding_process_that_dies_is_reported(two_cores):
    with pytest.raises(UserError, match="a tokenization process ended unexpectedly"):
        prepared(encode=lambda *_: os._exit(1), preprocessing_num_workers=2, preprocessing_batch_size=10)


def _prepare_slowly(queue):
    class Slow(Encoder):
        def __call__(self, batch, stats):
            queue.put("encoded")
            return super().__call__(batch, stats)

    queue.put(len(prepared(300, Slow(), preprocessing_batch_size=300)))


@pytest.mark.run
def test_one_of_several_processes_encodes_while_others_wait(two_cores):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_prepare_slowly, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in range(4)]
    for process in processes:
        process.join()
    assert results.count("encoded") == 1
    assert results.count(257) == 3


# --- tokenized_path ---------------------------------------------------------------------------------------------------


def test_tokenized_path_is_written_and_then_read(tmp_path):
    expected = list(prepared(tokenized_path="rows"))
    assert (tmp_path / "rows" / "train" / MANIFEST).is_file()
    encode = Encoder()
    assert list(prepared(encode=encode, tokenized_path="rows")) == expected
    assert encode.batches == []


def test_each_dataset_has_a_separate_folder():
    options = data_options(tokenized_path="rows")
    encode_rows(examples(10), Encoder(), DataStats(), fingerprint="f", options=options)
    encode_rows(examples(5), Encoder(), DataStats(), fingerprint="f", options=options, name="eval_a/b")
    encode_rows(examples(4), Encoder(), DataStats(), fingerprint="f", options=options, name="eval_a_b")
    assert sorted(path.name for path in Path("rows").iterdir() if path.is_dir()) == ["eval_a%2Fb", "eval_a_b", "train"]


def test_rows_encoded_with_other_settings_are_rejected_with_the_difference():
    settings = {"template": "qwen", "cutoff_len": 512}
    prepared(fingerprint=settings, tokenized_path="rows")
    with pytest.raises(UserError) as caught:
        prepared(count=99, fingerprint={**settings, "template": "llama3"}, tokenized_path="rows")
    message = str(caught.value)
    assert 'template changed from "qwen" to "llama3"' in message
    assert "data differs" in message
    assert "cutoff_len" not in message
    assert "overwrite_cache: true" in message
    encode = Encoder()
    prepared(count=99, encode=encode, fingerprint="other", tokenized_path="rows", overwrite_cache=True)
    assert encode.batches == [99]


def test_encoded_rows_are_usable_without_source_data():
    expected = list(prepared(tokenized_path="rows"))
    options = data_options(tokenized_path="rows")
    assert list(encode_rows((), Encoder(), DataStats(), fingerprint="f", options=options)) == expected
    with pytest.raises(UserError, match="settings changed from"):
        encode_rows((), Encoder(), DataStats(), fingerprint="g", options=options)


def test_damaged_tokenized_path_is_rejected_and_not_silently_repaired():
    prepared(tokenized_path="rows")
    os.truncate("rows/train/rows.arrow", 8)
    with pytest.raises(UserError, match="is incomplete"):
        prepared(tokenized_path="rows")


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
def test_folder_of_another_library_is_rejected(name):
    Path("rows").mkdir()
    Path("rows", name).write_text(json.dumps({}))
    with pytest.raises(UserError, match="a folder written by burnish"):
        prepared(tokenized_path="rows")


def test_slow_record_is_named_while_it_is_encoded():
    options = [Example(text="word " * size, source="data.json", number=size) for size in (3, 500_000, 2)]
    recorder = RecordingProgress()
    set_watcher(recorder)
    try:
        for some in (options, options[:1]):
            encode_rows(some, lambda batch, stats: [None] * len(batch), DataStats(), fingerprint="f")
    finally:
        set_watcher(None)
    started = [call[0] for call in recorder.calls if isinstance(call, tuple)]
    assert started == ["Tokenizing (longest: data.json, record 500000, 2.5 million characters)", "Tokenizing"]


def test_sample_of_alternating_rows_has_both_kinds():
    rows = ListedRows([{"input_ids": [number % 2], "labels": [number % 2]} for number in range(4 * SAMPLE_SIZE)])
    sample = sample_of(rows)
    assert len(sample) == SAMPLE_SIZE
    assert {row["input_ids"][0] for row in sample} == {0, 1}
    assert list(sample) == list(sample_of(rows))


class Fixed(SftObjective):
    """Returns the same rows for any examples."""

    rows = ({"input_ids": [1, 2], "labels": [1, 2], "loss_weights": [1.0, 1.0]},)

    def encode(self, examples, stats, truncate=True):
        return list(self.rows)

    @property
    def fingerprint(self):
        return "always the same"


@pytest.fixture
def of_a_package(tmp_path, monkeypatch):
    """Register ``Fixed`` as a stage of another package, and return its source file."""
    source = tmp_path / "of_a_package.py"
    source.write_text("first = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_a_package")
    OBJECTIVES.names()
    monkeypatch.setitem(OBJECTIVES._members, "fixed", Member("fixed", Fixed, module="of_a_package"))
    yield source
    del sys.modules[module.__name__]


def test_changed_code_of_a_package_encodes_rows_again(of_a_package, monkeypatch):
    options = RunOptions(stage="fixed")
    objective = Fixed(options, None)
    before = list(encode(examples(1), objective, DataStats(), options))
    monkeypatch.setattr(Fixed, "rows", ({"input_ids": [3, 4], "labels": [3, 4]},))
    assert list(encode(examples(1), objective, DataStats(), options)) == before
    of_a_package.write_text("second = 2\n")
    assert [row["input_ids"] for row in encode(examples(1), objective, DataStats(), options)] == [[3, 4]]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), "must return a row or None for each of 1 examples. Received: 0."),
        (({"input_ids": [1, 2], "labels": [1, 2], "loss_weights": [1.0]},), '"loss_weights" of a row must have 2'),
    ],
)  # fmt: skip
def test_malformed_rows_of_a_package_are_rejected(rows, expected, of_a_package, monkeypatch):
    monkeypatch.setattr(Fixed, "rows", rows)
    with pytest.raises(ValueError, match=r"^stage fixed: ") as raised:
        encode_checked(Fixed(RunOptions(), None), "fixed", examples(1), DataStats())
    assert expected in str(raised.value)
