"""The engine of several processes: the base of all kinds of parallelism, with the process group and its collectives.

In: what ``SingleEngine`` takes, in each process, and the environment that a launcher sets (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Out: sums over all ranks, rows of all ranks each counted once, and an update that
all of them apply or none. The engines built on it decide how weights and gradients are distributed: ``ddp``, ``fsdp``.

Number formats, clipping and the guard against NaN are those of ``SingleEngine``, so that one process computes the same
weights to the bit. Tested on gloo and CPUs; nothing here is specific to them, but nothing has been run on several GPUs.
"""

# N rows of a rank

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from burnish.checkpoint.parts import Part
from burnish.loop.types import IGNORE_INDEX
from burnish.parallel.choices import EngineChoices
from burnish.parallel.single import SingleEngine

CLOSING_S = 10.0
"""Seconds for which the end of a process waits until its group is closed."""

_opened: list[Any] = []
"""Groups that engines of this process opened; others belong to the script."""


class ParallelEngine(SingleEngine):
    """One of several processes.

    Args:
        options: the flat options; those of ``EngineOptions`` are read.
    """

    def __init__(self, options: EngineChoices) -> None:
        super().__init__(options)
        was_there = dist.is_initialized()
        self.open_group()
        if not was_there:
            _opened.append(dist.group.WORLD)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def open_group(self) -> None:
        """Open the process group, unless a script has opened it before."""
        if dist.is_initialized():
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = self.options.ddp_backend or ("gloo" if self.device.type == "cpu" else None)
        timeout = timedelta(seconds=self.options.ddp_timeout)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:  # sharding with a single process
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)

    def step(self, optimizer: Optimizer, is_finite: Tensor) -> bool:
        """Update on all ranks or on none, because the loss can be infinite on a single rank."""
        return super().step(optimizer, self.sum((~is_finite).float()) == 0)

    def sum(self, value: Tensor) -> Tensor:
        summed = value.detach().clone()
        dist.all_reduce(summed)
        return summed

    def gather(self, value: Tensor) -> Tensor:
        """Gather the rows of all ranks, rank after rank; ranks may have different numbers of rows, or none.

        Args:
            value: (N, ...), with the same number of dimensions on every rank.
        Returns:
            (sum of N, ...), padded with IGNORE_INDEX where other ranks are wider.
        """
        mine = torch.tensor(value.shape, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine)
        shapes: list[list[int]] = torch.stack(found).tolist()
        rows = [shape[0] for shape in shapes]
        filled_shapes = [shape for shape in shapes if shape[0]] or shapes
        largest = [max(rows), *map(max, list(zip(*filled_shapes, strict=True))[1:])]
        filled = _filled(value, largest).contiguous()
        parts = [torch.empty_like(filled) for _ in shapes]
        dist.all_gather(parts, filled)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather plain data of every rank, in the order of the ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        dist.barrier()


def with_weights(parts: Mapping[str, Part]) -> list[str]:
    """Names of the parts, besides model and optimizer, that hold weights of their own: the head of a reward model."""
    return [name for name, part in parts.items()
            if name not in ("model", "optimizer") and callable(getattr(part.held, "parameters", None))]  # fmt: skip


def close_group() -> None:
    """Close the group at the end of a command, if an engine opened it. After a failure another rank may still be in the
    middle of a sum, for which NCCL can wait: not longer than ``CLOSING_S``."""
    if _is_open():
        closing = Thread(target=dist.destroy_process_group, daemon=True)
        closing.start()
        closing.join(CLOSING_S)


@atexit.register
def _close_at_exit() -> None:
    """Close the group that an engine of a script opened, and later ones used, unless the script failed: NCCL might wait
    for other ranks then, and no thread can be started here to look after it."""
    if _is_open() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _is_open() -> bool:
    return dist.is_initialized() and any(dist.group.WORLD is group for group in _opened)


def _filled(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """Put ``value`` into the corner of a tensor of ``sizes``. Larger dimensions are cut; only rows that belong to no
    rank have some."""
    if list(value.shape) == list(sizes):
        return value
    filled = value.new_full(tuple(sizes), IGNORE_INDEX if value.dtype != torch.bool else False)
    corner = tuple(slice(min(here, there)) for here, there in zip(value.shape, sizes, strict=True))
    filled[corner] = value[corner]
    return filled
