"""A weight that is both the embedding and the head of a language model, and the one gradient of both uses.

In: the weight. Out: the rows that are looked up, and the weight for the head. Left to autograd, the two gradients are
two tensors of the weight's size, of which the embedding's is zero but for the rows of the batch, and another pass adds
them. Here the lookup hands on its rows alone, and they are added to the gradient of the head, in place.
"""

# V vocabulary, H hidden size

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether ``module`` gives rows of its weight and nothing else, and its gradient is nothing else either."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    is_asked_for_more = module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    return not is_asked_for_more and "forward" not in vars(module)


class TiedWeight:
    """A tied weight in one forward pass, and in the backward pass behind it.

    Args:
        weight: (V, H)
        padding_id: the token whose row learns nothing from the lookup, as ``torch.nn.Embedding`` has it; None is none.

    Attributes:
        joined: (V, H) the weight, for the head. Autograd goes on from it to ``weight`` when both uses are done.
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
    def backward(ctx: Any, of_head: Tensor | None) -> tuple[Tensor, None]:
        """Autograd comes here after every use of the weight; the gradient of the head is nobody else's."""
        gradient = torch.zeros_like(ctx.like) if of_head is None else of_head
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
