"""Base of the backends for several processes: the process group and its collectives.

In: the same as for ``SingleProcess``, in each process, and the environment variables of a launcher (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Out: sums over all ranks, rows of all ranks, and an update that is applied on all
ranks or on none. The derived backends (``ddp``, ``fsdp``) distribute weights and gradients.

Precision, clipping and the handling of NaN are those of ``SingleProcess``, so one process computes exactly the same
weights. Tested with gloo on CPUs; not tested on several GPUs.
"""

# N rows of a rank

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from burnish.checkpoint.parts import Part
from burnish.checkpoint.shards import Shards
from burnish.config.errors import UserError, first_line
from burnish.loop.types import IGNORE_INDEX
from burnish.parallel.options import ParallelChoices
from burnish.parallel.single import SingleProcess
from burnish.utils.work import progress

CLOSING_S = 10.0
"""Maximum seconds that a process waits for closing its group when it ends."""

_opened: list[Any] = []
"""Groups opened by backends of this process. Others belong to the script."""


def _open_process_group(backend: str | None, timeout: timedelta) -> None:
    """Open the process group that the environment variables describe, and wait until all processes have connected.

    Raises:
        UserError: if not all processes connect within ``timeout``.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    size, rank = os.environ["WORLD_SIZE"], os.environ.get("RANK")
    try:
        with progress(f"Connecting {size} processes at {address}:{port}", unit="processes"):
            dist.init_process_group(backend, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        why = "The host name cannot be resolved" if not _resolves(address) else "Not all processes connected in time"
        raise UserError(
            f"Rank {rank} of {size} could not connect to the process group at {address}:{port} within "
            f"{timeout.total_seconds():.0f} s (ddp_timeout).",
            why=f"{why}: {first_line(error)}",
            remedy="Check MASTER_ADDR and MASTER_PORT, and start all processes within ddp_timeout seconds.",
        ) from error


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


class MultiProcess(SingleProcess):
    """Base backend for one of several processes.

    Args:
        options: the flat options; those of ``ParallelOptions`` are read.
    """

    def __init__(self, options: ParallelChoices) -> None:
        super().__init__(options)
        was_there = dist.is_initialized()
        self.open_group()
        if not was_there:
            _opened.append(dist.group.WORLD)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def open_group(self) -> None:
        """Open the process group, unless a script has already opened one."""
        if dist.is_initialized():
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = self.options.ddp_backend or ("gloo" if self.device.type == "cpu" else None)
        timeout = timedelta(seconds=self.options.ddp_timeout)
        if os.environ.get("WORLD_SIZE"):
            _open_process_group(backend, timeout)
        else:  # sharding with a single process
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)

    def step(self, optimizer: Optimizer, is_valid: Tensor) -> bool:
        """Update on all ranks or on none, because the loss can be infinite on a single rank."""
        return super().step(optimizer, self.sum((~is_valid).float()) == 0)

    def sum(self, value: Tensor) -> Tensor:
        summed = value.detach().clone()
        dist.all_reduce(summed)
        return summed

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate the rows of all ranks. Ranks may have different numbers of rows, or none.

        Args:
            value: (N, ...), with the same number of dimensions on every rank.

        Returns:
            (sum of N, ...), padded with IGNORE_INDEX to the largest sizes.
        """
        own_shape = torch.tensor(value.shape, device=self.device)
        shapes_of_ranks = [torch.empty_like(own_shape) for _ in range(self.world_size)]
        dist.all_gather(shapes_of_ranks, own_shape)
        shapes: list[list[int]] = torch.stack(shapes_of_ranks).tolist()
        rows = [shape[0] for shape in shapes]
        filled_shapes = [shape for shape in shapes if shape[0]] or shapes
        largest = [max(rows), *map(max, list(zip(*filled_shapes, strict=True))[1:])]
        filled = _pad_to_sizes(value, largest).contiguous()
        parts = [torch.empty_like(filled) for _ in shapes]
        dist.all_gather(parts, filled)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Plain data of every rank, in the order of the ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        dist.barrier()


def with_shards(
    parts: Mapping[str, Part], model: Shards, optimizer: Shards, shards_of: Callable[[Any], Shards]
) -> dict[str, Part]:
    """The parts of a run with the objects that read and write their shards. An adapter is gathered: it is small, and
    its file can be read by other programs.

    Args:
        model: for the weights.
        optimizer: for its state.
        shards_of: for another part with its own weights, such as the head of a reward model, which is gathered.
    """
    sharded = dict(parts)
    for name, part in parts.items():
        if name == "model":
            sharded[name] = replace(part, shards=model, is_collective=part.stem != "model")
        elif name == "optimizer":
            sharded[name] = replace(part, shards=optimizer)
        elif callable(getattr(part.held, "parameters", None)):
            sharded[name] = replace(part, shards=shards_of(part.held), is_collective=True)
    return sharded


def close_group() -> bool:
    """Close the group at the end of a command, if a backend opened it, and return whether it did. After a failure
    another rank may still be inside a collective, for which NCCL can wait; the wait is limited to ``CLOSING_S``.
    """
    if not _is_open():
        return False
    closing = Thread(target=dist.destroy_process_group, daemon=True)
    closing.start()
    closing.join(CLOSING_S)
    return True


@atexit.register
def _close_at_exit() -> None:
    """Close the group that a backend opened in a script, unless the script failed. In that case NCCL could wait for
    other ranks, and no thread can be started at this point to limit the wait.
    """
    if _is_open() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _is_open() -> bool:
    return dist.is_initialized() and any(dist.group.WORLD is group for group in _opened)


def _pad_to_sizes(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """Copy ``value`` into the corner of a tensor of ``sizes``. Larger dimensions are truncated, which only affects
    dimensions without rows.
    """
    if list(value.shape) == list(sizes):
        return value
    filled = value.new_full(tuple(sizes), IGNORE_INDEX if value.dtype != torch.bool else False)
    corner = tuple(slice(min(here, there)) for here, there in zip(value.shape, sizes, strict=True))
    filled[corner] = value[corner]
    return filled
