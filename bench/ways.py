"""Takes two of burnish's own ways out of a process that no option turns off and that are no patches of a model.

In: names of ``WAYS``. Out: nothing; what is taken out is done in this process as torch does it. The other ways are
options: ``padding_free``, ``fused_loss``, ``attn_implementation``, ``optim``, ``needed_tokens_only``, and what is done
to the model's own code, by its kind, ``leave_out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from burnish.kernels import attention
from burnish.kernels.cpu import buffer_pool
from burnish.parallel import single as base


def _attention() -> None:
    """Each sequence that lies flat through torch's fused attention, whatever its length."""
    attention.is_half_on_cpu = lambda query: False


def _memory() -> None:
    """Freed memory goes back to the system, and large tensors come from there."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    base.keep_freed_memory = lambda is_sharded=False: False
    buffer_pool.empty = empty


WAYS: dict[str, Callable[[], None]] = {"attention": _attention, "memory": _memory}


def take_out(names: Iterable[str]) -> None:
    for name in names:
        WAYS[name]()
