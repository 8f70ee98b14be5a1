"""Memory for the few large tensors that a training step on a CPU takes anew each time: logits, a head's gradient, a
layer's weights in the format of its products.

In: a shape. Out: a tensor over memory that is free. A block that was handed out comes back when the last tensor over it
is gone, and is handed out again: its pages are there, where fresh ones would each cost a fault and be filled with
zeros, tens of milliseconds for the gradient of a head. Blocks lie in huge pages where the system has them to give
(madvise(2), MADV_HUGEPAGE).
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from math import prod
from threading import Lock

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGE = 2**21
_SMALLEST = 2**22
"""Bytes from which on a tensor is worth a block of its own; the allocator keeps smaller ones well enough."""

_free: list[mmap.mmap] = []
_choosing = Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``; on a CPU, large ones lie in memory that is kept."""
    count = prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < _SMALLEST:
        return torch.empty(shape, dtype=dtype, device=device)
    block = _taken(-(-count // _HUGE_PAGE) * _HUGE_PAGE)
    array = np.frombuffer(block, dtype=np.uint8, count=count)
    weakref.finalize(array, _free.append, block).atexit = False  # torch holds the array as long as its storage
    return torch.from_numpy(array).view(dtype).view(shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``tensor.to(dtype)``."""
    if tensor.dtype == dtype:
        return tensor
    return empty(tuple(tensor.shape), dtype, tensor.device).copy_(tensor)


def _taken(size: int) -> mmap.mmap:
    """The smallest free block of ``size`` bytes or more. Where all are too small, the largest of them makes way for a
    new one: sizes differ from step to step, and there are to be no more blocks than were wanted at a time."""
    with _choosing:
        chosen = min((block for block in _free if len(block) >= size), key=len, default=None)
        if chosen is not None:
            _free.remove(chosen)
        elif _free:
            _free.remove(max(_free, key=len))
    return _fresh(size) if chosen is None else chosen


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    # Private: by default such a block is one that a forked process writes to as well.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
