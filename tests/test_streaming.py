"""streaming: true. Records stay where they are, a row is encoded when it is wanted, a resumed run goes on exactly."""

import json
import signal
import subprocess
import sys

import pytest

from burnish.cli import main
from burnish.data.stream import order_of
from data_sets import write
from small_run import as_words, make_user, records
from test_train_run import KILLS_ITSELF_AFTER_STEP_FIVE, history, same_weights


@pytest.fixture
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    given = make_user(tmp_path, dropout=0.1, save_steps=4, logging_steps=1, plot_loss=False)
    return {**given, "streaming": True, "max_steps": 10, "buffer_size": 8}


def run(given, folder=None, **more):
    given = {**given, **more}
    return main(["train", *as_words(given if folder is None else {**given, "output_dir": str(folder)})])


def test_records_are_shuffled_among_those_that_lie_together():
    order = order_of(20, seed=3, epoch=0, buffer_size=8)
    assert [sorted(order[:8]), sorted(order[8:16]), sorted(order[16:])] == [
        list(range(8)), list(range(8, 16)), list(range(16, 20)),
    ]  # fmt: skip
    assert order[:8] != list(range(8))
    assert order != order_of(20, seed=3, epoch=1, buffer_size=8)
    assert order == order_of(20, seed=3, epoch=0, buffer_size=8)


def test_a_killed_run_ends_in_the_same_weights_and_no_row_is_kept(tmp_path, user):
    assert run(user, tmp_path / "whole") == 0
    words = as_words({**user, "output_dir": str(tmp_path / "cut")})
    child = subprocess.Popen([sys.executable, "-c", KILLS_ITSELF_AFTER_STEP_FIVE, *words], stdout=subprocess.DEVNULL)
    assert child.wait() == -signal.SIGKILL
    assert run(user, tmp_path / "cut") == 0
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert not (tmp_path / "cache").exists()


def test_another_buffer_is_another_run(tmp_path, user, capsys):
    assert run(user) == 0
    assert run(user, buffer_size=4, max_steps=12) == 2
    assert "shuffled among 8" in "".join(capsys.readouterr())


def test_several_sets_are_mixed_and_some_records_held_out(tmp_path, user):
    lines = "".join(json.dumps(record) + "\n" for record in records(9))
    write(tmp_path / "more.jsonl", lines)
    mixed = {**user, "dataset": f"{user['dataset']},{tmp_path / 'more.jsonl'}", "mix_strategy": "interleave_over",
             "interleave_probs": "0.5,0.5", "val_size": 6, "eval_strategy": "steps", "eval_steps": 5}  # fmt: skip
    assert run(mixed) == 0
    assert [entry["step"] for entry in history(tmp_path / "out") if "eval_loss" in entry] == [5, 10]


def test_a_parquet_file_is_read_where_it_lies(tmp_path, user):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records(24)), tmp_path / "data.parquet")
    assert run(user, tmp_path / "json") == 0
    assert run(user, tmp_path / "parquet", dataset=str(tmp_path / "data.parquet")) == 0
    assert same_weights(tmp_path / "json", tmp_path / "parquet")


def test_pretraining_text_is_streamed_without_packing(tmp_path, user):
    write(tmp_path / "text.jsonl", "".join(json.dumps({"text": "red green blue " * 4}) + "\n" for _ in range(20)))
    assert run(user, dataset=str(tmp_path / "text.jsonl"), stage="pt", cutoff_len=32) == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_steps": -1}, '"streaming" needs "max_steps"'),
        ({"val_size": 0.1}, '"val_size" must be a number of records when streaming. Received: 0.1'),
        ({"packing": True}, '"streaming" is true, and packing needs all rows'),
        ({"group_by_length": True}, "group_by_length needs all rows"),
    ],
    ids=str,
)
def test_what_cannot_be_streamed_is_refused(user, capsys, given, sentence):
    assert run(user, **given) == 2
    assert sentence in "".join(capsys.readouterr())
