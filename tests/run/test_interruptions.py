"""Obstacles during a run: full disks, deleted folders, scheduler notices, clock changes."""

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import read_output
from burnish import cli
from burnish.checkpoint import checkpoint
from burnish.checkpoint.manifest import integrity_errors
from burnish.loop.loop import Loop
from representative import representative_slow

pytestmark = pytest.mark.run

TRAIN = ["train", "run.yaml"]


def at_step(number: int, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop.step

    def run_step(run: Any, *arguments: Any) -> None:
        if run.state.global_step == number:
            action()
        step(run, *arguments)

    monkeypatch.setattr(Loop, "step", run_step)


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("number", representative_slow([errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS], 1))
def test_failed_save_is_reported_once_and_retried(
    number: int, background: str, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([*TRAIN, "output_dir=alone"]) == 0
    write_part = checkpoint._write_part

    def fails(folder: Path, *arguments: Any) -> None:
        if folder.name in (".incomplete-checkpoint-4", ".incomplete-checkpoint-6"):
            raise OSError(number, os.strerror(number), str(folder))
        write_part(folder, *arguments)

    monkeypatch.setattr(checkpoint, "_write_part", fails)
    read_output(capsys)
    assert cli.main([*TRAIN, f"save_in_background={background}"]) == 3
    out, err = read_output(capsys)
    assert err.count("could not be saved") == 1
    assert f"out/checkpoint-4 could not be saved: {os.strerror(number).lower()}. out/checkpoint-2 is complete." in err
    assert "out/checkpoint-8 was saved successfully." in out
    assert "could not be saved" in Path("out/run.log").read_text(encoding="utf-8")
    assert sorted(path.name for path in Path("out").glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    assert not integrity_errors(Path("out/checkpoint-8"))
    assert weights("out") == weights("alone")


def test_deleted_folder_is_created_again(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(5, lambda: shutil.rmtree("out"), monkeypatch)
    assert cli.main([*TRAIN, "save_in_background=false"]) in (0, 3)
    assert not integrity_errors(Path("out/checkpoint-8"))
    assert Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("put", [lambda: Path("out").write_text("x"), lambda: os.symlink("nowhere", "out")])
def test_obstacle_in_place_of_deleted_folder_is_reported(
    put: Any, user_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_step(5, lambda: (shutil.rmtree("out"), put()), monkeypatch)
    assert cli.main([*TRAIN, "save_in_background=false"]) == 1
    err = read_output(capsys)[1]
    assert 'error: "out" cannot be written or read: file exists.' in err
    assert "Raised in" not in err


def killed(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_early_stopped_run_is_not_continued_after_a_kill(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after the checkpoint of the last step, before the model is written."""
    stopping = ["val_size=0.25", "eval_strategy=steps", "eval_steps=2", "save_steps=2", "load_best_model_at_end=true",
                "early_stopping_steps=1", "early_stopping_threshold=100"]  # fmt: skip
    assert cli.main([*TRAIN, *stopping, "output_dir=alone"]) == 0
    assert "Stopped after step 4 of 8" in read_output(capsys)[0]
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "finish_epoch", killed)
        assert cli.main([*TRAIN, *stopping]) == 130
    assert not Path("out/model.safetensors").exists()
    assert cli.main([*TRAIN, *stopping]) == 0
    assert "Stopped after step 4 of 8" in read_output(capsys)[0]
    assert weights("out") == weights("alone")
    assert cli.main([*TRAIN, *stopping]) == 0
    assert "To train further, increase early_stopping_steps." in read_output(capsys)[0]
    assert cli.main([*TRAIN, *stopping, "max_steps=10"]) == 2
    assert "early stopping ended this run at step 4, so more steps have no effect" in read_output(capsys)[1]
    assert cli.main([*TRAIN, *stopping, "early_stopping_steps=2"]) == 0
    assert "Stopped after step 6 of 8" in read_output(capsys)[0]
    assert cli.main([*TRAIN, *stopping, "early_stopping_steps=3", "max_steps=10"]) == 0
    assert "Stopped after step 8 of 10" in read_output(capsys)[0]


def test_run_stopped_by_another_callback_trains_further(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        handle = Loop.handle_control

        def stop(loop: Any) -> None:
            loop.control.should_training_stop |= loop.state.global_step == 4
            handle(loop)

        patched.setattr(Loop, "handle_control", stop)
        assert cli.main(TRAIN) == 0
    assert "Stopped after step 4 of 8" in read_output(capsys)[0]
    assert cli.main([*TRAIN, "max_steps=10"]) == 0
    assert "step 10/10" in read_output(capsys)[0]


def mount_tmpfs(folder: Path, size: str) -> bool:
    """Mount a small tmpfs. Return whether this user may do that."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def test_full_disk_does_not_end_training(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not mount_tmpfs(Path("small"), "3m"):
        pytest.skip("a file system cannot be mounted here")
    try:
        filler = Path("small/filler")
        argv = [*TRAIN, "output_dir=small/out", "save_in_background=false"]
        with pytest.MonkeyPatch.context() as patch:
            at_step(3, lambda: filler.write_bytes(b"x" * _free("small")), patch)
            patch_back = Loop.step

            def frees(run: Any, *arguments: Any) -> None:
                if run.state.global_step == 7:
                    filler.unlink()
                patch_back(run, *arguments)

            patch.setattr(Loop, "step", frees)
            assert cli.main(argv) == 3
        assert "no space left on device" in read_output(capsys)[1]
        whole = [path.name for path in sorted(Path("small/out").glob("checkpoint-*")) if not integrity_errors(path)]
        assert whole == ["checkpoint-2", "checkpoint-8"]
    finally:
        subprocess.run(["umount", "small"], check=True)


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free


# --- signals and clocks -----------------------------------------------------------------------------------------------


def test_scheduler_notice_saves_a_checkpoint_and_run_continues(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGUSR1), monkeypatch)
    assert cli.main([*TRAIN, "save_strategy=no"]) == 0
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert not integrity_errors(Path("out/checkpoint-3"))


def test_run_stops_with_a_checkpoint_at_its_time_limit(user_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [*TRAIN, "save_strategy=no"]
    assert cli.main([*argv, "output_dir=alone"]) == 0
    assert cli.main([*argv, "max_train_seconds=0.000001"]) == 124
    assert "max_train_seconds 1e-06: stopping after this step" in read_output(capfd)[1]
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert cli.main(argv) == 0
    assert weights("out") == weights("alone")
