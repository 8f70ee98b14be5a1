"""Frozen layers under adapters that read one input, as one function: queries, keys and values; a gate and its fellow.

    y_k = x W_kᵀ + bias_k + s_k x A_kᵀ B_kᵀ                              (ops.lora)

In:  the input, and of each layer what ``ops.lora.lora_linear`` takes. Out: the outputs of all layers.

One after another, each layer multiplies the input with its own A and makes a gradient of the input, which autograd adds
up. Here all A lie under each other: one product with the input, one of their gradients, one of what they give the
input; and what the weights give it is summed where it lies. Adapters with dropout each drop on their own.
"""

# N rows (all leading dimensions, flattened), I inputs, O_k outputs and r_k rank of layer k, R the sum of all ranks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from burnish.ops.lora import layer_output, rows, scaled, upright, without_autocast


class Adapted(NamedTuple):
    """A frozen layer and its adapter as numbers.

    Args:
        weight: (O, I); bias: (O,). a, b: (r, I) and (O, r). scaling, dropout: as ``lora_linear`` has them.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0


class AdaptedLayer(Protocol):
    """A layer that knows whether it is no more than that."""

    def adapted(self, x: Tensor) -> Adapted | None:
        """Its numbers, for an input (..., I); None where its answer is made in another way."""
        ...


def siblings(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """What each of the layers answers to ``x``; none of them has dropout.

    Args:
        x: (..., I) in the dtype of the weights.
    Returns:
        (..., O_k) of each layer k.
    """
    scalings = tuple(layer.scaling for layer in layers)
    numbers = (number for layer in layers for number in layer[:4])
    outputs: tuple[Tensor, ...] = _Siblings.apply(x, scalings, *numbers)  # type: ignore[no-untyped-call]
    return outputs


class _Siblings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: tuple[float, ...], *numbers: Any) -> tuple[Tensor, ...]:
        weights, biases, factors_a, factors_b = (numbers[kind::4] for kind in range(4))
        ctx.scalings, ctx.ranks = scalings, [len(a) for a in factors_a]
        with without_autocast(x):
            a = torch.cat(factors_a).to(x.dtype)  # (R, I)
            each_b = [scaled(b, scaling, x.dtype) for b, scaling in zip(factors_b, scalings, strict=True)]
            # Cut apart: over columns of a wider tensor a CPU would make other kernels than ``lora_linear`` has already.
            each_h = [h.contiguous() for h in torch.split(rows(x) @ upright(a), ctx.ranks, 1)]  # (N, r_k)
            outputs = tuple(layer_output(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
            for output, b, h in zip(outputs, each_b, each_h, strict=True):
                rows(output).addmm_(h, upright(b))
        ctx.save_for_backward(x, a, *weights, *each_b, *each_h)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, *more = ctx.saved_tensors
        weights, each_b, each_h = (more[begin : begin + len(grads)] for begin in range(0, len(more), len(grads)))
        upstream = [rows(grad) for grad in grads]  # (N, O_k)
        grad_h = torch.cat([g @ b for g, b in zip(upstream, each_b, strict=True)], 1)  # (N, R)
        of_a = torch.split(grad_h.t() @ rows(x), ctx.ranks)
        kept = zip(each_h, upstream, ctx.scalings, strict=True)
        of_b = [(h.t() @ g).mul_(scaling).t() for h, g, scaling in kept]  # the thin one on the left, as in ops.lora
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = upstream[0] @ weights[0]
            for g, weight in zip(upstream[1:], weights[1:], strict=True):
                grad_x.addmm_(g, weight)
            grad_x = grad_x.addmm_(grad_h, a).view(x.shape)
        of_numbers = (gradient for pair in zip(of_a, of_b, strict=True) for gradient in (None, None, *pair))
        return grad_x, None, *of_numbers


@contextmanager
def together(*layers: nn.Module) -> Iterator[None]:
    """Inside it, those of the layers that are adapted answer together when the first of them is asked.

    One that is then asked about another tensor, or once more, answers by itself.
    """
    adapted = [layer for layer in dict.fromkeys(layers) if hasattr(layer, "adapted") and "forward" not in vars(layer)]
    if len(adapted) < 2:
        yield
        return
    answers = _Answers(adapted)
    for layer in adapted:
        layer.forward = partial(answers.of, layer)
    try:
        yield
    finally:
        for layer in adapted:
            del layer.forward


class _Answers:
    """What the layers answered to the tensor that one of them was first asked about, until each is asked."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._asked: Tensor | None = None
        self._held: dict[nn.Module, Tensor] = {}

    def of(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self._asked is None:
            self._asked = x
            self._held = self._all(x)
        if x is self._asked and layer in self._held:
            return self._held.pop(layer)
        alone: Tensor = type(layer).forward(layer, x)
        return alone

    def _all(self, x: Tensor) -> dict[nn.Module, Tensor]:
        asked = [(layer, cast("AdaptedLayer", layer).adapted(x)) for layer in self._layers]
        alike = {layer: numbers for layer, numbers in asked if numbers is not None and _is_sibling(numbers, x)}
        if len(alike) < 2:
            return {}
        return dict(zip(alike, siblings(x, list(alike.values())), strict=True))


def _is_sibling(numbers: Adapted, x: Tensor) -> bool:
    """Not so a layer over another input, which shows in its width where that differs, nor one that drops by itself."""
    return numbers.weight.shape[1] == x.shape[-1] and not numbers.dropout
