"""Buffer pool: memory for the few large tensors that every training step on a CPU needs: logits, the head's gradient, a
layer's weights in the compute dtype.

In: a shape. Out: a tensor on a free block of memory. A block returns to the pool when its last tensor is deleted, and
is reused with its pages. New pages would cost page faults and be filled with zeros, which takes tens of milliseconds
for the gradient of a head. Blocks use huge pages if the system supports them (madvise(2), MADV_HUGEPAGE).
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
"""Minimum number of bytes of a tensor in the pool. torch's allocator reuses the memory of smaller ones well."""

_free_blocks: list[mmap.mmap] = []
_pool_lock = Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like ``torch.empty``. Large tensors on a CPU use memory from the pool."""
    count = prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < _SMALLEST:
        return torch.empty(shape, dtype=dtype, device=device)
    block = _map_block(-(-count // _HUGE_PAGE) * _HUGE_PAGE)
    array = np.frombuffer(block, dtype=np.uint8, count=count)
    weakref.finalize(array, _free_blocks.append, block).atexit = False  # torch keeps the array as long as its storage
    return torch.from_numpy(array).view(dtype).view(shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Like ``tensor.to(dtype)``, with memory from the pool."""
    if tensor.dtype == dtype:
        return tensor
    return empty(tuple(tensor.shape), dtype, tensor.device).copy_(tensor)


def _map_block(size: int) -> mmap.mmap:
    """Take the smallest free block with at least ``size`` bytes. If all are too small, a new one replaces the largest.
    Sizes differ from step to step, and the pool should not exceed the number of blocks in use at once.
    """
    with _pool_lock:
        chosen = min((block for block in _free_blocks if len(block) >= size), key=len, default=None)
        if chosen is not None:
            _free_blocks.remove(chosen)
        elif _free_blocks:
            _free_blocks.remove(max(_free_blocks, key=len))
    return _new_block(size) if chosen is None else chosen


def _new_block(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    # Private: by default a forked process would share the block, and write to it.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has no huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
