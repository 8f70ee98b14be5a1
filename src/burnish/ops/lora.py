"""The LoRA product: what a low-rank update adds to the output of a linear layer.

    result + scaling * dropout(x) Aᵀ Bᵀ          (Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685)

In:  the layer's own output or, where the layer is a dense one that does not train, its weight; its input, the two
     factors, their scale, the probability of dropout.
Out: the sum, in the dtype of the layer's output.

Written with torch's operations, each adapted layer keeps a dropped copy of its input for the backward pass, and a cast
one where dtypes differ: for q, k and v that is three times the very tensor the layers share. ``_LoraUpdate`` keeps
that tensor itself, the mask (one byte per element) and the product with A (r columns); the rest is computed again.
``plain=True`` is the formula as written, for comparison and for double backward, which the other refuses.

``lora_linear`` makes the layer's own product too, so that the update is added to it where it lies, and the same to its
input's gradient: else each is another tensor of that size, written, read and added up by autograd.
"""

# N rows (all leading dimensions, flattened), I inputs, O outputs, r rank

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def lora_update(
    result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0, *, plain: bool = False
) -> Tensor:
    """The output of a linear layer with its low-rank update added.

    Args:
        result: (..., O) the layer's own output.
        x: (..., I) its input; any float type.
        a, b: (r, I) and (O, r) the factors.
        scaling: what the update is multiplied by.
        dropout: the probability with which an element of ``x`` is zeroed on its way to A; 0 when not training. The
            mask is drawn from torch's global generator.
    Returns:
        (..., O) in the dtype of ``result``.
    """
    dtype = product_dtype(x, a)
    a, b = a.to(dtype), b.to(dtype)
    if plain:
        update = F.linear(F.linear(F.dropout(x.to(dtype), dropout), a), b) * scaling
        return (result + update).to(result.dtype)
    updated: Tensor = _LoraUpdate.apply(result, x, a, b, scaling, dropout)  # type: ignore[no-untyped-call]
    return updated


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """``x Wᵀ + bias + scaling * dropout(x) Aᵀ Bᵀ``, for a layer that does not train: no gradient of W or bias is made.

    Args:
        x: (..., I) in the dtype of ``weight``, which is ``product_dtype`` too.
        weight: (O, I)
        bias: (O,)
        a, b, scaling, dropout: as ``lora_update`` has them.
    Returns:
        (..., O)
    """
    output: Tensor = _LoraLinear.apply(x, weight, bias, a, b, scaling, dropout)  # type: ignore[no-untyped-call]
    return output


def product_dtype(x: Tensor, a: Tensor) -> torch.dtype:
    """The dtype of the product: autocast's where it is on, else that of the factors.

    A frozen base in bfloat16 with factors in float32 thus trains its factors in float32 (checklist row 77).
    """
    device = x.device.type
    if x.is_meta:
        return a.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.dtype


class _LoraUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float) -> Tensor:
        with without_autocast(x):
            mask, h = _down(rows(x).to(a.dtype), a.t(), dropout)
            wide = torch.promote_types(result.dtype, a.dtype)
            # Written into a tensor of the shape it has outside: a view that leaves a Function may not be added to in
            # place, and some models do (Falcon's parallel attention).
            updated = torch.empty(result.shape, dtype=wide, device=result.device)
            torch.addmm(rows(result).to(wide), h.to(wide), b.t().to(wide), alpha=scaling, out=rows(updated))
        ctx.save_for_backward(x, mask, h, a, b)
        ctx.scaling, ctx.keep = scaling, 1 - dropout
        return updated.to(result.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, h, a, b = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[1:4]
        g = rows(grad).to(a.dtype)  # (N, O)
        grad_h = (g @ b).mul_(ctx.scaling)  # (N, r)
        grad_a, grad_b = _of_factors(ctx, g, grad_h, rows(x).to(a.dtype), mask, h, needs)
        grad_x = _drop(grad_h @ a, mask, ctx.keep).to(x.dtype).view(x.shape) if needs_x else None
        return grad, grad_x, grad_a, grad_b, None, None


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropout: float
    ) -> Tensor:
        with without_autocast(x):
            a, b = a.to(x.dtype), scaled(b, scaling, x.dtype)
            mask, h = _down(rows(x), upright(a), dropout)
            output = layer_output(x, weight, bias)
            rows(output).addmm_(h, upright(b))
        ctx.save_for_backward(x, weight, mask, h, a, b)
        ctx.scaling, ctx.keep = scaling, 1 - dropout
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask, h, a, b = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad[:5]
        g = rows(grad)  # (N, O)
        grad_h = g @ b  # (N, r)
        grad_a, grad_b = _of_factors(ctx, g, grad_h, rows(x), mask, h, needs)
        grad_x = None
        if needs_x:
            grad_x = g @ weight
            grad_x = grad_x.addmm_(grad_h, a) if mask is None else grad_x.add_(_drop(grad_h @ a, mask, ctx.keep))
            grad_x = grad_x.view(x.shape)
        return grad_x, None, None, grad_a, grad_b, None, None


def _down(x: Tensor, a: Tensor, dropout: float) -> tuple[Tensor | None, Tensor]:
    """The mask (N, I) of what dropout left of ``x`` (N, I), none without it, and (N, r) the product with (I, r)."""
    mask = None
    if dropout > 0:
        x, mask = torch.native_dropout(x, dropout, True)
    return mask, x @ a


def layer_output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., O) of the layer itself, in a tensor of that shape: a view that leaves a Function may not be added to."""
    output = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    if bias is None:
        torch.mm(rows(x), weight.t(), out=rows(output))
    else:
        torch.addmm(bias.to(x.dtype), rows(x), weight.t(), out=rows(output))
    return output


def scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """B (O, r) times what the update is multiplied by, rounded once."""
    return (b * scaling).to(dtype)


def upright(factor: Tensor) -> Tensor:
    """The transpose of a factor. A CPU makes a kernel for each order of a second operand, in 0.2 to 1 ms for each
    number of tokens that it has not seen yet; laid anew, one serves forward and backward, A and B."""
    return factor.t().contiguous() if factor.device.type == "cpu" else factor.t()


def _of_factors(
    ctx: Any, g: Tensor, grad_h: Tensor, x: Tensor, mask: Tensor | None, h: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A (r, I) and of B (O, r), from those of the output (N, O) and of the product with A (N, r)."""
    grad_a = grad_h.t() @ _drop(x, mask, ctx.keep) if needs[0] else None
    # The thin factor on the left: a bfloat16 product with it takes two thirds of the time on a CPU.
    grad_b = (h.t() @ g).mul_(ctx.scaling).t() if needs[1] else None
    return grad_a, grad_b


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Dtypes as they are given; on the meta device, which has no autocast, nothing."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def rows(x: Tensor) -> Tensor:
    """(..., C) -> (N, C)."""
    return x.reshape(-1, x.shape[-1])


def _drop(x: Tensor, mask: Tensor | None, keep: float) -> Tensor:
    """What dropout made of ``x`` (N, I) in the forward pass, from its mask (N, I) of elements that stayed."""
    return x if mask is None else (x * mask).mul_(1 / keep)


def weight_norm(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The length of each output's weights once the update is added: ``‖W + scaling * B A‖`` over I, in float32.

    A constant to the gradient, as Liu et al. propose (DoRA, section 4.3, https://arxiv.org/abs/2402.09353).

    Args:
        weight: (O, I) the frozen weight.
        a, b: (r, I) and (O, r).
    Returns:
        (O,)
    """
    with torch.no_grad(), without_autocast(weight):
        updated = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
        length: Tensor = torch.linalg.vector_norm(updated, dim=1)
        return length


def dora_update(result: Tensor, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, scale: Tensor) -> Tensor:
    """The output of a linear layer whose weight is decomposed into length and direction.

    The decomposed weight is ``scale * (W + scaling * B A)`` with ``scale = magnitude / weight_norm`` per output
    (DoRA, eq. 5, https://arxiv.org/abs/2402.09353); this adds what it changes to ``result``.

    Args:
        result: (..., O) the layer's own output.
        base: (..., O) ``x Wᵀ`` without the bias.
        x: (..., I) the layer's input, dropped already.
        a, b: (r, I) and (O, r).
        scale: (O,) float32.
    Returns:
        (..., O) in the dtype of ``result``.
    """
    dtype = product_dtype(x, a)
    update = F.linear(F.linear(x.to(dtype), a.to(dtype)), b.to(dtype)) * scaling
    return (result + (scale - 1) * base + scale * update).to(result.dtype)
