"""Buffer pool: memory for the few large tensors that every training step on a CPU needs: logits, a head's gradient, a
layer's weights in the dtype of its products.

In: a shape. Out: a tensor over a free block of memory. A block returns to the pool when the last tensor over it is
gone, and is used again with its pages: each new page would cost a page fault and be filled with zeros, which takes tens
of milliseconds for the gradient of a head. Blocks are in huge pages where the system has them (madvise(2),
MADV_HUGEPAGE).
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
"""Least bytes of a tensor in the pool; torch's allocator reuses the memory of smaller ones well."""

_free: list[mmap.mmap] = []
_choosing = Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like ``torch.empty``; large tensors on a CPU take their memory from the pool."""
    count = prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < _SMALLEST:
        return torch.empty(shape, dtype=dtype, device=device)
    block = _taken(-(-count // _HUGE_PAGE) * _HUGE_PAGE)
    array = np.frombuffer(block, dtype=np.uint8, count=count)
    weakref.finalize(array, _free.append, block).atexit = False  # torch holds the array as long as its storage
    return torch.from_numpy(array).view(dtype).view(shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Like ``tensor.to(dtype)``, with memory from the pool."""
    if tensor.dtype == dtype:
        return tensor
    return empty(tuple(tensor.shape), dtype, tensor.device).copy_(tensor)


def _taken(size: int) -> mmap.mmap:
    """Take the smallest free block of at least ``size`` bytes. If all are too small, a new one replaces the largest of
    them: sizes differ from step to step, and there should not be more blocks than were in use at once."""
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
    # Private: by default a forked process would share the block, and write to it.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has no huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
