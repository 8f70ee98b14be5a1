"""Complete runs of two processes end in the weights of one, for every kind of row."""

import shutil

import pytest
import torch

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from burnish.cli import main
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
def folder(tmp_path_factory):
    """Folders in which one process and two, which share a gloo group, have left what they trained."""
    folder = tmp_path_factory.mktemp("ranks")
    options = make_workspace(folder, max_steps=6, save_strategy="no")
    train_with_one_and_two(folder, options, KINDS)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_weights_of_one(folder, kind):
    started, one, two = (weights_in(path) for path in (folder / "model", folder / "one" / kind, folder / "two" / kind))
    assert any(not torch.equal(one[name], started[name]) for name in started)
    for name, weight in one.items():  # sums over ranks are added in another order
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


def train(options):
    assert main(["train", *as_arguments(options)]) == 0


def logged(path):
    """The values of each log that do not depend on time."""
    timed = ("runtime", "second", "waiting")
    return [{k: v for k, v in log.items() if not any(name in k for name in timed)} for log in history(path)]


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
