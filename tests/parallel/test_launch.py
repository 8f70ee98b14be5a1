"""Several processes behave like one program: one command, one set of messages, one exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.parallel import process_counts
from burnish.parallel.checks import check_parallel
from burnish.parallel.options import ParallelOptions
from burnish.parallel.process_counts import (
    num_gpus,
    problems_of_machines,
    processes_here,
    too_many_processes,
    world_size,
)
from burnish.run import launch as launching
from burnish.run.launch import launch, with_resume
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run

TWO = {"num_processes": RawValue(2), "use_cpu": RawValue(True)}

WRITES_ENVIRONMENT = """
import json, os, sys
place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
json.dump([place, sys.argv[1:]], open(sys.argv[1] + os.environ["RANK"], "w"))
"""
SECOND_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("no such device", file=sys.stderr)
    sys.exit(7)
time.sleep(60)
"""
SECOND_IS_KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
SECOND_EXPLAINS = """
import os, time
from burnish.run.recovery.failure import explain_failure
from burnish.config.errors import NonFiniteError
if os.environ["RANK"] == "1":
    raise SystemExit(explain_failure(NonFiniteError("The loss of step 3 is not finite."), None))
time.sleep(0.5)
raise SystemExit(explain_failure(RuntimeError("Connection closed by peer"), None))
"""
FAILS_ONCE = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
attempts = folder / f"attempts{os.environ['RANK']}"
attempts.write_text((attempts.read_text() if attempts.exists() else "") + json.dumps(sys.argv[2:]) + "\\n")
if os.environ["RANK"] == "1" and attempts.read_text().count("\\n") == 1:
    sys.exit(1)
"""
CONTINUES_WHEN_ASKED = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda number, frame: (folder / "heard0").touch())
(folder / f"ready{os.environ['RANK']}").touch()
while not (folder / "heard0").exists():
    time.sleep(0.05)
(folder / f"finished{os.environ['RANK']}").touch()
"""
STOPS_WHEN_ASKED = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def stop(number, frame):
    (folder / f"heard{os.environ['RANK']}").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready{os.environ['RANK']}").touch()
while not (folder / "heard0").exists():
    time.sleep(0.05)
time.sleep(0.2)
sys.exit(143)
"""


@pytest.fixture
def program(monkeypatch):
    """Return a function that replaces the training script by another one."""

    def replace(script):
        monkeypatch.setattr(launching, "PROGRAM", ("-c", script))

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return replace


def test_single_process_runs_without_launching(program, monkeypatch):
    assert launch([], {"use_cpu": RawValue(True)}) is None
    assert launch([], {"num_processes": RawValue("1")}) is None
    assert launch([], {"num_processes": RawValue("2"), "engine": RawValue("single")}) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert launch([], TWO) is None


def test_every_process_gets_its_rank_and_unchanged_arguments(program, tmp_path):
    program(WRITES_ENVIRONMENT)
    argv = [f"{tmp_path}/a folder with 'quotes' ", 'and "others"', "$HOME *"]
    assert launch(argv, TWO) == 0
    for rank in range(2):
        variables_of_rank, message = json.loads(Path(argv[0] + str(rank)).read_text())
        assert message == argv
        assert variables_of_rank == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"
        }  # fmt: skip


def test_ranks_continue_across_machines(program, tmp_path, monkeypatch):
    program(WRITES_ENVIRONMENT)
    for name, value in {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert launch([f"{tmp_path}/rank"], TWO) == 0
    assert json.loads((tmp_path / "rank3").read_text())[0] == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1"
    }  # fmt: skip
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(UserError, match="but MASTER_ADDR must be set too"):
        launch([], TWO)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        (SECOND_FAILS, 7, ["Process 1 of 2 on", "exited with status 7", "no such device"]),
        (SECOND_IS_KILLED, 137, ["Process 1 of 2 on", "was terminated by SIGKILL", "memory"]),
        (SECOND_EXPLAINS, 1, ["error: The loss of step 3 is not finite.", "Process 1 of 2 on"]),
    ],
    ids=["fails", "is killed", "explains"],
)
def test_failed_process_stops_the_others_and_its_error_is_shown(program, capfd, script, status, message):
    program(script)
    began = time.monotonic()
    assert launch([], TWO) == status
    assert time.monotonic() - began < 20
    output = capfd.readouterr().err
    for word in message:
        assert word in output
    assert output.count("error:") == 1
    assert "Connection closed" not in output


def test_failed_run_is_restarted_from_its_checkpoint_with_max_restarts(program, tmp_path, capfd):
    program(FAILS_ONCE)
    options = {**TWO, "output_dir": RawValue(str(tmp_path / "out"))}
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-3" / "manifest.json").touch()
    assert launch([str(tmp_path)], options) == 1
    for rank in range(2):
        (tmp_path / f"attempts{rank}").unlink()
    assert launch([str(tmp_path), "overwrite_output_dir=true"], {**options, "max_restarts": RawValue("2")}) == 0
    first, second = map(json.loads, (tmp_path / "attempts1").read_text().splitlines())
    assert first == ["overwrite_output_dir=true"]
    resume = ["--overwrite_output_dir", "false", "--resume", "auto", "--resume_from_checkpoint", "true"]
    assert second == [*first, *resume]
    assert "Restarting (attempt 1 of 2)." in capfd.readouterr().err
    assert with_resume(["a"], str(tmp_path / "nothing")) == ["a"]


def status_after_signal(number, each_process, folder):
    """Start two processes, send the launcher a signal, and return its exit status."""
    script = (
        "import sys; from burnish.run import launch; from burnish.config.options import RawValue\n"
        f"launch.PROGRAM = ('-c', {each_process!r})\n"
        f"sys.exit(launch.launch([{str(folder)!r}], {{'num_processes': RawValue(2)}}))"
    )
    running = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 30
    while not (folder / "ready0").exists() or not (folder / "ready1").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    running.send_signal(number)
    return running.wait(30)


def test_signal_is_sent_to_rank_0_and_stops_all_processes(tmp_path, capfd):
    assert status_after_signal(signal.SIGTERM, STOPS_WHEN_ASKED, tmp_path) == 143
    assert not (tmp_path / "heard1").exists()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_notice_of_a_scheduler_is_sent_to_rank_0_and_stops_nothing(tmp_path, capfd):
    assert status_after_signal(signal.SIGUSR1, CONTINUES_WHEN_ASKED, tmp_path) == 0
    assert (tmp_path / "finished0").exists()
    assert (tmp_path / "finished1").exists()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_run_of_two_processes_prints_as_one_program(tmp_path):
    """A complete run; then an invalid one, whose error is printed once."""
    options = make_workspace(tmp_path, max_steps=2, save_strategy="no", plot_loss=False, num_processes=2, evaluate="no")
    options.pop("evaluate")
    command = [sys.executable, "-m", "burnish", "train", *as_arguments(options)]
    environment = {**os.environ, "BURNISH_CACHE": str(tmp_path / "cache")}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("Training for 2 steps") == 1
    assert "x 2 processes" in process.stdout
    assert process.stdout.count("Trained 2 steps") == 1
    rows = [json.loads(line) for line in next(tmp_path.rglob("trainer_log.jsonl")).read_text().splitlines()]
    assert all(0 <= row["waiting"] < 1 for row in rows if row.get("loss") is not None)
    refused = subprocess.run(
        [*command, "template=no such"], capture_output=True, text=True, env=environment, timeout=200
    )
    assert refused.returncode == 2
    assert refused.stderr.count("no such") == 1
    assert "Process" not in refused.stderr


def test_num_processes_is_the_requested_or_one_per_gpu(monkeypatch):
    for name in ("NPROC_PER_NODE", "WORLD_SIZE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", Path("nowhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    assert num_gpus() == 3
    assert processes_here("auto", use_cpu=False) == 3
    assert processes_here("auto", use_cpu=True) == 1
    assert processes_here(2, use_cpu=True) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes_here("auto", use_cpu=False) == 1
    monkeypatch.setenv("NNODES", "4")
    assert world_size(ParallelOptions(num_processes=8)) == 32


@pytest.mark.parametrize(
    ("visible", "num_visible"),
    [
        ("0,-1,1", 1), ("-1,0", 0), ("-1", 0), ("", 0), ("0,,1", 1), (" 1 , 0", 2), ("0,none,1", 1), ("0,0", 0),
        ("0,1,2,3", 3), ("7,0", 0), ("GPU-1f,GPU-2e", 2), ("GPU-1f,GPU-1f", 0), ("MIG-1f", 1), ("1gpu2,2ampere", 2),
    ],
)  # fmt: skip
def test_visible_gpus_are_counted_as_by_cuda(monkeypatch, tmp_path, visible, num_visible):
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == num_visible
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", tmp_path / "nowhere")
    assert num_gpus() >= num_visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", tmp_path)
    assert num_gpus() == 3


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", Path("nowhere"))
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(2)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    (problem,) = too_many_processes(4, use_cpu=False)
    assert "num_processes must be at most 3 on this machine (GPUs: 3). Received: 4." in str(problem)
    assert not [*too_many_processes(3, use_cpu=False), *too_many_processes("auto", use_cpu=False)]
    (problem,) = too_many_processes(9, use_cpu=True)
    assert "num_processes must be at most 8 on this machine (CPU cores: 2). Received: 9." in str(problem)
    assert list(too_many_processes(8, use_cpu=True)) == []
    monkeypatch.setenv("NPROC_PER_NODE", "200")
    (problem,) = too_many_processes("auto", use_cpu=True)
    assert str(problem).startswith("NPROC_PER_NODE must be at most 8")
    with pytest.raises(UserError, match="Received: 200"):
        launch(["num_processes=200"], {"num_processes": RawValue(200), "use_cpu": RawValue(True)})


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "NPROC_PER_NODE"])
def test_non_integer_rank_variable_is_rejected(name, monkeypatch):
    for other in ("WORLD_SIZE", "RANK", "NNODES", "NODE_RANK", "NPROC_PER_NODE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "two")
    (problem,) = problems_of_machines()
    assert f'{name} must be a non-negative integer. Received: "two"' in str(problem)
    monkeypatch.setenv(name, "")
    assert not list(problems_of_machines())


@pytest.mark.parametrize("name", ["NODE_RANK", "MASTER_ADDR"])
def test_empty_variable_of_several_machines_is_missing(name, monkeypatch):
    """Machines without a rank would all take rank 0 and wait for each other."""
    for other in ("WORLD_SIZE", "RANK", "NPROC_PER_NODE"):
        monkeypatch.delenv(other, raising=False)
    for other, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", name: ""}.items():
        monkeypatch.setenv(other, value)
    (problem,) = problems_of_machines()
    assert name in problem.what


def test_num_processes_is_a_number_or_auto():
    (problem,) = check_parallel(ParallelOptions(num_processes="many"))
    assert 'Received: "many"' in str(problem)
    (problem,) = check_parallel(ParallelOptions(num_processes=2, engine="single"))
    assert '"engine" is single' in str(problem)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT must be set too."),
        ({"WORLD_SIZE": "two"}, 'WORLD_SIZE must be a non-negative integer. Received: "two".'),
        ({"WORLD_SIZE": "-1"}, 'WORLD_SIZE must be a non-negative integer. Received: "-1".'),
        ({"WORLD_SIZE": "2", "RANK": "x"}, 'RANK must be a non-negative integer. Received: "x".'),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is 0, and RANK is 0; ranks are numbered from 0."),
        ({"LOCAL_RANK": "x"}, 'LOCAL_RANK must be a non-negative integer. Received: "x".'),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "WORLD_SIZE is not set, and RANK is 1; ranks are numbered from 0."),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
            'MASTER_PORT must be a non-negative integer. Received: "abc".',
        ),
        ({"RANK": "1"}, "WORLD_SIZE is not set, and RANK is 1; ranks are numbered from 0."),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "WORLD_SIZE is 2, and RANK is 2; ranks are numbered from 0.",
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "explain"])
def test_incomplete_launcher_variables_are_rejected(command, variables, message, monkeypatch, capsys, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = make_workspace(tmp_path)
    capsys.readouterr()
    assert main([command, *as_arguments(options)]) == 2
    err = capsys.readouterr().err
    assert f"error: {message}\n" in err
    assert "burnish train or torchrun" in err or "a non-negative integer" in err
    assert not (tmp_path / "out").exists()
