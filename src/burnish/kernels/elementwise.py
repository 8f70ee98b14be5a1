"""Elementwise operations of a layer between its matrix products: RMS norm, gated activation, rotary positions.

In:  hidden states. Out: the results of these formulas, in the dtype of the next product.

    rms_norm(x)        = x / sqrt(mean(x²) + eps) * (offset + weight)      (https://arxiv.org/abs/1910.07467)
    gate_product(g, u) = activation(g) * u                                 (https://arxiv.org/abs/2002.05202)
    apply_rotary(x)    = x * cos + (-x2, x1) * sin, where x = (x1, x2)     (https://arxiv.org/abs/2104.09864)

With separate torch operations, each step of a formula writes a tensor of the size of the hidden states to memory, and
keeps it if a gradient is needed; under autocast every linear layer after a norm casts its float32 output again. Here a
formula is computed for a few rows at a time, whose intermediate values stay in the processor's cache. Only the input is
kept, and the rest is recomputed in the backward pass. The output is rounded once, to the dtype to which the next
product would cast it. On a GPU a model's own layers, or Liger kernels, are used instead.
"""

# N rows (all leading dimensions, flattened), H hidden size, I size of the gate

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.kernels.recomputed import may_be_recomputed

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_BLOCK_BYTES = 2**19
"""Size, in float32, of the rows that are computed together: a few such blocks fit into the L2 cache of a core."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scale each row to a root mean square of 1, times ``offset + weight``; computed in float32.

    Args:
        x: (..., H) any float type.
        weight: (H,)
        eps: added to the mean square.
        offset: 1 if a weight of zero means no scaling (Gemma).

    Returns:
        (..., H) in autocast's dtype if enabled, else in the dtype of ``x``, or of the weight if that is wider.
    """
    dtype = next_dtype(x, torch.promote_types(x.dtype, weight.dtype) if not offset else x.dtype)
    normed: Tensor = _RmsNorm.apply(x, weight, eps, offset, dtype)  # type: ignore[no-untyped-call]
    return normed


def gate_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute ``activation(gate) * up``, (..., I) each, in their dtype. On a CPU the result may be recomputed later.

    Args:
        activation: one of ``ACTIVATIONS``.
    """
    product: Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    if not product.requires_grad:
        return product
    return may_be_recomputed(product, partial(_gate_product_by_blocks, activation=activation), gate, up)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions, computed in float32, without a gradient. Equal in all bits to separate operations.

    Args:
        x: (L, heads, D) any float type, D even.
        cos, sin: (L, D) of the position of each row.

    Returns:
        (L, heads, D) in the dtype of ``x``.
    """
    result = torch.empty(x.shape, dtype=x.dtype)
    half, height = x.shape[-1] // 2, max(1, _BLOCK_BYTES // (4 * x.shape[1] * x.shape[2]))
    parts = (torch.split(tensor, height) for tensor in (x, cos.float()[:, None], sin.float()[:, None], result))
    for some, c, s, into in zip(*parts, strict=True):
        wide = some.float()
        turned = wide * c
        turned[..., :half] -= wide[..., half:] * s[..., :half]
        turned[..., half:] += wide[..., :half] * s[..., half:]
        into.copy_(turned)
    return result


def is_faster(x: Tensor) -> bool:
    """Whether the functions above are faster, or need less memory, than separate operations for hidden states (..., H).
    True on a CPU, except for a few rows without gradients, as in generation.
    """
    if x.device.type != "cpu":
        return False
    return _rounds_as_trained or torch.is_grad_enabled() or 4 * x.numel() > _BLOCK_BYTES


_rounds_as_trained = False


@contextmanager
def rounding_as_trained() -> Iterator[None]:
    """Context in which a pass without gradients rounds like one with gradients, for any number of rows.
    Log-probabilities of a reference are compared with the policy's, and must be equal before training.
    """
    global _rounds_as_trained
    before, _rounds_as_trained = _rounds_as_trained, True
    try:
        yield
    finally:
        _rounds_as_trained = before


def next_dtype(x: Tensor, own: torch.dtype) -> torch.dtype:
    """The dtype to which the next product casts its input: autocast's if enabled, else ``own``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of a few rows, the same rows of all tensors (N, ...), as views."""
    height = max(1, _BLOCK_BYTES // (4 * tensors[0].shape[1]))
    return zip(*(torch.split(tensor, height) for tensor in tensors), strict=True)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _norm_by_blocks(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., H) the result of ``rms_norm``, and (N, 1) one over the root mean square of each row."""
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
        normed, inverse = _norm_by_blocks(x, weight, eps, offset, dtype)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients: d weight = Σ grad * y and d x = inverse * (m - y * mean(m * y)), where y = x * inverse and
        m = grad * scale."""
        x, weight, inverse = ctx.saved_tensors
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


def _gate_product_by_blocks(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    product = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    for g, u, into in _blocks(_rows(gate), _rows(up), _rows(product)):
        torch.mul(apply_activation(g, activation), u, out=into)
    return product


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gate_product_by_blocks(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
        for g, u, some, of_gate, of_up in _blocks(*map(_rows, (gate, up, grad, grad_gate, grad_up))):
            torch.mul(some, apply_activation(g, ctx.activation), out=of_up)
            _write_activation_grad((some * u).to(g.dtype), g, ctx.activation, of_gate)
        return grad_gate, grad_up, None


def apply_activation(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _write_activation_grad(grad: Tensor, x: Tensor, activation: str, out: Tensor) -> None:
    """Write ``grad`` times the derivative of the activation at ``x`` to ``out``."""
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=out)
