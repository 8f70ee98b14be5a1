"""Rotary positions: the two halves of each head of queries and keys, rotated by the angles of their token.

In:  queries and keys, cosines and sines. Out: with x = (a, b) the two halves of a head, and likewise the cosines and
sines,

    (a cos_a - b sin_a,  b cos_b + a sin_b)                                  (https://arxiv.org/abs/2104.09864)

on a GPU with one kernel for each, in the dtype of the next product. Under autocast, written with one torch operation
after another, this takes seven tensors in float32 for queries alone.
"""

# B rows, H heads, T tokens, D size of a head

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.ops.elementwise import next_dtype
from burnish.ops.gpu.kernels import kernels_of


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the formula in torch.

    Args:
        x: (B, H, T, D). cos, sin: (B or 1, T, D).
    """
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)


def turns_alike(function: Callable[..., Any]) -> bool:
    """Return whether ``function(queries, keys, cos, sin)`` returns both, rotated by the formula."""
    drawn, shapes = torch.Generator().manual_seed(0), ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    q, k, cos, sin = (torch.randn(shape, generator=drawn) for shape in shapes)
    found = function(q, k, cos, sin)
    wanted = turned(q, cos, sin), turned(k, cos, sin)
    return len(found) == 2 and all(torch.allclose(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Rotate queries (B, H, T, D) and keys; returns None where there is no kernel for them.

    Args:
        cos, sin: (B or 1, T, D) without gradients.
    Returns:
        in autocast's dtype where that is on, else in the widest of theirs.
    """
    if kernels_of(q.device) is None or cos.requires_grad or sin.requires_grad:
        return None
    if q.ndim != 4 or k.ndim != 4 or cos.ndim != 3 or cos.shape[1:] != (q.shape[2], q.shape[3]) or q.shape[-1] % 2:
        return None
    dtype = next_dtype(q, torch.promote_types(q.dtype, cos.dtype))
    made: tuple[Tensor, Tensor] = _Rotated.apply(q, k, cos, sin, dtype)  # type: ignore[no-untyped-call]
    return made


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels = kernels_of(q.device)
        assert kernels is not None
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype
        return kernels.turned(q, cos, sin, dtype, False), kernels.turned(k, cos, sin, dtype, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        kernels = kernels_of(cos.device)
        assert kernels is not None
        back = (kernels.turned(grad, cos, sin, dtype, True) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return *back, None, None, None
