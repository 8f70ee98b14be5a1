"""Disable two of burnish's optimizations that have no option and are no patches of a model.

The others are options: ``padding_free``, ``fused_loss``, ``attn_implementation``, ``optim``, ``needed_tokens_only``,
and ``leave_out`` for patches of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from burnish.kernels import attention
from burnish.kernels.cpu import buffer_pool
from burnish.parallel import single as base


def _attention() -> None:
    """Use torch's fused attention for each sequence of a padding-free batch, whatever its length."""
    attention.is_half_on_cpu = lambda query: False


def _memory() -> None:
    """Return freed memory to the system and allocate large tensors there."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    vars(base)["keep_freed_memory"] = lambda is_sharded=False: False
    buffer_pool.empty = empty


DISABLE: dict[str, Callable[[], None]] = {"attention": _attention, "memory": _memory}


def disable(names: Iterable[str]) -> None:
    """Disable optimizations by name."""
    for name in names:
        DISABLE[name]()
