"""The parts of a layer between its matrix products: the norm, and the product of a gate and what it lets by.

In:  hidden states. Out: what the formulas below say, in the dtype in which the next product is made.

    rms_norm(x)   = x / sqrt(mean(x²) + eps) * (offset + weight)      (https://arxiv.org/abs/1910.07467)
    gated(g, u)   = activation(g) * u                                 (https://arxiv.org/abs/2002.05202)

Written with one torch operation after another, each step of a formula is a tensor of the size of the hidden states,
written to memory and, where a gradient is wanted, kept; under autocast every linear layer behind a norm casts its
float32 output anew. Here a formula is gone through a few rows at a time, whose intermediate values stay in the
processor's cache, and what is kept is the input: the rest is computed again in the backward pass. The output is rounded
once, to the dtype that the next product would cast it to. On a GPU a kernel does the same for all rows
(``ops.triton_kernels``).
"""

# N rows (all leading dimensions, flattened), H hidden size, I size of the gate

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.ops.kernels import kernels_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_BLOCK_BYTES = 2**19
"""Rows that are looked at together, in float32: a few such blocks fit into the second cache of a core."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Each row at a root mean square of one, times ``offset + weight``; computed in float32.

    Args:
        x: (..., H) any float type.
        weight: (H,)
        offset: 1 where a weight of zero means to leave the row (Gemma).
    Returns:
        (..., H) in autocast's dtype where that is on, else in the dtype of ``x``, or of the weight where that is wider.
    """
    dtype = next_dtype(x, torch.promote_types(x.dtype, weight.dtype) if not offset else x.dtype)
    normed: Tensor = _RmsNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-untyped-call]
    return normed


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, of (..., I) each, in their dtype.

    Args:
        activation: one of ``ACTIVATIONS``.
    """
    product: Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return product


def gains(x: Tensor) -> bool:
    """Whether (..., H) hidden states are gone through faster, or in less memory, by the functions above than by one
    operation after another: on a GPU by a kernel; on a CPU, unless they are a few rows of which nothing is kept, as
    when a model answers."""
    if x.device.type != "cpu":
        kernels = kernels_of(x.device)
        return kernels is not None and x.shape[-1] <= kernels.WIDEST
    return torch.is_grad_enabled() or 4 * x.numel() > _BLOCK_BYTES


def next_dtype(x: Tensor, own: torch.dtype) -> torch.dtype:
    """What the next product would cast its input to: autocast's dtype where that is on, else ``own``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each of the tensors (N, ...), from the first to the last; views."""
    height = max(1, _BLOCK_BYTES // (4 * tensors[0].shape[1]))
    return zip(*(torch.split(tensor, height) for tensor in tensors), strict=True)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _norm_by_blocks(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., H) what ``rms_norm`` gives, and (N, 1) one over the root mean square of each row."""
    normed = torch.empty(x.shape, dtype=dtype)
    scale = weight.float() + offset
    inverse = torch.empty(x.numel() // x.shape[-1], 1)
    for some, inverses, into in _blocks(_rows(x), inverse, _rows(normed)):
        length = torch.linalg.vector_norm(some, dim=-1, keepdim=True, dtype=torch.float32)
        torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps), out=inverses)
        into.copy_((some * inverses).mul_(scale))
    return normed, inverse


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
        kernels = kernels_of(x.device)
        way: Callable[..., tuple[Tensor, Tensor]] = kernels.rms_norm if kernels else _norm_by_blocks
        normed, inverse = way(x, weight, eps, offset, dtype)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With y = x * inverse and m = grad * scale: d weight = Σ grad * y, d x = inverse * (m - y * mean(m * y))."""
        x, weight, inverse = ctx.saved_tensors
        if kernels := kernels_of(x.device):
            of_x, of_weight = kernels.rms_norm_backward(grad, x, weight, inverse, ctx.offset, ctx.needs_input_grad[1])
            return of_x, of_weight, None, None, None
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_scale = torch.zeros_like(weight, dtype=torch.float32)
        scale = weight.float() + ctx.offset
        for some, inverses, g, into in _blocks(_rows(x), inverse, _rows(grad), _rows(grad_x)):
            y, g = some * inverses, g.float()
            product = g * y
            if ctx.needs_input_grad[1]:
                grad_scale += product.sum(0)
            dots = (product @ scale).div_(x.shape[-1]).unsqueeze_(-1)
            into.copy_((g * scale).addcmul_(y, dots, value=-1).mul_(inverses))
        return grad_x, grad_scale.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if kernels := kernels_of(gate.device):
            product: Tensor = kernels.gated(gate, up, activation)
        else:
            product = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
            for g, u, into in _blocks(_rows(gate), _rows(up), _rows(product)):
                torch.mul(activated(g, activation), u, out=into)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if kernels := kernels_of(gate.device):
            return *kernels.gated_backward(grad, gate, up, ctx.activation), None
        grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        for g, u, some, of_gate, of_up in _blocks(*map(_rows, (gate, up, grad, grad_gate, grad_up))):
            torch.mul(some, activated(g, ctx.activation), out=of_up)
            of_gate.copy_(_slope((some * u).to(g.dtype), g, ctx.activation))
        return grad_gate, grad_up, None


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _slope(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """``grad`` times the derivative of the activation at ``x``."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)  # type: ignore[no-any-return]
