"""The LoRA product: the low-rank update of a linear layer's output, independent of the modules that hold the weights.

    y = x Wᵀ + bias + scaling * dropout(x) Aᵀ Bᵀ          (Hu et al. 2021, section 4.1,
    https://arxiv.org/abs/2106.09685)

In:  modules with a layer and its factors under peft's names. Out: their forward pass, one of three:

- ``lora_linear``: for a frozen dense layer. The layer's own product is computed here as well, so that the update is
  added in place, and likewise for the input's gradient.
- ``joint_projections``: for several such layers with the same input (queries, keys and values; gate and up). All A are
  concatenated, so that there is one product each with the input, for their gradients, and for the input's gradient.
- ``lora_update``: for any other layer (quantized, trained, sharded, with hooks). Its own forward pass is called, and
  the update is added.

Variants of the formula, such as DoRA, use the module's own forward pass.

With torch operations each adapted layer keeps a copy of its input after dropout for the backward pass, and a converted
copy if dtypes differ. For q, k and v these are three copies of the input that they share. Here only the shared input is
kept, with the dropout mask (one byte per element) and the product with A (r columns). The rest is recomputed.
``plain=True`` computes the formula with torch operations, for comparison and for double backward, which the others do
not support.
"""

# N rows (all leading dimensions, flattened), I inputs, O outputs, r rank; O_k, r_k of layer k, and R the sum of all
# ranks

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from burnish.utils.patching import installed_hook


class LoraTensors(NamedTuple):
    """The tensors of a frozen layer and its adapter.

    Args:
        weight: (O, I).
        bias: (O,).
        a: (r, I).
        b: (O, r).
        scaling, dropout: as in ``lora_linear``.
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
        x: (..., I) its input; any float dtype.
        a, b: (r, I) and (O, r) the factors.
        scaling: factor of the update.
        dropout: probability with which an element of ``x`` is zeroed before A; 0 when not training. The mask is drawn
            from torch's global generator.
        plain: whether to use torch operations.
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
        x: (..., I) in the dtype of ``weight``, which must equal ``lora_dtype``.
        weight: (O, I)
        bias: (O,)
        a, b, scaling, dropout: as in ``lora_update``.
    Returns:
        (..., O)
    """
    output: Tensor = _LoraLinear.apply(x, weight, bias, a, b, scaling, dropout)  # type: ignore[no-untyped-call]
    return output


def lora_dtype(x: Tensor, a: Tensor) -> torch.dtype:
    """The dtype of the product: autocast's if enabled, else that of the factors.

    So float32 factors of a frozen bfloat16 base are trained in float32.
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
            # Written into a tensor of its final shape, because a view returned by a Function may not be changed in
            # place, and some models do that (Falcon's parallel attention).
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
        grad_a, grad_b = _factor_gradients(ctx, g, grad_h, rows(x).to(a.dtype), mask, h, needs)
        grad_x = _drop(grad_h @ a, mask, ctx.keep).to(x.dtype).view(x.shape) if needs_x else None
        return grad, grad_x, grad_a, grad_b, None, None


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropout: float
    ) -> Tensor:
        with without_autocast(x):
            a, b = a.to(x.dtype), scale_factor(b, scaling, x.dtype)
            mask, h = _down(rows(x), row_major_transpose(a), dropout)
            output = layer_output(x, weight, bias)
            rows(output).addmm_(h, row_major_transpose(b))
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
        grad_a, grad_b = _factor_gradients(ctx, g, grad_h, rows(x), mask, h, needs)
        grad_x = None
        if needs_x:
            grad_x = g @ weight
            grad_x = grad_x.addmm_(grad_h, a) if mask is None else grad_x.add_(_drop(grad_h @ a, mask, ctx.keep))
            grad_x = grad_x.view(x.shape)
        return grad_x, None, None, grad_a, grad_b, None, None


def _down(x: Tensor, a: Tensor, dropout: float) -> tuple[Tensor | None, Tensor]:
    """The dropout mask (N, I) of ``x`` (N, I), or None without dropout, and (N, r) the product with (I, r)."""
    mask = None
    if dropout > 0:
        x, mask = torch.native_dropout(x, dropout, True)
    return mask, x @ a


def layer_output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., O) the layer's own output as a new tensor, because a view returned by a Function may not be changed in
    place."""
    output = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    if bias is None:
        torch.mm(rows(x), weight.t(), out=rows(output))
    else:
        torch.addmm(bias.to(x.dtype), rows(x), weight.t(), out=rows(output))
    return output


def scale_factor(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """B (O, r) times the scaling, rounded once."""
    return (b * scaling).to(dtype)


def row_major_transpose(factor: Tensor) -> Tensor:
    """The transpose of a factor, copied to row-major order on a CPU. A CPU compiles a kernel for each memory order of
    the second operand, in 0.2 to 1 ms for each new number of tokens. With the copy one kernel serves forward and
    backward, A and B.
    """
    return factor.t().contiguous() if factor.device.type == "cpu" else factor.t()


def _factor_gradients(
    ctx: Any, g: Tensor, grad_h: Tensor, x: Tensor, mask: Tensor | None, h: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A (r, I) and of B (O, r), from those of the output (N, O) and of the product with A (N, r)."""
    grad_a = grad_h.t() @ _drop(x, mask, ctx.keep) if needs[0] else None
    # The thin factor is the left operand, because a bfloat16 product then takes two thirds of the time on a CPU.
    grad_b = (h.t() @ g).mul_(ctx.scaling).t() if needs[1] else None
    return grad_a, grad_b


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, so that dtypes do not change. Does nothing on the meta device, which has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def rows(x: Tensor) -> Tensor:
    """(..., C) -> (N, C)."""
    return x.reshape(-1, x.shape[-1])


def _drop(x: Tensor, mask: Tensor | None, keep: float) -> Tensor:
    """Apply the dropout of the forward pass to ``x`` (N, I), using its mask (N, I) of kept elements."""
    return x if mask is None else (x * mask).mul_(1 / keep)


# --- several layers over one input ------------------------------------------------------------------------------------


def joint_projections(x: Tensor, layers: Sequence[LoraTensors]) -> tuple[Tensor, ...]:
    """Compute the outputs of all layers for ``x``, without dropout.

    Args:
        x: (..., I) in the dtype of the weights.
    Returns:
        (..., O_k) of each layer k.
    """
    scalings = tuple(layer.scaling for layer in layers)
    tensors = (tensor for layer in layers for tensor in layer[:4])
    outputs: tuple[Tensor, ...] = _JointProjections.apply(x, scalings, *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _JointProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: tuple[float, ...], *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases, factors_a, factors_b = (tensors[kind::4] for kind in range(4))
        ctx.scalings, ctx.ranks = scalings, [len(a) for a in factors_a]
        with without_autocast(x):
            a = torch.cat(factors_a).to(x.dtype)  # (R, I)
            each_b = [scale_factor(b, scaling, x.dtype) for b, scaling in zip(factors_b, scalings, strict=True)]
            # Contiguous: for columns of a wider tensor a CPU would use other kernels than for ``lora_linear``.
            each_h = [h.contiguous() for h in torch.split(rows(x) @ row_major_transpose(a), ctx.ranks, 1)]  # (N, r_k)
            outputs = tuple(layer_output(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
            for output, b, h in zip(outputs, each_b, each_h, strict=True):
                rows(output).addmm_(h, row_major_transpose(b))
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
        pairs = zip(each_h, upstream, ctx.scalings, strict=True)
        # The thin factor is the left operand, as in _factor_gradients.
        of_b = [(h.t() @ g).mul_(scaling).t() for h, g, scaling in pairs]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = upstream[0] @ weights[0]
            for g, weight in zip(upstream[1:], weights[1:], strict=True):
                grad_x.addmm_(g, weight)
            grad_x = grad_x.addmm_(grad_h, a).view(x.shape)
        of_tensors = (gradient for pair in zip(of_a, of_b, strict=True) for gradient in (None, None, *pair))
        return grad_x, None, *of_tensors


# --- modules that hold the weights ------------------------------------------------------------------------------------


class LoraModule(Protocol):
    """Attributes of a module with an adapter; peft's names."""

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
    """The forward pass of a module with a linear layer and low-rank factors."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.joint_outputs: JointOutputs | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = cast(LoraModule, self.layer)
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        needs_own_forward = args or kwargs or layer.merged or any(name in layer.lora_variant for name in names)
        if needs_own_forward or layer.disable_adapters:
            return type(self.layer).forward(self.layer, x, *args, **kwargs)  # type: ignore[no-any-return]
        if self.joint_outputs is not None and (output := self.joint_outputs.take(self, x)) is not None:
            return output
        tensors = self.tensors(x, names)
        if tensors is not None:
            return lora_linear(x, *tensors)
        result: Tensor = layer.base_layer(x)
        for name in names:
            a, b = layer.lora_A[name], layer.lora_B[name]
            result = lora_update(result, x, a.weight, b.weight, layer.scaling[name], self._dropout(name))
            if b.bias is not None:
                result = result + (b.bias * layer.scaling[name]).to(result.dtype)
        return result

    def tensors(self, x: Tensor, names: Sequence[str]) -> LoraTensors | None:
        """The tensors of layer and adapter, if ``lora_linear`` applies: one adapter on a frozen dense layer without
        hooks, and all tensors in the dtype of the product. Otherwise None.
        """
        layer = cast(LoraModule, self.layer)
        if len(names) != 1 or not _is_frozen_linear(layer.base_layer):
            return None
        a, b = layer.lora_A[names[0]], layer.lora_B[names[0]]
        weight: Tensor = layer.base_layer.weight
        if b.bias is not None or not x.dtype == weight.dtype == lora_dtype(x, a.weight):
            return None
        bias: Tensor | None = layer.base_layer.bias
        return LoraTensors(weight, bias, a.weight, b.weight, layer.scaling[names[0]], self._dropout(names[0]))

    def active_tensors(self, x: Tensor) -> LoraTensors | None:
        """``tensors`` of the active adapter. None if the module's own forward pass is needed."""
        layer = cast(LoraModule, self.layer)
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        needs_own_forward = layer.merged or layer.disable_adapters or any(name in layer.lora_variant for name in names)
        return None if needs_own_forward else self.tensors(x, names)

    def _dropout(self, name: str) -> float:
        dropout = cast(LoraModule, self.layer).lora_dropout[name]
        return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


@contextmanager
def computed_jointly(*layers: nn.Module) -> Iterator[None]:
    """Context in which several adapted layers are computed together when the first of them is called.

    A layer that is called with another input, or a second time, computes its output separately.
    """
    found = [installed_hook(layer, "forward", LoraForward) for layer in dict.fromkeys(layers)]
    adapted = [forward for forward in found if forward is not None]
    outputs = JointOutputs(adapted) if len(adapted) > 1 else None
    for forward in adapted:
        forward.joint_outputs = outputs
    try:
        yield
    finally:
        for forward in adapted:
            forward.joint_outputs = None


class JointOutputs:
    """Outputs of sibling layers for the input of the first call, stored until each layer is called."""

    def __init__(self, forwards: Sequence[LoraForward]) -> None:
        self._forwards = forwards
        self._input: Tensor | None = None
        self._outputs: dict[LoraForward, Tensor] = {}

    def take(self, forward: LoraForward, x: Tensor) -> Tensor | None:
        """The output of a layer for ``x``, once; None if it must be computed separately."""
        if self._input is None:
            self._input = x
            self._outputs = self._compute(x)
        return self._outputs.pop(forward, None) if x is self._input else None

    def _compute(self, x: Tensor) -> dict[LoraForward, Tensor]:
        tensors_of = [(forward, forward.active_tensors(x)) for forward in self._forwards]
        alike = {forward: tensors for forward, tensors in tensors_of if tensors is not None and _is_joint(tensors, x)}
        if len(alike) < 2:
            return {}
        return dict(zip(alike, joint_projections(x, list(alike.values())), strict=True))


def _is_joint(tensors: LoraTensors, x: Tensor) -> bool:
    """Whether a layer can be computed jointly: its input width matches ``x``, and it has no dropout."""
    return tensors.weight.shape[1] == x.shape[-1] and not tensors.dropout


def _is_frozen_linear(layer: nn.Module) -> bool:
    """Whether ``layer`` is torch's linear layer with a plain frozen tensor and without hooks (such as one that gathers
    a sharded weight). A quantized or distributed weight has its own class.
    """
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    is_frozen = not any(parameter.requires_grad for parameter in layer.parameters())
    return is_frozen and type(layer.weight) in (Tensor, nn.Parameter) and not any(hooks)


def is_plain_lora_layer(module: Any) -> bool:
    """Whether ``module`` has a linear layer and plain factors, and its class computes the plain formula."""
    factors = getattr(module, "lora_A", None)
    if not isinstance(factors, nn.ModuleDict) or not isinstance(getattr(module, "lora_B", None), nn.ModuleDict):
        return False
    is_plain = bool(factors) and all(type(each) is nn.Linear for each in (*factors.values(), *module.lora_B.values()))
    return (
        is_plain and isinstance(getattr(module, "base_layer", None), nn.Module) and _computes_plain_lora(type(module))  # type: ignore[arg-type]
    )


@cache
def _computes_plain_lora(kind: Any) -> bool:
    """Whether a class computes the same as ``LoraForward``, tested with a small layer. The random state does not
    change, whether or not the result is cached.
    """
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        down, up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3)
        module.base_layer, module.training = nn.Linear(4, 3), False
        module.lora_A, module.lora_B = nn.ModuleDict({"x": down}), nn.ModuleDict({"x": up})
        module.lora_dropout, module.scaling = nn.ModuleDict({"x": nn.Identity()}), {"x": 0.5}
        vars(module).update(_PEFT_ATTRIBUTES)
        x = torch.randn(2, 4)
        try:
            output = module(x)
        except (AttributeError, KeyError, TypeError, RuntimeError, NotImplementedError):
            return False
        return torch.allclose(output, LoraForward(module).forward(x), atol=1e-6)


_PEFT_ATTRIBUTES: dict[str, Any] = {
    "merged_adapters": [], "lora_variant": {}, "_disable_adapters": False, "_active_adapter": "x",
    "cast_input_dtype_enabled": True, "kwargs": {}, "fan_in_fan_out": False, "_caches": {},
}  # fmt: skip
"""Other attributes of peft's modules."""
