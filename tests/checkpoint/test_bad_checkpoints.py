"""Damaged or foreign checkpoints, folders in use, signals and failures: a run resumes from an intact checkpoint with
bitwise equal results, or reports why it cannot."""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bad_inputs import ROWS, Case, cut_short, files, make_folder, read_output, write
from burnish import cli
from burnish.loop.loop import Loop

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def stopped(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after four of eight steps, and (``whole``) of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        make_folder(small_model)
        assert cli.main(["train", "run.yaml"]) == 0
        shutil.copytree("out", "whole")
        for path in Path("out").iterdir():
            if path.name in ("checkpoint-6", "checkpoint-8"):
                shutil.rmtree(path)
            elif path.is_file() and path.name != "trainer_log.jsonl":
                path.unlink()
    return folder


@pytest.fixture
def stopped_copy(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return tmp_path


NEWEST = "out/checkpoint-4"


def flip_a_bit() -> None:
    path = Path(NEWEST, "model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def empty_checkpoint() -> None:
    shutil.rmtree(NEWEST)
    Path(NEWEST).mkdir()


RESUMED = [
    Case("R1", lambda: None, ["Resuming from out/checkpoint-4: step 4 of 8."]),
    Case("R2", lambda: cut_short(f"{NEWEST}/model.safetensors"),
         ["has 100 bytes instead of", "checkpoint-2: step 2"]),
    Case("R3", lambda: cut_short(f"{NEWEST}/optimizer.safetensors", 0),
         ["has 0 bytes instead of", "checkpoint-2: step 2"]),
    Case("R4", lambda: Path(NEWEST, "optimizer.json").unlink(), ["optimizer.json is missing", "checkpoint-2: step 2"]),
    Case("R4c", lambda: Path(NEWEST, "rng_state_0.safetensors").unlink(),
         ["rng_state_0.safetensors is missing", "step 2"]),
    Case("R4d", lambda: Path(NEWEST, "trainer_state.json").unlink(), ["trainer_state.json is missing", "step 2 of 8"]),
    Case("R5", empty_checkpoint, ["was skipped", "manifest.json", "out/checkpoint-2: step 2 of 8"]),
    Case("R6", flip_a_bit, ["checksum mismatch", "out/checkpoint-2: step 2 of 8"]),
]  # fmt: skip


def history(folder: Path) -> list[dict[str, Any]]:
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in log]


def logged_steps() -> list[int]:
    lines = Path("out/trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["current_steps"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_run_resumes_from_intact_checkpoint_bitwise_equal(
    case: Case, stopped_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.prepare()
    assert cli.main(["train", "run.yaml"]) == 0
    out, _ = read_output(capsys)
    for message in case.expected:
        assert message in out
    assert Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert history(Path("out")) == history(Path("whole"))
    assert logged_steps() == list(range(1, 9))


def change_model() -> None:
    state = load_file("model/model.safetensors")
    save_file({name: value * 1.01 for name, value in state.items()}, "model/model.safetensors", {"format": "pt"})


ANOTHER_RUN = [
    Case("R7", lambda: None, ["out/checkpoint-5", "does not exist", "out/checkpoint-2, out/checkpoint-4"],
         ["resume_from_checkpoint=out/checkpoint-5"]),
    Case("R7, a file", lambda: None, ["is a file, not a folder"], ["resume_from_checkpoint=run.yaml"]),
    Case("R7, no checkpoint", lambda: None, ["data: it has no manifest.json"], ["resume_from_checkpoint=data"]),
    Case("R6, by name", flip_a_bit, [NEWEST, "checksum mismatch", "checkpoint-2"],
         [f"resume_from_checkpoint={NEWEST}"]),
    Case("R1b", lambda: None, ["contains an earlier run", "checkpoint-2"], ["resume=never"]),
    Case("R9b", change_model, ["base_model has changed"]),
    Case("R10", lambda: None, ["rows_per_step changed from 2 to 4"], ["per_device_train_batch_size=4"]),
    Case("R10b", lambda: None, ["rows_per_step changed from 2 to 4"], ["gradient_accumulation_steps=2"]),
    Case("R11", lambda: write("data/rows.json", ROWS[::-1]), ["data has changed"]),
    Case("R12b", lambda: None, ['lr_scheduler_type changed from "linear" to "cosine"'], ["lr_scheduler_type=cosine"]),
    Case("R12c", lambda: None, ["seed changed from 42 to 1"], ["seed=1"]),
    Case("R13", lambda: None, ['finetuning_type changed from "full" to "lora"'], ["finetuning_type=lora"]),
    Case("another length", lambda: None, ["cutoff_len changed from 128 to 64"], ["cutoff_len=64"]),
    Case("another template", lambda: None, ["template has changed"], ["template=chatml"]),
    Case("train_on_prompt", lambda: None, ["train_on_prompt changed from false to true"], ["train_on_prompt=true"]),
]  # fmt: skip


@pytest.mark.sample(13)
@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize("case", ANOTHER_RUN, ids=str)
def test_different_run_is_rejected_and_checkpoints_are_unchanged(
    case: Case, command: str, stopped_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.prepare()
    before = files(Path("out"))
    assert cli.main([command, "run.yaml", *case.argv]) == 2
    _, err = read_output(capsys)
    for message in case.expected:
        assert message in err
    assert {name: stamp for name, stamp in files(Path("out")).items() if ".lock" not in name} == {
        name: stamp for name, stamp in before.items() if ".lock" not in name
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("argv", [["optim=sgd"], ["use_badam=true"], ["optim=adafactor"]], ids=str)
def test_optimizer_state_of_another_optimizer_is_rejected(
    argv: list[str], stopped_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "run.yaml", "resume_despite_changes=true", *argv]) == 2
    err = read_output(capsys)[1]
    assert f"{NEWEST}: this checkpoint contains the state of a different optimizer." in err
    assert Path(NEWEST).is_dir()
    assert cli.main(["train", "run.yaml", "resume_despite_changes=true", "optim=adamw_torch"]) == 0


def test_later_checkpoints_of_an_earlier_attempt_are_noted(
    stopped_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the note, the next start continues from another attempt's checkpoint."""
    argv = ["train", "run.yaml", "max_train_seconds=0.001", "save_strategy=no"]
    assert cli.main([*argv, "resume_from_checkpoint=out/checkpoint-2"]) == 124
    out, _ = read_output(capsys)
    assert "out also contains later checkpoints (checkpoint-4)." in out
    assert "resuming from the latest checkpoint continues from checkpoint-4." in out
    command = "burnish train out/run.yaml resume_from_checkpoint=out/checkpoint-3"
    assert f"The checkpoint is out/checkpoint-3. To resume: {command}" in out
    assert cli.main([*argv, "resume_from_checkpoint=out/checkpoint-4"]) == 124
    out, _ = read_output(capsys)
    assert "later checkpoints" not in out
    assert "The checkpoint is out/checkpoint-5. To resume: burnish train out/run.yaml\n" in out


def test_finished_run_is_not_mistaken_for_another(stopped_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R15, and the same folder with another seed."""
    assert cli.main(["train", "run.yaml"]) == 0
    before = Path("out/model.safetensors").stat().st_mtime_ns
    read_output(capsys)
    assert cli.main(["train", "run.yaml"]) == 0
    assert "finished at step 8: there is nothing to do." in read_output(capsys)[0]
    assert cli.main(["train", "run.yaml", "seed=1"]) == 2
    assert "seed changed from 42 to 1" in read_output(capsys)[1]
    assert Path("out/model.safetensors").stat().st_mtime_ns == before


def test_finished_run_without_checkpoints_is_recognized(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "run.yaml", "save_strategy=no"]
    assert cli.main(argv) == 0
    before = Path("out/model.safetensors").stat().st_mtime_ns
    read_output(capsys)
    assert cli.main(argv) == 0
    assert "finished at step 8: there is nothing to do." in read_output(capsys)[0]
    assert cli.main([*argv, "seed=1"]) == 2
    assert "seed changed from 42 to 1" in read_output(capsys)[1]
    assert cli.main([*argv, "max_steps=9"]) == 2
    assert "ended after 8 steps and kept no checkpoint" in read_output(capsys)[1]
    assert Path("out/model.safetensors").stat().st_mtime_ns == before
    assert cli.main([*argv, "seed=1", "overwrite_output_dir=true"]) == 0
    assert Path("out/model.safetensors").stat().st_mtime_ns > before


def test_model_that_cannot_be_saved_is_kept_as_checkpoint_and_retried(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the format of the model is not known")

    argv = ["train", "run.yaml", "save_strategy=no"]
    with monkeypatch.context() as patched:
        patched.setattr("burnish.run.finish.save_model", fails)
        assert cli.main(argv) == 1
    assert "Safe: out/checkpoint-8. Run the same command again to resume from it." in read_output(capsys)[1]
    assert not Path("out/model.safetensors").exists()
    assert cli.main(argv) == 0
    assert Path("out/model.safetensors").is_file()
    (train_loss,) = [entry["train_loss"] for entry in history(Path("out")) if "train_loss" in entry][-1:]
    assert train_loss > 0


def test_partially_written_model_does_not_block_the_same_command(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first run, neither the model nor a checkpoint can be written, as on a full disk."""

    def is_full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    argv = ["train", "run.yaml", "save_strategy=no"]
    with monkeypatch.context() as patched:
        patched.setattr("burnish.models.save.save_config", is_full)  # after the weights
        patched.setattr("burnish.checkpoint.checkpoint._write_part", is_full)
        assert cli.main(argv) == 1
    assert "The disk is full" in read_output(capsys)[1]
    assert not list(Path("out").glob("*.safetensors")) + list(Path("out").glob("*config.json"))
    assert cli.main(argv) == 0


def test_fewer_steps_than_trained_are_rejected(stopped_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R12d."""
    assert cli.main(["train", "run.yaml", "max_steps=3"]) == 2
    assert (
        "the run has already completed 4 steps, but max_steps or num_train_epochs requests 3." in read_output(capsys)[1]
    )
    assert not Path("out/model.safetensors").exists()


def test_changed_learning_rate_is_rejected_unless_requested(
    stopped_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R12."""
    assert cli.main(["train", "run.yaml", "learning_rate=5e-3"]) == 2
    assert "learning_rate changed from 0.001 to 0.005" in read_output(capsys)[1]
    assert cli.main(["train", "run.yaml", "learning_rate=5e-3", "resume_despite_changes=true"]) == 0
    assert "learning_rate was 0.001 in checkpoint-4 and is 0.005 now." in read_output(capsys)[0]
    rates = [entry["learning_rate"] for entry in history(Path("out")) if "learning_rate" in entry]
    assert rates[4] > 4 * rates[3] * 0.5


def test_two_runs_cannot_share_a_folder(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """W2."""
    write("out/.lock", b"")
    with Path("out/.lock").open() as stored:
        fcntl.flock(stored, fcntl.LOCK_EX)
        assert cli.main(["train", "run.yaml"]) == 2
    assert "another run is writing to this folder" in read_output(capsys)[1]
    assert os.listdir("out") == [".lock"]


# --- signals and failures ---------------------------------------------------------------------------------------------


def at_step(number: int, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop.step

    def step_with_action(run: Any, *arguments: Any) -> None:
        if run.state.global_step == number:
            action()
        step(run, *arguments)

    monkeypatch.setattr(Loop, "step", step_with_action)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_saves_checkpoint_and_same_command_resumes(
    number: signal.Signals, user_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1, S2."""
    with monkeypatch.context() as patch:
        at_step(2, lambda: os.kill(os.getpid(), number), patch)
        assert cli.main(["train", "run.yaml", "save_strategy=no"]) == 128 + number
    assert Path("out/checkpoint-3/manifest.json").exists()
    assert cli.main(["train", "run.yaml", "save_strategy=no"]) == 0
    assert "Resuming from out/checkpoint-3" in read_output(capfd)[0]
    assert logged_steps() == list(range(1, 9))


def out_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["learning_rate=1e30"], "loss of step 2 is not finite"), ([], "Out of memory")],
    ids=["X1", "X2"],
)
def test_failure_before_first_checkpoint_leaves_reusable_folder(
    argv: list[str],
    message: str,
    user_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        if not argv:
            at_step(1, out_of_memory, patch)
        assert cli.main(["train", "run.yaml", *argv]) == 1
    _, err = read_output(capsys)
    assert message in err
    assert "No checkpoint was saved." in err or "Memory is used by weights" in err
    assert "Traceback" in Path("out/traceback.txt").read_text(encoding="utf-8")
    assert not Path("out/model.safetensors").exists()
    assert cli.main(["train", "run.yaml"]) == 0
    assert logged_steps() == list(range(1, 9))
    assert not Path("out/traceback.txt").exists()


def test_overwriting_a_run_removes_all_its_files(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter left next to a full model would be loaded instead of it."""
    assert cli.main(["train", "run.yaml", "finetuning_type=lora", "do_eval=true", "val_size=4"]) == 0
    assert Path("out/eval_results.json").exists()
    assert cli.main(["train", "run.yaml", "overwrite_output_dir=true", "max_steps=2"]) == 0
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-2"]
    assert not list(Path("out").glob("adapter*"))
    assert not Path("out/eval_results.json").exists()
