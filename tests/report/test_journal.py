"""Metadata files of a run, and the run state that is read from them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import burnish
from burnish.cli import main
from burnish.config.errors import Problem
from burnish.report.metadata import RunMetadata, boot_id, given_yaml, launch_record, start_ticks
from burnish.serve.page.runs.files import tail_lines
from burnish.serve.page.runs.runs import find, is_alive, read_run, run_folders
from small_run import make_model, records

pytestmark = pytest.mark.run

SOURCE = str(Path(burnish.__file__).parents[1])


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    make_model(Path("model"))
    Path("data").mkdir()
    Path("data/train.json").write_text(json.dumps(records(24)))
    Path("data/dataset_info.json").write_text(json.dumps({"words": {"file_name": "train.json"}}))
    Path("run.yaml").write_text(
        "model_name_or_path: model\ndataset: words\ndataset_dir: data\noutput_dir: saves/first\ntemplate: qwen\n"
        "num_train_epochs: 2\nlogging_steps: 2\nsave_steps: 4\nper_device_train_batch_size: 4\nval_size: 4\n"
        "eval_strategy: steps\neval_steps: 4\nreport_to: none\n"
    )
    return tmp_path


def test_journal_has_command_options_events_and_outcome(workspace, capsys):
    assert main(["train", "run.yaml", "learning_rate=1e-3", "hub_token=hf_canary_secret"]) == 0
    folder = Path("saves/first")
    launch, outcome = (json.loads((folder / name).read_text()) for name in ("launch.json", "outcome.json"))
    assert launch["pid"] == os.getpid()
    assert launch["start_ticks"] == start_ticks(os.getpid())
    assert (outcome["state"], outcome["exit_code"], outcome["step"]) == ("done", 0, 10)
    options = (folder / "run.yaml").read_text()
    assert "learning_rate: 0.001  # the command line" in options
    assert 'dataset_dir: "data"  # run.yaml, line 3' in options
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["kind"] == "stage"] == ["loading", "training", "saving"]
    assert [event["text"] for event in events if event["kind"] == "checkpoint"] == [
        "checkpoint-4", "checkpoint-8", "checkpoint-10"
    ]  # fmt: skip
    rows = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert all(row["grad_norm"] > 0 and row["step_seconds"] > 0 and row["memory_bytes"] > 2**20 for row in steps)
    assert all(row["time"] > 1.7e9 for row in rows)
    written = "".join(
        path.read_text() for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".yaml", ".jsonl")
    )
    assert "canary" not in written
    run = read_run(folder)
    assert (run.state, run.maker, run.step, run.total, run.checkpoint) == ("done", "burnish", 10, 10, 10)
    capsys.readouterr()
    assert main(["runs", "saves"]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown
    assert "10/10" in shown
    assert main(["runs", "saves", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"


@pytest.mark.slow
def test_recorded_options_reproduce_the_run(workspace):
    assert main(["train", "run.yaml"]) == 0
    weights = Path("saves/first/adapter_model.safetensors").read_bytes()
    assert main(["train", "saves/first/run.yaml", "output_dir=saves/second"]) == 0
    assert Path("saves/second/adapter_model.safetensors").read_bytes() == weights


def test_failed_run_records_reason_in_its_outcome(workspace, monkeypatch):
    monkeypatch.setattr("burnish.loop.loop.Loop.train", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    assert main(["train", "run.yaml"]) == 1
    outcome = json.loads(Path("saves/first/outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert outcome["sentence"].startswith("Out of memory")
    assert "per_device_train_batch_size" in outcome["remedy"]
    assert "MemoryError" in outcome["traceback"]
    assert read_run(Path("saves/first")).state == "failed"


def test_rejected_run_leaves_no_files(workspace):
    assert main(["train", "run.yaml", "dataset=nowhere"]) == 2
    assert not Path("saves").exists()


def test_error_is_reported_to_the_launching_process(workspace):
    folder = Path("saves/first")
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text(json.dumps(launch_record(["cpu"])))
    assert main(["train", "run.yaml", "dataset=nowhere"]) == 2
    assert read_run(folder).state == "failed"
    assert "nowhere" in read_run(folder).sentence


@pytest.mark.slow
def test_stopped_killed_and_continued_runs_are_distinguished(workspace):
    argv = [sys.executable, "-m", "burnish", "train", "run.yaml", "num_train_epochs=400", "save_steps=1000"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    folder = Path("saves/first")

    def begin() -> subprocess.Popen:
        child = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not (
            (run := read_run(folder)) and run.state == "running" and run.step > 2 and run.launch["pid"] == child.pid
        ):
            assert time.monotonic() < until
            assert child.poll() is None
            time.sleep(0.05)
        return child

    child = begin()
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 128 + signal.SIGTERM
    stopped = read_run(folder)
    assert stopped.state == "stopped"
    assert stopped.checkpoint == stopped.step
    child = begin()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "resumed" for event in events)
    child.kill()
    child.wait()
    assert read_run(folder).state == "died"


def test_foreign_process_with_same_pid_is_not_the_run(workspace):
    launch = launch_record(["cpu"])
    assert is_alive(launch)
    assert not is_alive({**launch, "start_ticks": launch["start_ticks"] + 1})
    assert not is_alive({**launch, "boot_id": "another"})
    assert not is_alive({**launch, "pid": 1})
    assert not is_alive({**launch, "pid": "1; rm"})
    assert launch["boot_id"] == boot_id()


def test_runs_of_other_libraries_and_damaged_folders_are_listed(tmp_path):
    factory = tmp_path / "a" / "factory"
    factory.mkdir(parents=True)
    (factory / "trainer_log.jsonl").write_text(
        '{"current_steps": 5, "total_steps": 10, "loss": 2.5, "lr": 5e-05, "epoch": 0.5, "percentage": 50.0, '
        '"elapsed_time": "0:00:10", "remaining_time": "1 day, 0:00:10"}\n'
        '{"current_steps": 10, "total_steps": 10, "epoch": 1.0, "percentage": 100.0, "elapsed_time": "0:00:20", '
        '"remaining_time": "0:00:00"}\n{"current_steps": 11, "torn'
    )
    trl = tmp_path / "trl"
    (trl / "checkpoint-7").mkdir(parents=True)
    state = {"global_step": 7, "max_steps": 20, "log_history": [{"step": 5, "loss": 1.25, "learning_rate": 1e-4},
             {"step": 7, "eval_loss": 1.5}]}  # fmt: skip
    (trl / "checkpoint-7" / "trainer_state.json").write_text(json.dumps(state))
    (trl / "trainer_log.jsonl").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "trainer_log.jsonl").write_bytes(b"\x00\xff[[[[\n" * 10)
    (broken / "trainer_state.json").write_text("{")
    (broken / "launch.json").write_text("[1]")
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "again").symlink_to(tmp_path)
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    (other_folder / "launch.json").write_text(json.dumps({**launch_record([]), "host": "another-host"}))
    runs = {run.name: run for run in find([tmp_path])}
    assert set(runs) == {"factory", "trl", "elsewhere", "broken"}
    assert (runs["broken"].state, runs["broken"].step) == ("unreadable", 0)
    assert "launch.json" in runs["broken"].sentence
    assert (runs["factory"].maker, runs["factory"].state, runs["factory"].loss) == ("LLaMA-Factory", "done", 2.5)
    assert (runs["trl"].maker, runs["trl"].step, runs["trl"].total, runs["trl"].eval_loss) == (
        "transformers",
        7,
        20,
        1.5,
    )
    assert runs["elsewhere"].state == "elsewhere"
    assert "another-host" in runs["elsewhere"].sentence
    old = time.time() - 86400
    os.utime(other_folder / "launch.json", (old, old))
    assert read_run(other_folder).state == "silent"
    assert socket.gethostname() not in read_run(other_folder).sentence


@pytest.mark.parametrize(("seconds", "state"), [(1000, "elsewhere"), (2500, "silent")])
def test_run_of_another_machine_is_silent_after_ten_usual_intervals(tmp_path, seconds, state):
    (tmp_path / "launch.json").write_text(json.dumps({**launch_record([]), "host": "another-host"}))
    rows = [
        {"current_steps": 100 * n, "total_steps": 9000, "loss": 1.0, "step_seconds": 2.0, "time": 1.79e9 + 200 * n}
        for n in range(1, 9)
    ]
    rows.insert(4, {"current_steps": 400, "total_steps": 9000, "eval_loss": 1.0, "time": 1.79e9 + 801})
    (tmp_path / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = time.time() - seconds
    for name in ("launch.json", "trainer_log.jsonl"):
        os.utime(tmp_path / name, (last, last))
    assert read_run(tmp_path).state == state


def test_log_of_gigabytes_is_read_from_its_end(tmp_path):
    path = tmp_path / "trainer_log.jsonl"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
        file.seek(0, 2)
        file.write(b'\n{"current_steps": 3, "loss": 1.0}\n')
    began = time.monotonic()
    assert tail_lines(path) == [{"current_steps": 3, "loss": 1.0}]
    assert time.monotonic() - began < 1


def test_run_search_depth_is_limited(tmp_path):
    deep = tmp_path / "1/2/3/4/5"
    deep.mkdir(parents=True)
    for folder in (deep, deep.parent):
        (folder / "trainer_log.jsonl").write_text("{}\n")
    assert list(run_folders(tmp_path)) == [deep.parent]


QUOTED_SECRET = 'client = OpenAI(api_key="canary123x")'


def test_quoted_secrets_are_masked_in_valid_json_and_yaml(workspace, capsys):
    rows = [{"instruction": QUOTED_SECRET, "input": "", "output": "yes"}] * 24
    Path("data/train.json").write_text(json.dumps(rows))
    arguments = ["run.yaml", f"default_system={QUOTED_SECRET}"]
    assert main(["explain", *arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    json.loads(printed)
    assert main(["train", *arguments]) == 0
    folder = Path("saves/first")
    options = yaml.safe_load((folder / "run.yaml").read_text())
    assert options["default_system"].startswith("client = OpenAI(api_key=")
    json.loads((folder / "launch.json").read_text())
    for name in ("run.yaml", "launch.json", "events.jsonl"):
        assert "canary" not in printed + (folder / name).read_text()


def test_quoted_secrets_in_an_error_are_masked_in_valid_json(tmp_path):
    metadata, error = RunMetadata(tmp_path, described=lambda error: Problem(str(error))), ValueError(QUOTED_SECRET)
    metadata.begin("a: 1\n", ["cpu"])
    metadata.event("note", QUOTED_SECRET)
    metadata.__exit__(ValueError, error, None)
    for line in [*(tmp_path / "events.jsonl").read_text().splitlines(), (tmp_path / "outcome.json").read_text()]:
        json.loads(line)
        assert "canary" not in line


def test_unwritable_journal_stops_nothing(tmp_path):
    metadata = RunMetadata(tmp_path / "no such folder", described=str)
    with metadata:
        metadata.begin("a: 1\n", ["cpu"])
        metadata.event("note", "unheard")


def test_values_are_written_as_yaml_reads_them():
    text = given_yaml(
        {"a": 5e-05, "b": "x: y # z", "c": [1, "é"], "d": None, "e": {"k": True}}, {"a": "run.yaml,\nline 1"}
    )
    assert "a: 5e-05  # run.yaml, line 1" in text

    read_back = yaml.safe_load(text)
    assert (read_back["b"], read_back["c"], read_back["d"], read_back["e"]) == ("x: y # z", [1, "é"], None, {"k": True})
    odd = {"f": "a\x7fb\x85c\x9fd", "g": "\u2028 \ud800 \ufffe", "h": "\t 😀"}
    assert yaml.safe_load(given_yaml(odd, {"f": "the file \x85.yaml, line 1"})) == odd
    non_finite = {"i": float("inf"), "j": {"k": float("-inf"), "l": [1.5, float("inf"), True]}}
    assert yaml.safe_load(given_yaml(non_finite, {})) == non_finite


def test_json_explanation_matches_terminal_and_marks_trained_tokens(workspace, capsys):
    assert main(["explain", "run.yaml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"]["total"] == 10
    assert len(result["steps"]["curve"]) == 64
    assert {term["name"] for term in result["memory"]["terms"]} >= {"weights"}
    assert [section["title"] for section in result["sections"]][:2] == ["Model", "Data"]
    longest = next(row for row in result["rows"] if row["title"] == "longest")
    assert any(piece[1] for piece in longest["pieces"])
    assert sum(len(piece[2]) for piece in longest["pieces"]) == longest["tokens"]
    assert result["command"].startswith("burnish train model_name_or_path=model")
    assert main(["explain", "run.yaml", "--json", "dataset=nowhere", "lora_rank=x"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["option"] for problem in problems} == {"dataset", "lora_rank"}


def test_json_explanation_shows_both_responses_of_a_pair(workspace, capsys):
    pairs = [{"instruction": f"Say {n}", "chosen": f"{n} {n}", "rejected": "no"} for n in range(12)]
    Path("data/pairs.json").write_text(json.dumps(pairs))
    argv = ["stage=dpo", "dataset=data/pairs.json", "output_dir=saves/pairs"]
    assert main(["explain", "run.yaml", "--json", *argv]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["title"] for row in rows[-4:]] == [
        "longest, chosen", "longest, rejected", "shortest, chosen", "shortest, rejected",
    ]  # fmt: skip
    assert all(sum(len(ids) for _, _, ids in row["pieces"]) == row["tokens"] for row in rows)


def test_planner_responds_line_by_line_and_survives_errors(workspace):
    from io import StringIO

    from burnish.serve.page.planner_process import planner

    values = {"model_name_or_path": "model", "dataset": ["words"], "dataset_dir": "data", "output_dir": "saves/x"}
    requests = [
        {"id": 1, "values": values}, {"id": 2, "values": {**values, "lora_rnak": 3}}, {"id": 3, "values": {}},
        {"id": 4, "values": values},
    ]  # fmt: skip
    reported = StringIO()
    planner(StringIO("".join(json.dumps(one) + "\n" for one in requests)), reported)
    parts = [json.loads(line) for line in reported.getvalue().splitlines()]
    ids = [part["id"] for part in parts]
    assert ids == sorted(ids)
    assert [part["id"] for part in parts if part.get("is_last")] == [1, 2, 3, 4]
    assert "yaml" in parts[0]
    wrong = next(part for part in parts if part["id"] == 2 and part.get("problems"))
    assert "lora_rank" in wrong["problems"][0]["sentence"]
