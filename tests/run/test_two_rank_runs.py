"""Complete runs of two processes give the weights of one, for every kind of row."""

import os
import shutil
import time
from math import inf
from pathlib import Path

import pytest
import torch

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from burnish.checkpoint import checkpoint
from burnish.cli import main
from burnish.loop import loop
from burnish.loop.spikes import SpikeWatch
from representative import collected_values, representative_slow
from run_outputs import history, weights_in
from small_run import as_arguments, make_workspace
from two_processes import in_two_processes, train_with_one_and_two

pytestmark = pytest.mark.run

KINDS = {
    "encoded before": {},
    "streamed": {"streaming": True, "buffer_size": 8},
    "one block after another": {"use_badam": True, "badam_switch_interval": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Create the runs of one process and of two in a gloo group."""
    kinds = collected_values(request, "kind")
    folder = tmp_path_factory.mktemp("ranks")
    options = make_workspace(folder, max_steps=6, save_strategy="no")
    train_with_one_and_two(folder, options, {kind: KINDS[kind] for kind in KINDS if kind in kinds})
    return folder


@pytest.mark.parametrize("kind", representative_slow(KINDS, 1))
def test_two_processes_give_the_weights_of_one(folder, kind):
    started, one, two = (weights_in(path) for path in (folder / "model", folder / "one" / kind, folder / "two" / kind))
    assert any(not torch.equal(one[name], started[name]) for name in started)
    for name, weight in one.items():  # sums over ranks are added in another order
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


def train(options):
    assert main(["train", *as_arguments(options)]) == 0


def logged(path):
    """Return the logged values that do not depend on time."""
    timed = ("runtime", "second", "waiting")
    return [{k: v for k, v in log.items() if not any(name in k for name in timed)} for log in history(path)]


@pytest.mark.slow
def test_log_after_a_resume_between_two_logs_counts_each_rank_once(tmp_path):
    options = make_workspace(
        tmp_path, count=32, logging_steps=4, save_steps=3, max_steps=4, include_num_input_tokens_seen=True,
        ddp_backend="gloo", save_total_limit=5,
    )  # fmt: skip
    in_two_processes(train, options)
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "out" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    in_two_processes(train, {**options, "output_dir": str(tmp_path / "resumed")})
    assert logged(tmp_path / "resumed") == logged(tmp_path / "out")


def train_recording_loads(options, folder):
    """Train with a slow writer and a spike at step 4, and record which checkpoint this rank loads."""
    rank, write, check = int(os.environ["RANK"]), checkpoint.write_manifest, SpikeWatch.check
    loads = {"load": loop.load, "load_part": loop.load_part}

    def slow(*arguments, **options):
        time.sleep(0.7)
        return write(*arguments, **options)

    def recording(name):
        def load(path, *arguments):
            with (Path(folder) / f"loads_{rank}").open("a") as file:
                file.write(f"{name} {path.name}\n")
            return loads[name](path, *arguments)

        return load

    def check_with_spike(self, parallel, step, step_batch, loss, norm):
        has_rolled_back = (Path(folder) / f"loads_{rank}").is_file()
        return check(self, parallel, step, step_batch, loss, norm * (inf if step == 4 and not has_rolled_back else 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_manifest", slow)
        patch.setattr(SpikeWatch, "check", check_with_spike)
        for name in loads:
            patch.setattr(loop, name, recording(name))
        train(options)


def loads_of(folder, options):
    in_two_processes(train_recording_loads, {**options, "ddp_backend": "gloo", "logging_steps": 1}, str(folder))
    return [(folder / f"loads_{rank}").read_text().splitlines() for rank in (0, 1)]


@pytest.mark.slow
def test_all_ranks_roll_back_to_the_checkpoint_that_rank_0_was_writing(tmp_path):
    options = make_workspace(tmp_path, count=64, save_steps=1, max_steps=6, on_spike="rollback")
    assert loads_of(tmp_path, options) == [["load checkpoint-3"]] * 2


@pytest.mark.slow
def test_all_ranks_load_the_best_checkpoint_that_rank_0_was_writing(tmp_path):
    options = make_workspace(
        tmp_path, count=32, max_steps=3, eval_strategy="steps", eval_steps=2, val_size=0.2, save_strategy="best",
        load_best_model_at_end=True, learning_rate=3.0, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    first, second = loads_of(tmp_path, options)
    assert first == second
    assert [line.split()[0] for line in first] == ["load_part"]
