"""The LoRA product: what a low-rank update adds to the output of a linear layer, whatever modules hold the weights.

    y = x Wᵀ + bias + scaling * dropout(x) Aᵀ Bᵀ          (Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685)

In:  modules that keep a layer and its factors under peft's names. Out: their forward pass, one of three:

- ``lora_linear``: the layer is a dense one that does not train. Its own product is made here too, so that the update is
  added to it where it lies, and the same to its input's gradient.
- ``joint_projections``: several such layers over one input (queries, keys and values; a gate and its fellow). All A lie
  under each other: one product with the input, one of their gradients, one of what they give the input.
- ``lora_update``: the layer answers by itself (quantized, trained, sharded, listened to), and the update is added.

What is more than this formula, DoRA say, is left to the module's own forward pass.

Written with torch's operations, each adapted layer keeps a dropped copy of its input for the backward pass, and a cast
one where dtypes differ: for q, k and v that is three times the very tensor the layers share. Here that tensor itself is
kept, the mask (one byte per element) and the product with A (r columns); the rest is computed again. ``plain=True`` is
the formula as written, for comparison and for double backward, which the others refuse.
"""

# N rows (all leading dimensions, flattened), I inputs, O outputs, r rank; of several layers O_k, r_k, and R the sum of
# all ranks

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from burnish.utils.patching import standing


class Adapted(NamedTuple):
    """The tensors of a frozen layer and its adapter.

    Args:
        weight: (O, I); bias: (O,). a, b: (r, I) and (O, r). scaling, dropout: as in ``lora_linear``.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0


def lora_update(
    result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0, *, plain: bool = False
) -> Tensor:
    """Add the low-rank update to the output of a linear layer.

    Args:
        result: (..., O) the layer's own output.
        x: (..., I) its input; any float type.
        a, b: (r, I) and (O, r) the factors.
        scaling: the factor of the update.
        dropout: the probability with which an element of ``x`` is zeroed on its way to A; 0 when not training. The
            mask is drawn from torch's global generator.
    Returns:
        (..., O) in the dtype of ``result``.
    """
    dtype = lora_dtype(x, a)
    a, b = a.to(dtype), b.to(dtype)
    if plain:
        update = F.linear(F.linear(F.dropout(x.to(dtype), dropout), a), b) * scaling
        return (result + update).to(result.dtype)
    updated: Tensor = _LoraUpdate.apply(result, x, a, b, scaling, dropout)  # type: ignore[no-untyped-call]
    return updated


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Compute ``x Wᵀ + bias + scaling * dropout(x) Aᵀ Bᵀ`` for a frozen layer: W and bias get no gradient.

    Args:
        x: (..., I) in the dtype of ``weight``, which is ``lora_dtype`` too.
        weight: (O, I)
        bias: (O,)
        a, b, scaling, dropout: as in ``lora_update``.
    Returns:
        (..., O)
    """
    output: Tensor = _LoraLinear.apply(x, weight, bias, a, b, scaling, dropout)  # type: ignore[no-untyped-call]
    return output


def lora_dtype(x: Tensor, a: Tensor) -> torch.dtype:
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
            # Written into a tensor of its final shape: a view that a Function returns may not be changed in place,
            # and some models do that (Falcon's parallel attention).
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
    """The dropout mask (N, I) of ``x`` (N, I), None without dropout, and (N, r) the product with (I, r)."""
    mask = None
    if dropout > 0:
        x, mask = torch.native_dropout(x, dropout, True)
    return mask, x @ a


def layer_output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., O) the layer's own output, in a tensor of that shape: a view that a Function returns may not be changed."""
    output = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    if bias is None:
        torch.mm(rows(x), weight.t(), out=rows(output))
    else:
        torch.addmm(bias.to(x.dtype), rows(x), weight.t(), out=rows(output))
    return output


def scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """B (O, r) times the scaling, rounded once."""
    return (b * scaling).to(dtype)


def upright(factor: Tensor) -> Tensor:
    """The transpose of a factor, copied to row-major order. A CPU compiles a kernel for each memory order of a second
    operand, in 0.2 to 1 ms for each new number of tokens; with the copy one kernel serves forward and backward, A and
    B."""
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
    """Switch autocast off, so that dtypes stay as given; on the meta device, which has no autocast, do nothing."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def rows(x: Tensor) -> Tensor:
    """(..., C) -> (N, C)."""
    return x.reshape(-1, x.shape[-1])


def _drop(x: Tensor, mask: Tensor | None, keep: float) -> Tensor:
    """``x`` (N, I) after the dropout of the forward pass, from its mask (N, I) of elements that stayed."""
    return x if mask is None else (x * mask).mul_(1 / keep)


# --- several layers over one input ------------------------------------------------------------------------------------


def joint_projections(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """Compute the outputs of all layers for ``x``; none of them has dropout.

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
            # Contiguous: for columns of a wider tensor a CPU would compile kernels that differ from ``lora_linear``'s.
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
        of_b = [(h.t() @ g).mul_(scaling).t() for h, g, scaling in kept]  # the thin factor on the left, as in ops.lora
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = upstream[0] @ weights[0]
            for g, weight in zip(upstream[1:], weights[1:], strict=True):
                grad_x.addmm_(g, weight)
            grad_x = grad_x.addmm_(grad_h, a).view(x.shape)
        of_numbers = (gradient for pair in zip(of_a, of_b, strict=True) for gradient in (None, None, *pair))
        return grad_x, None, *of_numbers


# --- modules that hold the weights ------------------------------------------------------------------------------------


class LoraModule(Protocol):
    """Attributes that are read of a module: peft's names."""

    base_layer: Any
    lora_A: Mapping[str, Any]
    lora_B: Mapping[str, Any]
    lora_dropout: Mapping[str, nn.Module]
    scaling: Mapping[str, float]
    lora_variant: Mapping[str, Any]
    active_adapters: Sequence[str]
    disable_adapters: bool
    merged: bool
    training: bool


class LoraForward:
    """The forward pass of a module that holds a linear layer and its factors."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.together: Together | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = cast(LoraModule, self.layer)
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        is_more = args or kwargs or layer.merged or any(name in layer.lora_variant for name in names)
        if is_more or layer.disable_adapters:
            return type(self.layer).forward(self.layer, x, *args, **kwargs)  # type: ignore[no-any-return]
        if self.together is not None and (answer := self.together.answer(self, x)) is not None:
            return answer
        product = self.product(x, names)
        if product is not None:
            return lora_linear(x, *product)
        result: Tensor = layer.base_layer(x)
        for name in names:
            a, b = layer.lora_A[name], layer.lora_B[name]
            result = lora_update(result, x, a.weight, b.weight, layer.scaling[name], self._dropout(name))
            if b.bias is not None:
                result = result + (b.bias * layer.scaling[name]).to(result.dtype)
        return result

    def product(self, x: Tensor, names: Sequence[str]) -> Adapted | None:
        """Layer and adapter as numbers, where they are nothing but ``lora_linear``: one adapter over a dense layer that
        does not train, with nobody listening to it; and all numbers in the format of the product."""
        layer = cast(LoraModule, self.layer)
        if len(names) != 1 or not _is_frozen_product(layer.base_layer):
            return None
        a, b = layer.lora_A[names[0]], layer.lora_B[names[0]]
        weight: Tensor = layer.base_layer.weight
        if b.bias is not None or not x.dtype == weight.dtype == lora_dtype(x, a.weight):
            return None
        bias: Tensor | None = layer.base_layer.bias
        return Adapted(weight, bias, a.weight, b.weight, layer.scaling[names[0]], self._dropout(names[0]))

    def numbers(self, x: Tensor) -> Adapted | None:
        """``product`` of the adapter in use; None where the module answers by its own code."""
        layer = cast(LoraModule, self.layer)
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        is_more = layer.merged or layer.disable_adapters or any(name in layer.lora_variant for name in names)
        return None if is_more else self.product(x, names)

    def _dropout(self, name: str) -> float:
        dropout = cast(LoraModule, self.layer).lora_dropout[name]
        return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


@contextmanager
def together(*layers: nn.Module) -> Iterator[None]:
    """Inside it, those of the layers that hold factors answer together when the first of them is asked.

    A layer that is called with another tensor, or a second time, computes its output by itself.
    """
    found = [standing(layer, "forward", LoraForward) for layer in dict.fromkeys(layers)]
    adapted = [forward for forward in found if forward is not None]
    answers = Together(adapted) if len(adapted) > 1 else None
    for forward in adapted:
        forward.together = answers
    try:
        yield
    finally:
        for forward in adapted:
            forward.together = None


class Together:
    """Results of sibling layers for the tensor that one of them was first asked about, until each is asked."""

    def __init__(self, forwards: Sequence[LoraForward]) -> None:
        self._forwards = forwards
        self._asked: Tensor | None = None
        self._held: dict[LoraForward, Tensor] = {}

    def answer(self, forward: LoraForward, x: Tensor) -> Tensor | None:
        if self._asked is None:
            self._asked = x
            self._held = self._all(x)
        return self._held.pop(forward, None) if x is self._asked else None

    def _all(self, x: Tensor) -> dict[LoraForward, Tensor]:
        asked = [(forward, forward.numbers(x)) for forward in self._forwards]
        alike = {forward: numbers for forward, numbers in asked if numbers is not None and _is_joint(numbers, x)}
        if len(alike) < 2:
            return {}
        return dict(zip(alike, joint_projections(x, list(alike.values())), strict=True))


def _is_joint(numbers: Adapted, x: Tensor) -> bool:
    """Return whether a layer may be joined: its input width fits ``x``, and it has no dropout."""
    return numbers.weight.shape[1] == x.shape[-1] and not numbers.dropout


def _is_frozen_product(layer: nn.Module) -> bool:
    """Return whether ``layer`` is torch's own linear layer over a plain frozen tensor, without hooks (such as one that
    gathers a sharded weight). A quantized or distributed weight has a class of its own."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    is_frozen = not any(parameter.requires_grad for parameter in layer.parameters())
    return is_frozen and type(layer.weight) in (Tensor, nn.Parameter) and not any(hooks)


def holds_factors(module: Any) -> bool:
    """Tell whether ``module`` holds a linear layer and plain factors, and its class computes the formula of them."""
    factors = getattr(module, "lora_A", None)
    if not isinstance(factors, nn.ModuleDict) or not isinstance(getattr(module, "lora_B", None), nn.ModuleDict):
        return False
    is_plain = bool(factors) and all(type(each) is nn.Linear for each in (*factors.values(), *module.lora_B.values()))
    return (
        is_plain and isinstance(getattr(module, "base_layer", None), nn.Module) and _computes_the_formula(type(module))  # type: ignore[arg-type]
    )


@cache
def _computes_the_formula(kind: Any) -> bool:
    """Tell whether modules of a class answer what ``LoraForward`` does; asked with a small layer in their place. The
    random numbers of a run are the same afterwards, whether or not the class was asked before."""
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        down, up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3)
        module.base_layer, module.training = nn.Linear(4, 3), False
        module.lora_A, module.lora_B = nn.ModuleDict({"x": down}), nn.ModuleDict({"x": up})
        module.lora_dropout, module.scaling = nn.ModuleDict({"x": nn.Identity()}), {"x": 0.5}
        vars(module).update(_ASKED)
        x = torch.randn(2, 4)
        try:
            said = module(x)
        except (AttributeError, KeyError, TypeError, RuntimeError, NotImplementedError):
            return False
        return torch.allclose(said, LoraForward(module).forward(x), atol=1e-6)


_ASKED: dict[str, Any] = {
    "merged_adapters": [], "lora_variant": {}, "_disable_adapters": False, "_active_adapter": "x",
    "cast_input_dtype_enabled": True, "kwargs": {}, "fan_in_fan_out": False, "_caches": {},
}  # fmt: skip
"""Other attributes of a module of peft's."""
