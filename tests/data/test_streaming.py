"""``streaming: true``: rows are tokenized on access, and a resumed run is exact."""

import json
import signal
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from burnish.cli import main
from burnish.data.batches.loader import order_of
from burnish.data.reading.record_index import open_table
from burnish.data.rows.streamed import StreamedRows
from burnish.data.sets import sources
from burnish.run import prepare
from dataset_helpers import write
from representative import representative_slow
from run_outputs import KILLS_ITSELF_AFTER_STEP_FIVE, history, same_weights
from small_run import as_arguments, make_workspace, records

pytestmark = pytest.mark.run


@pytest.fixture
def run_options(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    options = make_workspace(tmp_path, dropout=0.1, save_steps=4, logging_steps=1, plot_loss=False)
    return {**options, "streaming": True, "max_steps": 10, "buffer_size": 8}


def run(options, folder=None, **more):
    options = {**options, **more}
    return main(["train", *as_arguments(options if folder is None else {**options, "output_dir": str(folder)})])


def test_records_are_shuffled_within_the_buffer():
    order = order_of(20, seed=3, epoch=0, buffer_size=8)
    assert [sorted(order[:8]), sorted(order[8:16]), sorted(order[16:])] == [
        list(range(8)), list(range(8, 16)), list(range(16, 20)),
    ]  # fmt: skip
    assert order[:8] != list(range(8))
    assert order != order_of(20, seed=3, epoch=1, buffer_size=8)
    assert order == order_of(20, seed=3, epoch=0, buffer_size=8)


@pytest.mark.slow
def test_killed_run_resumes_to_same_weights_without_cached_rows(tmp_path, run_options):
    assert run(run_options, tmp_path / "whole") == 0
    argv = as_arguments({**run_options, "output_dir": str(tmp_path / "cut")})
    child = subprocess.Popen([sys.executable, "-c", KILLS_ITSELF_AFTER_STEP_FIVE, *argv], stdout=subprocess.DEVNULL)
    assert child.wait() == -signal.SIGKILL
    assert run(run_options, tmp_path / "cut") == 0
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert not (tmp_path / "cache").exists()


def test_weights_match_run_with_rows_encoded_before(tmp_path, run_options):
    assert run(run_options, tmp_path / "streamed", buffer_size=1000) == 0
    assert run(run_options, tmp_path / "before", streaming=False) == 0
    assert same_weights(tmp_path / "streamed", tmp_path / "before")


def test_dropped_rows_are_counted(tmp_path, run_options, capsys):
    examples = records(24)
    examples[3]["output"] = examples[7]["output"] = ""
    write(tmp_path / "data.json", examples)
    assert run(run_options) == 0
    assert "dropped: all responses are empty: 2 of 24 examples" in "".join(capsys.readouterr())


def test_bad_record_stops_run_and_keeps_checkpoints(tmp_path, run_options, capsys, monkeypatch):
    examples = records(24)
    examples[23]["output"] = 5
    write(tmp_path / "data.json", examples)
    monkeypatch.setattr(prepare, "SAMPLE_SIZE", 2)
    assert run(run_options, train_sampling_strategy="sequential") == 2
    message = "".join(capsys.readouterr())
    assert "data.json, record 24 (line " in message
    assert '"output" must be a string. Received: 5' in message
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


@pytest.mark.parametrize("suffix", representative_slow([".jsonl", ".arrow"], 1))
@pytest.mark.parametrize("change", representative_slow(["truncated", "overwritten"], 1))
def test_file_changed_during_training_is_reported_and_run_resumes_once_restored(
    tmp_path, run_options, capsys, monkeypatch, suffix, change
):
    path = tmp_path / f"lines{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records(24)))
    else:
        table = pyarrow.Table.from_pylist(records(24))
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    original, read, calls = path.read_bytes(), StreamedRows.__getitems__, []
    options = {**run_options, "dataset": str(path)}
    assert run(options, tmp_path / "whole") == 0

    def damage_and_read(self, examples):
        calls.append(examples)
        if len(calls) == 24 + 12:  # planning reads 24 rows, and a step has two micro-batches
            path.write_bytes(original[:100] if change == "truncated" else original.replace(b"r", b"g"))
        return read(self, examples)

    with monkeypatch.context() as patch:
        patch.setattr(StreamedRows, "__getitems__", damage_and_read)
        assert run(options, tmp_path / "cut") == 2
    message = " ".join("".join(capsys.readouterr()).split())
    change_text = f"it had {len(original):,} bytes and now has" if change == "truncated" else "its size is unchanged."
    assert f"{path}: the file was changed during training: {change_text}" in message
    assert "Restore the original file, and run the same command to resume" in message
    path.write_bytes(original)
    assert run(options, tmp_path / "cut") == 0
    assert same_weights(tmp_path / "whole", tmp_path / "cut")


def test_explain_states_that_remaining_rows_are_encoded_during_training(run_options, capsys):
    assert main(["explain", *as_arguments(run_options)]) == 0
    message = " ".join("".join(capsys.readouterr()).split())
    assert "24 examples" in message
    assert "the rest is tokenized during training" in message


def test_encode_ahead_has_no_effect_and_note_names_streaming(run_options, capsys):
    assert main(["explain", *as_arguments({**run_options, "encode_ahead": True})]) == 0
    message = " ".join("".join(capsys.readouterr()).split())
    assert '"encode_ahead"' in message
    assert "Set streaming: true to tokenize it during training" in message


@pytest.mark.slow
def test_different_buffer_size_is_a_different_run(tmp_path, run_options, capsys):
    assert run(run_options) == 0
    assert run(run_options, buffer_size=4, max_steps=12) == 2
    assert "shuffled among 8" in "".join(capsys.readouterr())


@pytest.mark.slow
def test_several_datasets_are_mixed_with_held_out_records(tmp_path, run_options):
    lines = "".join(json.dumps(record) + "\n" for record in records(9))
    write(tmp_path / "more.jsonl", lines)
    mixed = {**run_options, "dataset": f"{run_options['dataset']},{tmp_path / 'more.jsonl'}",
             "mix_strategy": "interleave_over",
             "interleave_probs": "0.5,0.5", "val_size": 6, "eval_strategy": "steps", "eval_steps": 5}  # fmt: skip
    assert run(mixed) == 0
    assert [entry["step"] for entry in history(tmp_path / "out") if "eval_loss" in entry] == [5, 10]


def test_parquet_file_with_a_column_of_maps_is_streamed(run_options, tmp_path):
    rows = records(8)
    maps = pyarrow.array([[("a", 1)]] * len(rows), pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "more": maps}), tmp_path / "rows.parquet")
    options = {**run_options, "dataset": str(tmp_path / "rows.parquet"), "streaming": True, "max_steps": 2}
    assert main(["train", *as_arguments(options)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", representative_slow([".parquet", ".csv", ".arrow"], 1))
def test_other_file_types_are_read_in_place(tmp_path, run_options, monkeypatch, suffix):
    path, table = tmp_path / f"data{suffix}", pyarrow.Table.from_pylist(records(24))
    if suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert run(run_options, tmp_path / "json") == 0
    monkeypatch.setattr(sources, "convert_records", None)  # used only if a data set is loaded
    assert run(run_options, tmp_path / "other", dataset=str(path)) == 0
    assert same_weights(tmp_path / "json", tmp_path / "other")


def test_arrow_file_is_opened_without_reading_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", None)  # it pickles the table
    path, table = tmp_path / "rows.arrow", pyarrow.Table.from_pylist(records(24))
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert open_table(path)[5] == records(24)[5]


def test_hub_dataset_is_streamed_record_by_record(tmp_path, run_options, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **more: datasets.Dataset.from_list(records(24)))
    assert run(run_options, tmp_path / "json") == 0
    monkeypatch.setattr(sources, "convert_records", None)
    assert run(run_options, tmp_path / "hub", dataset="someone/set", dataset_dir="ONLINE") == 0
    assert same_weights(tmp_path / "json", tmp_path / "hub")


def test_cloud_store_file_is_not_streamed_and_names_the_remedy(tmp_path, run_options, capsys):
    write(tmp_path / "dataset_info.json", {"far": {"cloud_file_name": "memory://bucket/a.jsonl"}})
    assert run(run_options, dataset="far", dataset_dir=str(tmp_path)) == 2
    output = "".join(capsys.readouterr())
    assert '"memory://bucket/a.jsonl" is in cloud storage' in output
    assert "file_name" in output


def test_stream_without_trained_tokens_reports_the_reason(tmp_path, run_options, capsys):
    (tmp_path / "data.json").write_text(json.dumps([{**record, "output": ""} for record in records()]))
    assert run(run_options) == 2
    assert "no examples are left to train on.\n" in capsys.readouterr().err


def test_idle_workers_are_reported(run_options, capsys):
    assert main(["explain", *as_arguments({**run_options, "dataloader_num_workers": 2})]) == 0
    assert '"dataloader_num_workers" has no effect' in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_pretraining_text_is_streamed_without_packing(tmp_path, run_options, monkeypatch, suffix):
    monkeypatch.setattr(sources, "convert_records", None)
    line = "red green blue " * 4
    line = json.dumps({"text": line}) if suffix == ".jsonl" else line
    write(tmp_path / f"text{suffix}", f"{line}\n" * 20)
    assert run(run_options, dataset=str(tmp_path / f"text{suffix}"), stage="pt", cutoff_len=32) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -1}, '"streaming" requires "max_steps"'),
        ({"val_size": 0.1}, 'Expected "val_size" to be a number of examples when streaming. Received: 0.1'),
        ({"packing": True}, '"streaming" cannot be combined with packing'),
        ({"group_by_length": True}, "group_by_length, which needs"),
        ({"tokenized_path": "rows"}, "tokenized_path, which needs"),
    ],
    ids=str,
)
def test_unsupported_streaming_options_are_rejected(run_options, capsys, options, message):
    assert run(run_options, **options) == 2
    assert message in "".join(capsys.readouterr())
