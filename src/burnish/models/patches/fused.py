"""Patches of a model's forward passes: on a CPU, norms, gated layers and activations run ``kernels.elementwise``,
linear layers run ``kernels.cpu.cast_linear``, patch embeddings are matrix multiplications, and rotary positions of a
vision tower run ``rotation.py``; on any device, adapted layers run ``kernels.lora``.

In: a loaded model. Out: the same model, in which modules are replaced by burnish's functions that compute the same.
Modules are recognized by their structure, never by class name, and tested: for the same random input, the outputs must
be equal. Weights, their names, hooks and wrapped linear layers (LoRA, quantized) are unchanged. A module keeps its own
code on devices without a faster function, and existing patches, such as Liger's, are kept. Adapters on gate and up
share their products (``kernels.lora``), as do those on queries, keys and values.
"""

# H hidden size, I size of an input, O size of an output

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from burnish.kernels.cpu.cast_linear import cast_linear
from burnish.kernels.elementwise import ACTIVATIONS, apply_activation, gate_product, is_faster, rms_norm
from burnish.kernels.lora import LoraForward, computed_jointly, is_plain_lora_layer
from burnish.kernels.probe import REFUSALS
from burnish.models.patches.rotation import ROTATION, patch_rotations
from burnish.utils.patching import Patch, PatchOptions, Reason, allows_patch, patch

_TOLERANCE = 1e-5  # relative to the maximum, in float32
_EPSILONS = ("variance_epsilon", "eps")


NORM = Reason("norm", "computed in one pass, a few rows at a time, and rounded once")
GATED = Reason("gated layer", "the gate activation and its product with the up projection are computed in one pass")
ACTIVATION = Reason("activation", "computed in one operation instead of several")
LINEAR = Reason("linear layer", "no bfloat16 copy of its weights is kept for the backward pass")
EMBEDDING = Reason(
    "patch embedding", "the convolution of non-overlapping patches is computed as a matrix multiplication"
)
ATTENTION = Reason("attention layer", "the adapters on queries, keys and values share their input")
ADAPTED = Reason(
    "adapted layer",
    "the base layer and the LoRA update are computed in one matrix multiplication, and the input is saved once",
)

Replacement = tuple[Callable[[nn.Module], Callable[..., Any]], Reason] | None
"""A function that creates the forward pass of a module, and the reason for the patch. None if there is none."""

_ALL_PATCHES = PatchOptions()


def forwards_of(
    model: nn.Module, device: torch.device, options: PatchOptions = _ALL_PATCHES
) -> list[tuple[nn.Module, Callable[[nn.Module], Callable[..., Any]], Reason]]:
    """The modules whose forward pass can be replaced, with the function that creates the new one, and the reason. Does
    not change the run's random state.

    Args:
        model: may have no weights (meta device).
        device: the device on which it will run.
        options: options that disable patches.
    """
    found = []
    of_device = (*_FOR_ANY_DEVICE, *(_FOR_CPU if device.type == "cpu" else ()))
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            answers = (make(module) for make in of_device if "forward" not in vars(module))
            answer = next((answer for answer in answers if answer is not None), None)
            if answer is not None and allows_patch(options, answer[1]):
                found.append((module, *answer))
    return found


def _method(forward: Callable[..., Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """A function that makes ``forward(module, ...)`` a method of a module."""
    return partial(MethodType, forward)


def patch_forwards(
    model: nn.Module, options: PatchOptions = _ALL_PATCHES, device: torch.device | None = None
) -> list[Patch]:
    """Replace all forward passes that can be replaced.

    Args:
        options: options that disable patches.
        device: the device on which the model will run, if it is not there yet.
    """
    device = device or next((weight.device for weight in model.parameters()), torch.device("cpu"))
    forwards = forwards_of(model, device, options)
    made = [patch(module, "forward", forward(module), why) for module, forward, why in forwards]
    return made + (patch_rotations(model) if device.type == "cpu" and allows_patch(options, ROTATION) else [])


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm_of(module: nn.Module) -> Replacement:
    """The forward pass of an RMS norm: a module with only a weight vector and an eps."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.weight.ndim != 1 or _eps(module) is None or not _takes_one_input(module):
        return None
    weight = 1 + torch.rand(module.weight.shape)  # type: ignore[arg-type]
    x = torch.randn(3, len(weight))
    for forward, offset in ((_plain_norm, 0.0), (_offset_norm, 1.0)):
        fused = rms_norm(x, weight, _eps(module), offset)  # type: ignore[arg-type]
        if _gives_same_output(lambda: functional_call(module, {"weight": weight}, (x,)), fused):
            return _method(forward), NORM
    return None


def _takes_one_input(module: nn.Module) -> bool:
    """Whether the forward pass has a single argument. A gated norm, for example, has a second, optional one."""
    return len(signature(module.forward).parameters) == 1


def _eps(module: Any) -> float | None:
    return next((getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)


def _plain_norm(module: Any, hidden_states: Tensor) -> Tensor:
    return _normalize(module, hidden_states, 0.0)


def _offset_norm(module: Any, hidden_states: Tensor) -> Tensor:
    return _normalize(module, hidden_states, 1.0)


def _normalize(module: Any, x: Tensor, offset: float) -> Tensor:
    if not is_faster(x):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return rms_norm(x, module.weight, _eps(module), offset)  # type: ignore[arg-type]


# --- gated layers -----------------------------------------------------------------------------------------------------

_PARTS = ["act_fn", "down_proj", "gate_proj", "up_proj"]


def _gated_forward(module: nn.Module) -> Replacement:
    """The forward pass of ``down(activation(gate(x)) * up(x))``: a module with only these four parts.

    For the test, its linear layers are replaced by three simple functions, so their type does not matter.
    """
    if sorted(name for name, _ in module.named_children()) != _PARTS or list(module.parameters(recurse=False)):
        return None
    if not _takes_one_input(module):
        return None
    x = torch.randn(3, 8)
    stand_in = type(module).__new__(type(module))
    nn.Module.__init__(stand_in)
    vars(stand_in).update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    stand_in.act_fn = module.act_fn
    stand_in.gate_proj, stand_in.up_proj, stand_in.down_proj = _Scaled(2.0), _Scaled(3.0), _Scaled(5.0)
    for name in ACTIVATIONS:
        if _gives_same_output(lambda: type(module).forward(stand_in, x), 5 * apply_activation(2 * x, name) * (3 * x)):
            return _method(_FORWARDS[name]), GATED
    return None


class _Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _gated_kernel(activation: str) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        if not is_faster(x):
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        with computed_jointly(module.gate_proj, module.up_proj):
            gate, up = module.gate_proj(x), module.up_proj(x)
        projected: Tensor = module.down_proj(gate_product(gate, up, activation))
        return projected

    return forward


_FORWARDS = {name: _gated_kernel(name) for name in ACTIVATIONS}


# --- low-rank updates -------------------------------------------------------------------------------------------------


def _adapted_forward(module: nn.Module) -> Replacement:
    """The forward pass of a module with a linear layer and low-rank factors, such as peft's."""
    return (lambda one: LoraForward(one).forward, ADAPTED) if is_plain_lora_layer(module) else None


# --- queries, keys and values ---------------------------------------------------------------------------------------

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _attention_of(module: nn.Module) -> Replacement:
    """The forward pass of a module with adapters on several projections: its own, in a context that computes these
    adapters together. It needs no test, because each call checks that they share an input.
    """
    parts = [getattr(module, name, None) for name in _PROJECTIONS]
    return (_method(_attention_output), ATTENTION) if sum(map(is_plain_lora_layer, parts)) > 1 else None


def _attention_output(module: Any, *args: Any, **kwargs: Any) -> Any:
    with computed_jointly(*(getattr(module, name) for name in _PROJECTIONS)):
        return type(module).forward(module, *args, **kwargs)


# --- linear layers ----------------------------------------------------------------------------------------------------


def _linear_of(module: nn.Module) -> Replacement:
    """The forward pass of torch's linear layer, which needs no test, or of a tested one with a transposed weight
    (GPT-2). Only for trained weights, because frozen ones are loaded in the compute dtype.
    """
    if type(module) is nn.Linear:
        return (_method(_project), LINEAR) if module.weight.requires_grad else None
    return (_method(_project_by_transposed), LINEAR) if _is_transposed(module) else None


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module has a trained weight (I, O) and a bias (O,), and computes x W + b. Tested with random values."""
    own = dict(module.named_parameters())
    if list(own) != ["weight", "bias"] or own["weight"].ndim != 2 or own["weight"].shape[1:] != own["bias"].shape:
        return False
    weight, bias = torch.randn(own["weight"].shape), torch.randn(own["bias"].shape)
    x = torch.randn(3, len(weight))
    inputs = {"weight": weight, "bias": bias}
    return own["weight"].requires_grad and _gives_same_output(
        lambda: functional_call(module, inputs, (x,)), torch.addmm(bias, x, weight)
    )


def _project(module: Any, input: Tensor) -> Tensor:
    if (dtype := _narrower(module, input)) is not None:
        return cast_linear(input, module.weight, module.bias, dtype)
    return F.linear(input, module.weight, module.bias)


def _project_by_transposed(module: Any, x: Tensor) -> Tensor:
    if (dtype := _narrower(module, x)) is not None:
        return cast_linear(x, module.weight, module.bias, dtype, is_transposed=True)
    return type(module).forward(module, x)  # type: ignore[no-any-return]


def _narrower(module: Any, input: Tensor) -> torch.dtype | None:
    """The dtype to which autocast on a CPU would copy the weights for a backward pass. None without a backward pass, in
    which case autocast's copies are reused for all tokens of a response.
    """
    if not (input.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()):
        return None
    dtype = torch.get_autocast_dtype("cpu")
    return dtype if module.weight.dtype != dtype else None


# --- patch embeddings -------------------------------------------------------------------------------------------------


def _embedding_of(module: nn.Module) -> Replacement:
    """The forward pass of a convolution whose kernels do not overlap. It needs no test, because each call checks that
    the input consists of single patches, as in the vision towers of Qwen and GLM.
    """
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv2d, nn.Conv3d):
        return None
    if module.kernel_size != module.stride or module.groups != 1:
        return None
    is_plain = all(step == 1 for step in module.dilation) and all(width == 0 for width in module.padding)
    return (_method(_embed), EMBEDDING) if is_plain else None


def _embed(module: Any, input: Tensor) -> Tensor:
    if input.device.type != "cpu" or input.shape[2:] != module.kernel_size:
        return type(module).forward(module, input)  # type: ignore[no-any-return]
    found = F.linear(input.flatten(1), module.weight.flatten(1), module.bias)  # (patches, O)
    return found.view(*found.shape, *[1] * len(module.kernel_size))


# --- activations ------------------------------------------------------------------------------------------------------


def _activation_of(module: nn.Module) -> Replacement:
    """The forward pass of an activation that consists of several operations (GPT-2), as one torch operation.

    Applies to modules without parameters or submodules, except torch's own, which are single operations.
    """
    has_state = any(not name.startswith("_") and name != "training" for name in vars(module))
    if has_state or type(module).__module__.startswith("torch.") or list(module.children()) or module.state_dict():
        return None
    x = torch.linspace(-4, 4, 33)
    for name, forward in _ACTIVATED.items():
        if _gives_same_output(lambda: module(x), apply_activation(x, name)):
            return _method(forward), ACTIVATION
    return None


def _activation_kernel(activation: str) -> Callable[..., Tensor]:
    def forward(module: Any, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        return apply_activation(input, activation)

    return forward


_ACTIVATED = {name: _activation_kernel(name) for name in ("gelu", "gelu_tanh")}


_FOR_ANY_DEVICE = (_adapted_forward, _attention_of)
_FOR_CPU = (_norm_of, _gated_forward, _activation_of, _linear_of, _embedding_of)


def _gives_same_output(plain: Callable[[], Any], ours: Tensor) -> bool:
    """Whether a module's output equals that of burnish's function. False if the module refuses the input."""
    try:
        with torch.no_grad():
            output = plain()
    except REFUSALS:
        return False
    is_alike = isinstance(output, Tensor) and output.shape == ours.shape
    return is_alike and bool((output - ours).abs().max() <= _TOLERANCE * ours.abs().max())
