"""Lets a model's norms and gated layers go through ``ops.elementwise``; on a CPU its activations too, and its linear
layers through ``ops.cast_linear``; on a GPU its rotary positions through ``ops.rotary``.

In: a loaded model. Out: the same model; the modules that were proven to compute what burnish's functions compute do so
through them. Modules are found by their structure, never by their class's name, and each is asked first: it and the
function get the same random input and must answer the same. Weights, names of weights, hooks and wrapped linear layers
(LoRA, quantised) stay as they are; a module on a device for which there is nothing faster runs its own code, and what
was replaced before, by Liger say, stays replaced. Adapters over gate and up share their products
(``ops.lora_siblings``), on a CPU those over queries, keys and values too.
"""

# H hidden size, I size of an input, O size of an output

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from burnish.ops.cast_linear import cast_linear
from burnish.ops.elementwise import ACTIVATIONS, activated, gains, gated, rms_norm
from burnish.ops.kernels import kernels_of
from burnish.ops.lora_siblings import together
from burnish.ops.probe import REFUSALS
from burnish.ops.rotary import rotate, turns_alike

_TOLERANCE = 1e-5  # of the greatest value, in float32
_EPSILONS = ("variance_epsilon", "eps")


def fuse(model: nn.Module) -> list[nn.Module]:
    """Replace the forward passes that can be; the modules whose were. No random number of the run is drawn for it."""
    found: list[nn.Module] = []
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if device.type != "cpu" and kernels_of(device) is None:
        return found
    of_device = _OF_CPU if device.type == "cpu" else _OF_GPU
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            ways = (way(module) for way in of_device if "forward" not in vars(module))
            forward = next((way for way in ways if way is not None), None)
            if forward is not None:
                module.forward = MethodType(forward, module)
                found.append(module)
    return found


def give_back(modules: Iterable[nn.Module]) -> None:
    """Undo ``fuse``."""
    for module in modules:
        del module.forward


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of a root mean square norm: a module with a vector of weights, and nothing else but an eps."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.ndim != 1 or _eps(module) is None:
        return None
    weight = 1 + torch.rand(module.weight.shape)  # type: ignore[arg-type]
    x = torch.randn(3, len(weight))
    for forward, offset in ((_plain_norm, 0.0), (_offset_norm, 1.0)):
        if _same(lambda: functional_call(module, {"weight": weight}, (x,)), rms_norm(x, weight, _eps(module), offset)):  # type: ignore[arg-type]
            return forward
    return None


def _eps(module: Any) -> float | None:
    return next((getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)


def _plain_norm(module: Any, hidden_states: Tensor) -> Tensor:
    return _normed(module, hidden_states, 0.0)


def _offset_norm(module: Any, hidden_states: Tensor) -> Tensor:
    return _normed(module, hidden_states, 1.0)


def _normed(module: Any, x: Tensor, offset: float) -> Tensor:
    if not gains(x):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return rms_norm(x, module.weight, _eps(module), offset)  # type: ignore[arg-type]


# --- gated layers -----------------------------------------------------------------------------------------------------

_PARTS = ["act_fn", "down_proj", "gate_proj", "up_proj"]


def _gated_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of ``down(activation(gate(x)) * up(x))``: a module with these four parts and no weights beside.

    It is asked with its linear layers replaced by three simple functions, so that what they are does not matter.
    """
    if sorted(name for name, _ in module.named_children()) != _PARTS or list(module.parameters(recurse=False)):
        return None
    x = torch.randn(3, 8)
    stand_in = type(module).__new__(type(module))
    nn.Module.__init__(stand_in)
    vars(stand_in).update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    stand_in.act_fn = module.act_fn
    stand_in.gate_proj, stand_in.up_proj, stand_in.down_proj = _Times(2.0), _Times(3.0), _Times(5.0)
    for name in ACTIVATIONS:
        if _same(lambda: type(module).forward(stand_in, x), 5 * activated(2 * x, name) * (3 * x)):
            return _FORWARDS[name]
    return None


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _gated_with(activation: str) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        if not gains(x):
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        with together(module.gate_proj, module.up_proj):
            gate, up = module.gate_proj(x), module.up_proj(x)
        projected: Tensor = module.down_proj(gated(gate, up, activation))
        return projected

    return forward


_FORWARDS = {name: _gated_with(name) for name in ACTIVATIONS}


# --- queries, keys and values ---------------------------------------------------------------------------------------

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _attention_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward pass of a module in which adapters lie over several of these parts: its own, inside of which they
    answer together. Whether they are asked about one tensor is seen when they are; so it is not asked before."""
    parts = [getattr(module, name, None) for name in _PROJECTIONS]
    return _attended if sum(hasattr(part, "adapted") for part in parts) > 1 else None


def _attended(module: Any, *args: Any, **kwargs: Any) -> Any:
    with together(*(getattr(module, name) for name in _PROJECTIONS)):
        return type(module).forward(module, *args, **kwargs)


# --- linear layers ----------------------------------------------------------------------------------------------------


def _linear_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of torch's own linear layer, which needs not be asked what it computes, or of one whose weights
    lie the other way round (GPT-2's); where its weights train, since frozen ones are loaded in the format of the
    products."""
    if type(module) is nn.Linear:
        return _projected if module.weight.requires_grad else None
    return _projected_by_transposed if _is_transposed(module) else None


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is a weight (I, O) that trains and a bias (O,), and answers what they make: x W + b. It is asked with
    its own weights; where these are zero the answer says nothing."""
    own = dict(module.named_parameters())
    if list(own) != ["weight", "bias"] or own["weight"].ndim != 2 or own["weight"].shape[1:] != own["bias"].shape:
        return False
    weight, bias = own["weight"].detach(), own["bias"].detach()
    x = torch.randn(3, len(weight)).to(weight)
    is_telling = weight.device.type == "cpu" and own["weight"].requires_grad and bool(weight.any())
    return is_telling and _same(lambda: module(x), torch.addmm(bias, x, weight))


def _projected(module: Any, input: Tensor) -> Tensor:
    if (dtype := _narrower(module, input)) is not None:
        return cast_linear(input, module.weight, module.bias, dtype)
    return F.linear(input, module.weight, module.bias)


def _projected_by_transposed(module: Any, x: Tensor) -> Tensor:
    if (dtype := _narrower(module, x)) is not None:
        return cast_linear(x, module.weight, module.bias, dtype, is_transposed=True)
    return type(module).forward(module, x)  # type: ignore[no-any-return]


def _narrower(module: Any, input: Tensor) -> torch.dtype | None:
    """The format into which autocast on a CPU would copy the weights, to be kept for a backward pass. Without one
    nothing is kept, and autocast's copies serve all tokens of an answer."""
    if not (input.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()):
        return None
    dtype = torch.get_autocast_dtype("cpu")
    return dtype if module.weight.dtype != dtype else None


# --- rotary positions -------------------------------------------------------------------------------------------------

_ROTATE = "apply_rotary_pos_emb"
"""What transformers calls the function that turns queries and keys, in each of its model files that has one."""


def _rotating_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward pass of a module that calls the function of that name in its class's file: its own, during which the
    name means burnish's."""
    kind = type(module)
    names = vars(sys.modules[kind.__module__])
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    own = names.get(_ROTATE)
    if own is None or code is None or _ROTATE not in code.co_names:
        return None
    try:
        return _rotating_with(own, names) if turns_alike(own) else None
    except REFUSALS:
        return None


def _rotating_with(own: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
        made = None if arguments or named else rotate(q, k, cos, sin)
        return own(q, k, cos, sin, *arguments, **named) if made is None else made

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        names[_ROTATE] = turn
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            names[_ROTATE] = own

    return forward


# --- activations ------------------------------------------------------------------------------------------------------


def _activation_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward pass of an activation that is written out in several operations (GPT-2's): one operation of torch.

    It is a module with nothing of its own, and none of torch's, which are one operation each.
    """
    has_state = any(not name.startswith("_") and name != "training" for name in vars(module))
    if has_state or type(module).__module__.startswith("torch.") or list(module.children()) or module.state_dict():
        return None
    x = torch.linspace(-4, 4, 33)
    for name, forward in _ACTIVATED.items():
        if _same(lambda: module(x), activated(x, name)):
            return forward
    return None


def _activated_with(activation: str) -> Callable[..., Tensor]:
    def forward(module: Any, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        return activated(input, activation)

    return forward


_ACTIVATED = {name: _activated_with(name) for name in ("gelu", "gelu_tanh")}


_OF_CPU = (_norm_of, _gated_of, _attention_of, _activation_of, _linear_of)
_OF_GPU = (_norm_of, _gated_of, _rotating_of)


def _same(plain: Callable[[], Any], ours: Tensor) -> bool:
    """Whether a module answers as burnish's function does; one that does not take the question does not."""
    try:
        with torch.no_grad():
            said = plain()
    except REFUSALS:
        return False
    is_alike = isinstance(said, Tensor) and said.shape == ours.shape
    return is_alike and bool((said - ours).abs().max() <= _TOLERANCE * ours.abs().max())
