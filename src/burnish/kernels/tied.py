"""Tied weights: one gradient for a weight that is both the embedding and the head of a language model.

In: the weight. Out: the looked-up rows, and the weight for the head. With plain autograd there are two gradients of the
weight's size, which are then added. The embedding's gradient is zero except in the rows of the batch. Here only the
gradients of the looked-up rows are kept, and added in place to the gradient of the head.
"""

# V vocabulary, H hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from burnish.utils.patching import Reason, installed_hook, patch

TIED = Reason("tied embedding", "its weight is tied to the LM head, so both share one gradient")


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether ``module`` only looks up rows of its weight, with a plain gradient."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    is_asked_for_more = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    return not is_asked_for_more and "forward" not in vars(module)


class TiedEmbedding:
    """An embedding that looks up rows in the weight that it shares with the head, inside of ``shared_gradient``."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding
        self._weight: TiedWeight | None = None

    @classmethod
    def of(cls, embedding: nn.Module) -> TiedEmbedding | None:
        """The ``TiedEmbedding`` of ``embedding``, patched in if necessary. None if it does more than looking up
        rows."""
        before = installed_hook(embedding, "forward", cls)
        if before is not None or not is_plain_lookup(embedding):
            return before
        made = cls(embedding)  # type: ignore[arg-type]
        patch(embedding, "forward", made.look_up, TIED)
        return made

    @contextmanager
    def shared_gradient(self) -> Iterator[Tensor]:
        """Context in which both uses share one gradient. Yields the weight (V, H) for the head."""
        self._weight = TiedWeight(self._embedding.weight, self._embedding.padding_idx)
        try:
            yield self._weight.joined
        finally:
            self._weight = None

    def look_up(self, input: Tensor) -> Tensor:
        """The embedding's forward pass. ids (...) -> rows (..., H)."""
        if self._weight is None:
            return type(self._embedding).forward(self._embedding, input)
        return self._weight.look_up(input)


class TiedWeight:
    """A tied weight in one forward pass and its backward pass.

    Args:
        weight: (V, H)
        padding_id: token whose row gets no gradient from the lookup, as in ``torch.nn.Embedding``; None: no such token.

    Attributes:
        joined: (V, H) the weight, for the head. Its backward pass runs after those of both uses.
    """

    def __init__(self, weight: Tensor, padding_id: int | None = None) -> None:
        self._padding_id = padding_id
        self._looked_up: list[tuple[Tensor, Tensor]] = []
        self.joined: Tensor = _Joined.apply(weight, self._looked_up)  # type: ignore[no-untyped-call]

    def look_up(self, ids: Tensor) -> Tensor:
        """ids (...) -> rows (..., H)."""
        rows: Tensor = _LookUp.apply(self.joined, ids, self._padding_id, self._looked_up)  # type: ignore[no-untyped-call]
        return rows


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, looked_up: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.looked_up, ctx.like = looked_up, weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor, None]:
        """Runs after the backward passes of all uses. Nothing else refers to the head's gradient, so it is changed in
        place.
        """
        gradient = torch.zeros_like(ctx.like) if upstream is None else upstream
        for ids, rows in ctx.looked_up:
            gradient.index_add_(0, ids, rows)
        ctx.looked_up.clear()
        return gradient, None


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_id: int | None, looked_up: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_id, ctx.looked_up = padding_id, looked_up
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ids, rows = ids.flatten(), grad.flatten(0, -2)
        if ctx.padding_id is not None:
            rows = rows * (ids != ctx.padding_id).unsqueeze(-1)
        ctx.looked_up.append((ids, rows))
        return None, None, None, None
