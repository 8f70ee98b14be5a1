"""Overhead of the loop in addition to model and optimizer, counted rather than timed."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burnish.loop.protocols import Objective
from burnish.loop.types import Loss
from burnish.parallel.single import SingleProcess
from regression_run import make_run

pytestmark = pytest.mark.run

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}


class ReadCounter(TorchDispatchMode):
    """Counts reads of tensor values, single or as a list."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads = 0
        as_list = torch.Tensor.tolist

        def tolist(tensor):
            self.reads += tensor.is_floating_point()  # the row order, a list of integers, is drawn on the CPU
            return as_list(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function in READS
        return function(*args, **(kwargs or {}))


class DeviceParallel(SingleProcess):
    """Clips and steps as on a GPU, without reading a value; counts sums over ranks."""

    num_sums = 0

    def clip(self, parameters, max_norm):
        gradients = [parameter.grad for parameter in parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, optimizer, is_finite):
        optimizer.step()
        return True

    def sum(self, value):
        self.num_sums += 1
        return value


def costs(tmp_path, monkeypatch, **overrides):
    """Return a function that runs twelve steps and returns the numbers of reads and of sums over ranks."""
    run, options = make_run(tmp_path, max_steps=12, save_strategy="no", **overrides)
    run.parallel = DeviceParallel(options)
    with ReadCounter(monkeypatch) as counted:
        run.train()
    return counted.reads, run.parallel.num_sums


@pytest.mark.parametrize("every", [1, 3, 6])
def test_log_costs_one_device_read_and_step_none(tmp_path, monkeypatch, every):
    reads, _ = costs(tmp_path, monkeypatch, logging_steps=every)
    assert reads == 12 // every + 1  # and one for the summary


def test_disabled_logging_costs_no_reads_or_sums(tmp_path, monkeypatch):
    reads, sums = costs(tmp_path, monkeypatch, logging_strategy="no")
    assert reads == 1  # that of the summary
    assert sums == 12 + 1  # the weight of each step, and the summary


class PeakBytes(TorchDispatchMode):
    """Measures the peak number of bytes of new tensors."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in old:
                self.add(leaf.untyped_storage().nbytes(), leaf)
        return result

    def add(self, size, tensor):
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(tensor, self.remove, size)

    def remove(self, size):
        self.bytes -= size


class WideObjective(Objective):
    """A loss over many classes that does not return logits."""

    def collate(self, rows):
        return {"input_ids": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}

    def num_items(self, batch):
        return torch.tensor(float(len(batch["labels"])))

    def loss(self, model, batch):
        return Loss(model(batch["input_ids"]).logsumexp(-1).sum(), {})


def test_evaluation_peak_memory_is_at_most_that_of_a_training_step(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4096))
    run, _ = make_run(
        tmp_path, model=model, eval_rows=40, max_steps=2, save_strategy="no", per_device_eval_batch_size=2
    )
    run.objective = WideObjective()
    with PeakBytes() as training:
        run.train()
    with PeakBytes() as evaluation:
        run.evaluate_set(run.eval_sets[""], "eval")
    assert 2 * 4096 * 4 <= evaluation.peak < training.peak
    assert (
        evaluation.peak < 4 * 2 * 4096 * 4
    )  # logits of one batch and tensors computed from them, for any number of batches
