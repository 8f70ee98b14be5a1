"""Takes some of burnish's own ways out of a process: those that come with the fast path and that no option turns off.

In: names of ``WAYS``. Out: nothing; what is taken out is done in this process as torch or transformers does it.
``padding_free``, ``fused_loss``, ``attn_implementation``, ``optim`` and ``needed_tokens_only`` are options, and are
left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from burnish.app import build
from burnish.engine import base
from burnish.models import fused
from burnish.objectives import lm
from burnish.ops import attention, kept, probe


def _elementwise() -> None:
    """Norms, gated layers and activations by the model's own code."""
    build.fuse = lambda model: 0


def _copies() -> None:
    """A copy of the weights of each linear layer, made by autocast and kept for the backward pass."""
    fused._linear_of = lambda module: None


def _attention() -> None:
    """Each sequence that lies flat through torch's fused attention, whatever its length."""
    attention._is_half = lambda query: False


def _memory() -> None:
    """Freed memory goes back to the system, and large tensors come from there."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    base.keep_freed_memory = lambda: False
    kept.empty = empty


def _tied() -> None:
    """Two gradients of a weight that is embedding and head, and their sum."""
    lm.is_plain_lookup = lambda module: False


def _last_layer() -> None:
    """The last feed-forward part at every position."""
    probe.last_feed_forward = lambda backbone: None


WAYS: dict[str, Callable[[], None]] = {
    "elementwise": _elementwise, "copies": _copies, "attention": _attention, "memory": _memory, "tied": _tied,
    "last_layer": _last_layer,
}  # fmt: skip


def take_out(names: Iterable[str]) -> None:
    for name in names:
        WAYS[name]()
