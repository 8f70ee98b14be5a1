"""Sharded tensors: written by any number of ranks, read by any other number, completely or partially."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

from burnish.checkpoint.checkpoint import Checkpoints, load
from burnish.checkpoint.parts import Part
from burnish.checkpoint.shards import (
    LocalShard,
    gather_reports,
    index_name,
    read_sharded,
    report_files,
    shard_name,
    write_index,
    write_shard,
)
from burnish.config.errors import UserError
from burnish.loop.state import TrainerState


def shard_of(tensor, rank, world_size):
    """Return the piece of a rank: an equal range of the flattened tensor. The last may be shorter or empty."""
    size = -(-tensor.numel() // world_size)
    part = tensor.reshape(-1)[rank * size : (rank + 1) * size]
    return LocalShard(part, rank * size, tuple(tensor.shape))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_of_any_number_of_ranks_are_read_fully_and_partially(tmp_path, world_size):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(2).to(torch.bfloat16), "step": torch.tensor(7.0)}
    for rank in range(world_size):
        shards = {name: shard_of(t, rank, world_size) if t.dim() else t for name, t in tensors.items()}
        write_shard(tmp_path / shard_name("model", rank, world_size), shards, is_first=rank == 0)
    write_index(tmp_path, "model", world_size)
    result = read_sharded(tmp_path, "model")
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name].full_tensor(), tensor)
    for begin in range(15):
        assert torch.equal(result["a"].slice_of(begin, 15 - begin), tensors["a"].flatten()[begin:])


def test_shard_index_with_a_gap_is_rejected(tmp_path):
    write_shard(tmp_path / shard_name("model", 0, 1), {"a": LocalShard(torch.ones(2), 1, (3,))}, is_first=True)
    write_index(tmp_path, "model", 1)
    with pytest.raises(UserError, match="do not add up"):
        read_sharded(tmp_path, "model")


class Halves:
    """A vector of which each of two ranks holds a half."""

    def __init__(self, rank, value):
        self.rank, self.value = rank, torch.full((3,), float(value))

    def state_dict(self, stored):
        return {"weight": LocalShard(self.value, 3 * self.rank, (6,))}

    def load_state_dict(self, stored, state):
        self.value = state["weight"].slice_of(3 * self.rank, 3)


def save_on_two_ranks(folder, fails=False):
    """Save on two ranks at the same time. Returns the exception of each."""
    barrier, raised = threading.Barrier(2), [None, None]

    def save(rank):
        half = Halves(rank, rank + 1)
        if fails and rank == 1:
            half.value = Unwritable(3)
        parts = {"model": Part(half, "model", shards=half), "state": Part(TrainerState(), "trainer_state")}
        engine = SimpleNamespace(rank=rank, world_size=2, barrier=barrier.wait)
        checkpoints = Checkpoints(folder, processes=engine)
        try:
            checkpoints.save(4, parts)
            checkpoints.wait()
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


class Unwritable(torch.Tensor):
    def __new__(cls, count):
        return torch.Tensor._make_subclass(cls, torch.ones(count))

    def reshape(self, *shape):
        raise OSError("No space left on device")

    def detach(self):
        return self

    def to(self, *args):
        return self

    def clone(self):
        return self

    def contiguous(self):
        return self


def test_two_ranks_save_and_load_their_shards(tmp_path):
    assert save_on_two_ranks(tmp_path) == [None, None]
    folder = tmp_path / "checkpoint-4"
    assert not list(folder.glob(".rank*"))
    for rank in range(2):
        half = Halves(rank, 0)
        load(folder, {"model": Part(half, "model", shards=half)}, rank)
        assert half.value.tolist() == [rank + 1.0] * 3


def test_failed_write_on_one_rank_leaves_no_checkpoint_on_both(tmp_path):
    first, second = save_on_two_ranks(tmp_path, fails=True)
    assert "Rank 1 could not write its shard" in str(first)
    assert "No space left" in str(first)
    assert "No space left" in str(second)
    assert Checkpoints(tmp_path).newest() == (None, [])


def test_waiting_for_a_silent_rank_times_out(tmp_path):
    with pytest.raises(OSError, match=r"Rank 1 did not write"):
        gather_reports(tmp_path, 2, longest_s=0.1)
    (tmp_path / "own").write_text("own")
    with report_files(tmp_path, 1, ["own"]):
        pass
    assert gather_reports(tmp_path, 2).keys() == {"own"}


def test_shard_index_is_human_readable(tmp_path):
    write_shard(tmp_path / shard_name("model", 0, 1), {"a": torch.ones(2, 3)}, is_first=True)
    write_index(tmp_path, "model", 1)
    index = json.loads((tmp_path / index_name("model")).read_text())
    assert index["tensors"]["a"] == {
        "dtype": "F32", "shape": [2, 3], "pieces": [["model-00001-of-00001.safetensors", 0, 6]]
    }  # fmt: skip
