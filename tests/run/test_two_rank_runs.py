"""Complete runs of two processes end in the weights of one, for every kind of row."""

import pytest
import torch

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from run_outputs import weights_in
from small_run import make_workspace
from two_processes import train_with_one_and_two

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
