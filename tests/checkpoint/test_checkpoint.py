"""An interrupted run resumes with bitwise equal results; damaged checkpoints are detected."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from burnish.checkpoint import snapshot
from burnish.checkpoint.checkpoint import Checkpoints, load
from burnish.checkpoint.comparison import compare_with_checkpoint
from burnish.checkpoint.manifest import integrity_errors, write_manifest
from burnish.checkpoint.snapshot import join, split
from burnish.config.errors import UserError
from burnish.utils.files import exclusive_writer_lock
from regression_run import StopAt, make_run, same, weights, without_times

pytestmark = pytest.mark.run

VARIANTS = {
    "dropout": {},
    "evaluation": {"eval_rows": 5, "eval_strategy": "steps", "eval_steps": 2},
    "accumulation": {"gradient_accumulation_steps": 3},
    "logging interval across the checkpoint": {"logging_steps": 4},
    "warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop_at", [1, 5, 11, 14])
def test_resume_gives_same_weights_and_log(tmp_path, variant, stop_at):
    options = {"save_strategy": "no", **VARIANTS[variant]}
    uninterrupted, _ = make_run(tmp_path / "whole", **options)
    uninterrupted.train()
    if stop_at >= uninterrupted.state.max_steps:
        stop_at = 3
    first, _ = make_run(tmp_path / "cut", [StopAt(stop_at)], **options)
    first.train()
    assert not same(weights(first), weights(uninterrupted))
    torch.manual_seed(12345)
    second, _ = make_run(tmp_path / "cut", **options)
    torch.rand(17)
    load(tmp_path / "cut" / f"checkpoint-{stop_at}", second.parts)
    second.train()
    assert same(weights(second), weights(uninterrupted))
    assert without_times(second.state.log_history) == without_times(uninterrupted.state.log_history)


def live_bytes():
    """Return the size of all tensors, including those that only a garbage collection would free."""
    tensors = (tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter))
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.fixture
def _no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sample(1)
@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("is_background", [True, False])
def test_copies_of_a_checkpoint_are_freed_without_garbage_collection(tmp_path, is_background):
    run, _ = make_run(tmp_path, save_strategy="no")
    run.train()
    run.checkpoints.in_background = is_background
    sizes = []
    for step in range(1, 5):
        run.checkpoints.save(step, run.parts)
        run.checkpoints.wait()
        sizes.append(live_bytes())
    assert sizes == sizes[:1] * 4


def test_checkpoint_contains_no_pickle(tmp_path):
    run, _ = make_run(tmp_path, max_steps=2)
    run.train()
    suffixes = {path.suffix for path in (tmp_path / "checkpoint-2").iterdir()}
    assert suffixes == {".json", ".safetensors"}


def test_asynchronous_checkpoint_holds_the_step_it_was_taken_at(tmp_path):
    runs = []
    for name, background in (("a", True), ("b", False)):
        run, _ = make_run(tmp_path / name, save_steps=3, max_steps=9, save_in_background=background)
        run.train()
        runs.append(run)
    for step in (3, 6, 9):
        a, b = (tmp_path / n / f"checkpoint-{step}" / "model.safetensors" for n in "ab")
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no manifest", "broken manifest"])
def test_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    run, _ = make_run(tmp_path, max_steps=4, save_steps=2)
    run.train()
    newest = tmp_path / "checkpoint-4"
    damaged = newest / ("manifest.json" if "manifest" in damage else "optimizer.safetensors")
    content = bytearray(damaged.read_bytes())
    if damage == "truncate":
        damaged.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-1] ^= 1
        damaged.write_bytes(content)
    elif damage == "broken manifest":
        damaged.write_text("{")
    else:
        damaged.unlink()
    result, skipped = Checkpoints(tmp_path).newest()
    assert result == tmp_path / "checkpoint-2"
    assert "checkpoint-4" in skipped[0]
    assert damaged.name in skipped[0]
    with pytest.raises(UserError, match="checkpoint-2"):
        load(newest, run.parts)


def test_oldest_checkpoints_are_removed_and_best_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, limit=2, in_background=False)
    run, _ = make_run(tmp_path)
    for step in (1, 2, 3, 4, 10):
        checkpoints.save(step, run.parts, best=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in checkpoints.all()] == ["checkpoint-1", "checkpoint-10"]


def test_missing_checkpoint_part_is_named(tmp_path):
    run, _ = make_run(tmp_path)
    parts = {k: v for k, v in run.parts.items() if k != "scheduler"}
    folder = Checkpoints(tmp_path, in_background=False).save(1, parts)
    with pytest.raises(UserError, match='no "scheduler"'):
        load(folder, run.parts)


def test_weights_copied_during_next_step_belong_to_their_step(tmp_path, monkeypatch):
    original_copy = snapshot._cpu_copy

    def slow_copy(tensor):
        if threading.current_thread().name == "burnish-checkpoint":
            time.sleep(0.05)  # longer than a step of this model, so the next update comes first unless the loop waits
        return original_copy(tensor)

    monkeypatch.setattr(snapshot, "_cpu_copy", slow_copy)
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 64)
    synchronous, _ = trained(tmp_path / "at_once", save_in_background=False)
    asynchronous, _ = trained(tmp_path / "later")
    for path in synchronous.checkpoints.all():
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (asynchronous.checkpoints.folder / path.name / name).read_bytes() == (path / name).read_bytes()


def test_foreign_callbacks_force_synchronous_weight_copies(tmp_path, monkeypatch):
    class ModifyingCallback:
        def on_step_begin(self, args, state, control, model, **kwargs):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(1.0)

    copying = []
    original_copy = snapshot._cpu_copy
    monkeypatch.setattr(
        snapshot, "_cpu_copy", lambda tensor: copying.append(threading.current_thread().name) or original_copy(tensor)
    )
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 64)
    trained(tmp_path / "stranger", callbacks=[ModifyingCallback()])
    assert copying
    assert "burnish-checkpoint" not in copying


def trained(folder, **overrides):
    run, options = make_run(folder, save_steps=1, max_steps=4, **overrides)
    run.train()
    return run, options


def test_failed_background_write_raises_and_keeps_existing_files(tmp_path, monkeypatch):
    run, _ = make_run(tmp_path)
    checkpoints = Checkpoints(tmp_path, in_background=True)
    checkpoints.save(1, run.parts)
    checkpoints.wait()

    def disk_full(folder, step, fingerprints, known):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("burnish.checkpoint.checkpoint.write_manifest", disk_full)
    checkpoints.save(2, run.parts)
    with pytest.raises(OSError, match="No space"):
        checkpoints.wait()
    assert Checkpoints(tmp_path).newest()[0] == tmp_path / "checkpoint-1"


def test_incompatible_change_is_an_error_and_allowed_change_a_note(tmp_path):
    before = {"data": "aa", "seed": 1, "learning_rate": 1e-3, "rows_per_step": 16, "max_steps": 8}
    (tmp_path / "checkpoint-1").mkdir()
    write_manifest(tmp_path / "checkpoint-1", 1, before)
    message = compare_with_checkpoint(tmp_path / "checkpoint-1", {**before, "max_steps": 9})
    assert message == ["max_steps was 8 in checkpoint-1 and is 9 now."]
    for name, value, expected in (
        ("seed", 2, "seed changed from 1 to 2"),
        ("learning_rate", 5e-3, "from 0.001 to 0.005"),
    ):
        with pytest.raises(UserError, match=expected) as raised:
            compare_with_checkpoint(tmp_path / "checkpoint-1", {**before, name: value})
        assert raised.value.problems[0].options == (name,)
        for remedy in ("a different output_dir", "overwrite_output_dir: true", "resume_despite_changes"):
            assert remedy in str(raised.value)
    assert compare_with_checkpoint(tmp_path / "checkpoint-1", {**before, "seed": 2}, allows_changes=True)


def test_changed_library_versions_are_reported(tmp_path):
    before = {"burnish": "0.1.0", "torch": "2.13.0", "transformers": "5.17.0"}
    (tmp_path / "checkpoint-1").mkdir()
    write_manifest(tmp_path / "checkpoint-1", 1, {"versions": before})
    (message,) = compare_with_checkpoint(tmp_path / "checkpoint-1", {"versions": {**before, "transformers": "5.23.0"}})
    assert message == 'versions was {"transformers": "5.17.0"} in checkpoint-1 and is {"transformers": "5.23.0"} now.'


def test_two_runs_cannot_write_into_one_folder(tmp_path):
    with exclusive_writer_lock(tmp_path):
        code = (
            "import sys; from pathlib import Path; from burnish.utils.files import exclusive_writer_lock\n"
            "with exclusive_writer_lock(Path(sys.argv[1])): pass"
        )
        result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert "another run is writing" in result.stderr


def test_worker_of_a_killed_run_does_not_hold_its_lock(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from burnish.utils.files import exclusive_writer_lock\n"
        "with exclusive_writer_lock(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if not child: print(os.getpid(), flush=True)\n"
        "    time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        with exclusive_writer_lock(tmp_path):
            os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_finished_run_leaves_only_checkpoints(tmp_path):
    with exclusive_writer_lock(tmp_path):
        (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(RuntimeError), exclusive_writer_lock(tmp_path):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    with exclusive_writer_lock(tmp_path):
        pass


@pytest.mark.slow
def test_process_killed_while_saving_keeps_previous_checkpoint(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from regression_run import *\n"
        "run, options = make_run(Path(sys.argv[1]), model=Regression(width=30000), save_steps=1, max_steps=100000)\n"
        "print('ready', flush=True); run.train()"
    )
    for delay_s in (0.15, 0.4):
        child = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, Path(__file__).parents[1] / "helpers"],
            stdout=subprocess.PIPE,
            text=True,
        )
        child.stdout.readline()
        deadline = time.monotonic() + 20
        while not (tmp_path / "checkpoint-3").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(delay_s)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert Checkpoints(tmp_path).newest()[0] is not None
        assert all(not integrity_errors(path) for path in Checkpoints(tmp_path).all())


def test_nested_state_round_trip_is_bitwise_equal():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 2)}, 7: {}},
        "groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "params": [0, 1], "name": None}],
        "flag": True,
        "half": torch.randn(4).bfloat16(),
    }
    tensors, data = split(state)
    restored = join(tensors, json.loads(json.dumps(data)))
    assert restored["state"][0]["exp_avg"].equal(state["state"][0]["exp_avg"])
    assert restored["half"].equal(state["half"])
    assert restored["groups"] == state["groups"]
    assert list(restored["state"]) == [0, 7]


@pytest.mark.parametrize("keys", [("a.b", "a", "b"), (0, "0", None)])
def test_tensors_with_equal_paths_are_kept_apart(keys):
    first, second, inner = keys
    state = {first: torch.zeros(2), second: torch.ones(2) if inner is None else {inner: torch.ones(2)}, "a.b_": {}}
    tensors, data = split(state)
    restored = join(tensors, json.loads(json.dumps(data)))
    assert restored.keys() == state.keys()
    other = restored[second] if inner is None else restored[second][inner]
    assert other.tolist() == [1, 1]
    assert restored[first].tolist() == [0, 0]


def test_state_that_requires_pickle_is_rejected():
    with pytest.raises(TypeError, match=r"parts\.curve contains an object of type function"):
        split({"parts": {"curve": lambda step: step}})
