"""LoRA in a whole model with peft's modules: attach, find, switch and merge adapters.

A model keeps its class and its methods. Only the target layers are replaced by peft's, which keep the original as
``base_layer``. ``kernels.lora`` computes their forward pass if it is patched in. This module does not depend on
options. Of files it only knows the names of tensors.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.utils.patching import Reason, patch, restore

FILE_PREFIX = "base_model.model."
"""Prefix that peft's wrapper classes add to every name in a file."""
BASE = "__base__"
"""Adapter name for rows without adapter in ``rows_through``, as in peft."""
ROWS = Reason("adapted layer", "each row of a batch uses its own adapter")

_ALL_LINEAR = {"all", "all-linear"}
_FACTORS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save"}
"""Names under which peft's modules store an adapter's weights, each in a dict by adapter name."""


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """peft's modules that hold adapters or fully trained copies, with their paths."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kinds))


def adapters_in(module: Any) -> list[str]:
    """The names of the adapters in one of peft's modules."""
    held = [vars(module)["_modules"].get(factors) for factors in _FACTORS]
    return list(dict.fromkeys(name for names in held if names is not None for name in names))


# --- which layers ---------------------------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by path, with and without adapters."""
    return {path: layer for path, layer in _outer_modules(model) if is_linear(getattr(layer, "base_layer", layer))}


def embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """The embeddings by path, with and without adapters."""
    return {path: layer for path, layer in _outer_modules(model) if is_embedding(layer)}


def _outer_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their paths, without those inside of peft's."""
    adapted = dict(adapter_modules(model))
    inside = {f"{path}.{name}" for path, m in adapted.items() for name, _ in m.named_modules() if name}
    return ((path, module) for path, module in model.named_modules() if path not in inside)


def find_targets(
    model: nn.Module, targets: Sequence[str], left_out: Sequence[str] = (),
    is_frozen: Callable[[str], bool] = lambda path: False, option: str = "lora_target",
) -> tuple[list[str], list[Problem]]:  # fmt: skip
    """The paths of the layers that ``targets`` selects, and a problem for each name without a match.

    Args:
        targets: "all" for every linear layer except the head; suffixes of paths ("q_proj", "mlp.up_proj"); regular
            expressions for whole paths.
        left_out: paths of fully trained modules, which get no adapter.
        is_frozen: whether the layer at a path belongs to a frozen part of the model.
        option: the option that contains ``targets``.
    """
    linear = linear_layers(model)
    head = output_head(model)
    known = [path for path in [*linear, *embeddings(model)] if not is_frozen(path)]
    free = [path for path in known if not any(_is_inside(path, whole) for whole in left_out)]
    found: dict[str, None] = {}
    missing = []
    for name in targets:
        if fault := pattern_fault(name):
            what = f'{option} "{name}" is neither a name nor a regular expression: {fault}.'
            missing.append(Problem(what, remedy="Write .* for any text, and (a|b) for a choice.", option=option))
            continue
        if name in _ALL_LINEAR:
            paths = [
                path
                for path in free
                if path in linear and linear[path] is not head and not _is_left_out_of_all(model, path, linear[path])
            ]
        else:
            paths = [path for path in free if _matches_path(name, path)]
        if not paths and any(_matches_path(name, path) for path in known):
            what = f'lora_target "{name}" matches layers that additional_target already trains in full.'
            missing.append(
                Problem(
                    what,
                    remedy="Remove these layers from one of the two options.",
                    option=("lora_target", "additional_target"),
                )
            )
        elif not paths:
            missing.append(_no_target(model, name, list(linear), option))
        found.update(dict.fromkeys(paths))
    return [path for path, _ in model.named_modules() if path in found], missing


def frozen_matches(model: nn.Module, targets: Sequence[str], is_frozen: Callable[[str], bool]) -> dict[str, list[str]]:
    """Name in ``targets`` -> the linear layers of frozen parts that it matches as well; "all" means no frozen one."""
    frozen = [path for path in linear_layers(model) if is_frozen(path)]
    found = {
        name: [path for path in frozen if _matches_path(name, path)] for name in targets if name not in _ALL_LINEAR
    }
    return {name: paths for name, paths in found.items() if paths}


def shortest_names(paths: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Suffixes that match ``paths`` and no other module. Whole paths if the suffix is ambiguous."""
    own = set(paths)
    taken = {path.split(".")[-1] for path, _ in model.named_modules() if path not in own}
    return tuple(dict.fromkeys(path if path.split(".")[-1] in taken else path.split(".")[-1] for path in paths))


def output_head(model: nn.Module) -> nn.Module | None:
    get: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return get() if get else None


def find_modules(model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The outermost modules whose path ends with one of ``names``, and a problem for each name without a match. As in
    peft, "norm" also matches "input_layernorm".
    """
    paths = [path for path, _ in model.named_modules() if path]
    found = [path for path in paths if path.endswith(tuple(names))]
    outer = [path for path in found if not any(_is_inside(path, other) for other in found if other != path)]
    known = list(dict.fromkeys(path.split(".")[-1] for path in paths if not path.split(".")[-1].isdigit()))
    missing = [
        Problem(
            f'additional_target "{name}" does not match any module of '
            f"{type(model).__name__}.{did_you_mean(name, known)}",
            remedy=f"Modules: {', '.join(known)}.",
            option="additional_target",
        )
        for name in names
        if not any(path.endswith(name) for path in paths)
    ]
    return outer, missing


# --- putting in -----------------------------------------------------------------------------------------------------


def add_adapter(model: nn.Module, name: str, config: Any, targets: Sequence[str], whole: Sequence[str]) -> None:
    """Add adapter ``name`` to the layers at ``targets``, and trainable copies of the modules at ``whole``. Activates
    it.

    Modules that share a weight get copies that share one, too. Factors are kept in float32: peft initializes them in
    float32 and then rounds them to the dtype of the layer.

    Args:
        name: name of the adapter.
        config: peft's ``LoraConfig``; its targets are ignored.
        targets: paths of the layers with low-rank factors.
        whole: paths of the fully trained modules.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    here = copy.copy(config)
    here.target_modules, here.modules_to_save = set(targets), list(whole) or None
    here.fan_in_fan_out = any(is_conv1d(model.get_submodule(path)) for path in targets)
    packed = {type(layer) for layer in map(model.get_submodule, targets) if is_packed(layer)}
    if packed:  # of any library: the generic layer of peft does not access the weight
        here._register_custom_module(dict.fromkeys(packed, Linear))
    is_shape = any(parameter.is_meta for parameter in model.parameters())
    if is_shape:
        here.init_lora_weights = True  # on the meta device there is nothing to decompose
    before, mode = torch.get_rng_state(), model.training
    try:
        with torch.device("meta") if is_shape else nullcontext():
            inject_adapter_in_model(here, model, name)
    except (AttributeError, ImportError, TypeError, ValueError) as error:  # a layer or a setting that peft rejects
        raise UserError(f"peft rejects this adapter: {error}") from error
    model.train(mode)
    if not is_shape and config.init_lora_weights is True:
        _reinitialize_in_float32(model, name, before)
    for path, parameter in model.named_parameters():
        if _file_name(path, name) and "modules_to_save" not in path:
            parameter.data = parameter.data.float()
    copied: dict[int, nn.Parameter] = {}
    for path in whole:
        module: Any = model.get_submodule(path)
        _tie_copied_parameters(module.original_module, module.modules_to_save[name], copied)
    if config.use_dora:
        for path in targets:
            _keep_scales(model.get_submodule(path))
    set_active(model, [name])


def _keep_scales(layer: Any) -> None:
    """Preserve the quantization scales of 8-bit weights on a CPU. Whenever DoRA reads the weight, peft replaces it with
    a copy without scales, and bitsandbytes would then discard the ones in use."""
    base: Any = getattr(layer, "base_layer", None)
    if type(getattr(base, "weight", None)).__name__ == "Int8Params":
        base.register_forward_pre_hook(_restore_scales)


def _restore_scales(base: Any, _: Any) -> None:
    if base.weight.SCB is None and base.state.SCB is not None:
        base.weight.CB = None


def _reinitialize_in_float32(model: nn.Module, name: str, before: Tensor) -> None:
    """Repeat peft's random initialization of A in float32, layer by layer."""
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for _, layer in adapter_modules(model):
        if name not in getattr(layer, "lora_A", ()):
            continue
        a, b = layer.lora_A[name], layer.lora_B[name]
        drawn = nn.Linear(a.in_features, a.out_features, bias=False)
        nn.Linear(b.in_features, b.out_features, bias=b.bias is not None)
        nn.init.kaiming_uniform_(drawn.weight, a=5**0.5)
        a.weight.data = drawn.weight.data.to(a.weight.device)
    torch.set_rng_state(after)


def set_active(model: nn.Module, names: Sequence[str]) -> None:
    """Activate adapters, whose updates are added. A layer without one of them skips it."""
    for _, module in adapter_modules(model):
        held = [name for name in names if name in adapters_in(module)]
        module.set_adapter(held if hasattr(module, "base_layer") else held[-1:])


def train_only(model: nn.Module, name: str) -> None:
    """Make adapter ``name`` trainable and freeze everything else."""
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(bool(_file_name(path, name)))


# --- switching ------------------------------------------------------------------------------------------------------


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without any adapter."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modules = [module for _, module in adapter_modules(model)]
    try:
        for module in modules:
            module.enable_adapters(False)
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
        for parameter, is_trained in trained.items():
            parameter.requires_grad_(is_trained)


@contextmanager
def merge_temporarily(model: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute with merged weights, so that a token needs one product per layer.

    The merged weights are separate tensors, and the original weights are restored exactly. Has no effect if merging
    would round the update away or is not defined: a quantized base or one narrower than float32, several adapters,
    variants such as DoRA, a weight that another module uses as well (a head tied to the embedding).
    """
    is_adapted = any(hasattr(module, "base_layer") for module in model.modules())
    layers = [module for _, module in adapter_modules(model) if hasattr(module, "base_layer")] if is_adapted else []
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    can_merge = all(_merges_exactly(layer) and uses[id(layer.base_layer.weight)] == 1 for layer in layers)
    originals = [layer.base_layer.weight.data for layer in layers] if can_merge else []
    try:
        for layer, weight in zip(layers, originals, strict=False):
            (name,) = layer.active_adapters
            layer.base_layer.weight.data = weight + layer.get_delta_weight(name)
            layer.merged_adapters.append(name)
        yield
    finally:
        for layer, weight in zip(layers, originals, strict=False):
            layer.base_layer.weight.data = weight
            layer.merged_adapters.clear()


def _merges_exactly(layer: Any) -> bool:
    if type(layer.base_layer) is not nn.Linear or layer.base_layer.weight.dtype not in (torch.float32, torch.float64):
        return False
    names = layer.active_adapters
    is_plain = len(names) == 1 and names[0] in getattr(layer, "lora_A", ()) and layer.lora_B[names[0]].bias is None
    return is_plain and not (layer.merged or layer.disable_adapters or layer.lora_variant)


_LAYERS_WITH_ROW_ADAPTERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules trained in full that peft can compute with another copy for each row (``ModulesToSaveWrapper``)."""


def reason_against_rows(model: nn.Module, name: str) -> str:
    """Return why rows of a batch cannot use adapter ``name`` while others do not (``rows_through``), or ""."""
    for path, module in adapter_modules(model):
        if name not in adapters_in(module):
            continue
        if getattr(module, "use_dora", {}).get(name):
            return "it uses DoRA"
        whole = getattr(module, "original_module", None)
        if whole is not None and not isinstance(whole, _LAYERS_WITH_ROW_ADAPTERS):
            return f'its module "{path}" of type {type(whole).__name__} was trained in full'
    return ""


@contextmanager
def rows_through(model: nn.Module, adapters: Sequence[str]) -> Iterator[None]:
    """Context in which each row of a batch uses its own adapter; ``"__base__"`` for none.

    Raises:
        UserError: for an unknown adapter name.
    """
    modules = [module for _, module in adapter_modules(model)]
    known = {name for module in modules for name in adapters_in(module)} | {BASE}
    if set(adapters) - known:
        raise UserError(f"Unknown adapters {sorted(set(adapters) - known)}. Available: {', '.join(sorted(known))}.")
    rows = list(adapters)
    forwards = ((module, partial(type(module).forward, module, adapter_names=rows)) for module in modules)
    made = [patch(module, "forward", forward, ROWS) for module, forward in forwards]
    try:
        yield
    finally:
        restore(made)


def _is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of ``layer`` is not a floating-point matrix."""
    weight = getattr(layer, "weight", None)
    return not (isinstance(weight, Tensor) and weight.is_floating_point())


def merge_into_base(model: nn.Module) -> nn.Module:
    """Merge the adapters into the model's weights in float32 and remove their layers.

    Raises:
        UserError: if a merged weight is not finite. The model is then unchanged.
    """
    modules = list(adapter_modules(model))
    layers = [(path, module) for path, module in modules if hasattr(module, "base_layer")]
    for _, layer in layers:
        if _is_quantized(layer.base_layer):
            kind = type(layer.base_layer).__name__
            raise UserError(
                f"an adapter cannot be merged into a quantized base model ({kind}): rounding would discard the update.",
                remedy="Merge it into the full-precision base model: run burnish export without quantization_bit.",
            )
    before = [(layer, dict(layer.base_layer.named_parameters(recurse=False))) for _, layer in layers]
    broken = [path for path, layer in layers if not _merge_layer(layer)]
    if broken:
        for layer, parameters in before:
            layer.merged_adapters.clear()
            for name, parameter in parameters.items():
                layer.base_layer.register_parameter(name, parameter)
        raise UserError(
            f"merging the adapter produces NaN or infinite weights in {', '.join(broken[:3])}.",
            remedy="The adapter is corrupted, or training diverged; use an earlier checkpoint.",
        )
    for path, module in modules:
        model.set_submodule(path, module.base_layer if hasattr(module, "base_layer") else _active_module(module))
    vars(model).pop("peft_config", None)
    _update_tie_in_config(model)
    return model


def _merge_layer(layer: Any) -> bool:
    """Merge one layer into new tensors, because its weights may be shared with another module. False if not finite."""
    base, dtype = layer.base_layer, layer.base_layer.weight.dtype
    for name, parameter in list(base.named_parameters(recurse=False)):
        copied = parameter.detach().float() if name == "weight" else parameter.detach()
        base.register_parameter(name, nn.Parameter(copied.clone(), requires_grad=False))
    try:
        layer.merge(safe_merge=not base.weight.is_meta)
    except ValueError:
        return False
    base.weight.data = base.weight.data.to(dtype)
    return True


def _active_module(module: Any) -> nn.Module:
    """The active copy of a fully trained module, or the original module if none is active."""
    names = [name for name in module.active_adapters if name in module.modules_to_save]
    used: nn.Module = module.modules_to_save[names[-1]] if names else module.original_module
    return used


# --- files ----------------------------------------------------------------------------------------------------------


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The tensors of adapter ``name`` for a file. A shared weight is copied for its second name, because safetensors
    refuses names that share memory.
    """
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for path, tensor in model.state_dict(keep_vars=True).items():
        if key := _file_name(path, name):
            is_shared = tensor.data_ptr() in places and not tensor.is_meta
            found[key] = tensor.detach().clone() if is_shared else tensor.detach()
            places.add(tensor.data_ptr())
    return found


@torch.no_grad()
def load_adapter_state(model: nn.Module, name: str, state: Mapping[str, Tensor]) -> None:
    """Load a file's tensors into adapter ``name``. Names and shapes must have been checked."""
    for path, tensor in model.state_dict(keep_vars=True).items():
        if key := _file_name(path, name):
            tensor.copy_(state[key])


def _file_name(path: str, name: str) -> str:
    """``a.lora_A.default.weight`` -> ``base_model.model.a.lora_A.weight``; "" if not part of adapter ``name``."""
    parts = path.split(".")
    at = next((i for i, (kind, whose) in enumerate(pairwise(parts)) if kind in _FACTORS and whose == name), None)
    if at is None:
        return ""
    prefix = parts[:at] if parts[at] == "modules_to_save" else parts[: at + 1]
    rest = [] if parts[at] == "lora_magnitude_vector" else parts[at + 2 :]
    return FILE_PREFIX + ".".join([*prefix, *rest])


# --- parts ----------------------------------------------------------------------------------------------------------


def _is_path_suffix(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _is_inside(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _is_left_out_of_all(model: nn.Module, path: str, layer: nn.Module) -> bool:
    """Whether "all" leaves out a layer: an output of a state-space model that its fast kernels bypass, so that peft
    refuses to adapt it; or a router or grouped product that inherits from a linear layer and computes something else.
    """
    family = getattr(getattr(model, "config", None), "model_type", "")
    if path.endswith("out_proj") and ("mamba" in family or family in ("falcon_h1", "nemotron_h")):
        return True
    kind = type(getattr(layer, "base_layer", layer))
    is_other = issubclass(kind, nn.Linear) and kind.__module__.startswith("transformers.models.")
    return is_other and ("Linear" not in kind.__name__ or "Grouped" in kind.__name__)


def _matches_path(name: str, path: str) -> bool:
    """Whether ``name`` is a suffix of ``path``, or a regular expression that matches all of it."""
    if _is_path_suffix(path, name):
        return True
    return bool(re.search(r"[*+?|()\[\]^$\\]", name) and re.fullmatch(name, path))


def pattern_fault(name: str) -> str:
    """Return why ``name`` is not a regular expression; "" if it is one, as every plain name is."""
    try:
        re.compile(name)
    except re.error as error:
        return str(error)
    return ""


def _no_target(model: nn.Module, name: str, linear: Sequence[str], option: str) -> Problem:
    short = list(dict.fromkeys(path.split(".")[-1] for path in linear))
    others = [path for path, _ in model.named_modules() if path and _is_path_suffix(path, name)]
    what = f"matches no linear layer of {type(model).__name__}"
    if any(path in linear for path in others):
        remedy = "Set freeze_vision_tower: false or freeze_multi_modal_projector: false, or select other layers."
        return Problem(
            f'{option} "{name}" matches only frozen layers of {type(model).__name__}.',
            remedy=remedy,
            option=option,
        )
    if others:
        what += f"; {others[0]} is of type {type(model.get_submodule(others[0])).__name__}"
    guess = did_you_mean(name, short)
    return Problem(f'{option} "{name}" {what}.{guess}', remedy=f"Linear layers: {', '.join(short)}.", option=option)


def _is_finite(module: nn.Module) -> bool:
    return all(p.is_meta or bool(torch.isfinite(p).all()) for p in module.parameters())


def _tie_copied_parameters(original: nn.Module, copied_module: nn.Module, copied: dict[int, nn.Parameter]) -> None:
    for (name, parameter), (_, own) in zip(original.named_parameters(), copied_module.named_parameters(), strict=True):
        shared = copied.setdefault(id(parameter), own)
        if shared is not own:
            holder, _, leaf = name.rpartition(".")
            copied_module.get_submodule(holder).register_parameter(leaf, shared)


def _update_tie_in_config(model: nn.Module) -> None:
    """Update the config if embedding and head are no longer tied, because loading depends on it."""
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "tie_word_embeddings", False):
        return
    head, embedding = output_head(model), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        config.tie_word_embeddings = False


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``, a linear layer with the weight (I, O). Checked by class name, so that
    transformers is not required.
    """
    return type(module).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_packed(module)


def is_embedding(module: nn.Module) -> bool:
    """Whether this is an embedding, with or without an adapter."""
    return isinstance(getattr(module, "base_layer", module), nn.Embedding)


def is_packed(module: nn.Module) -> bool:
    """Whether this is a linear layer of GPTQ or AWQ, recognized by the name of its packed weight."""
    return isinstance(getattr(module, "qweight", None), Tensor) and hasattr(module, "in_features")


def layer_features(layer: nn.Module) -> tuple[int, int]:
    """(I, O) of a linear layer."""
    if is_conv1d(layer):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return weight.shape[0], weight.shape[1]
    return layer.in_features, layer.out_features  # type: ignore[return-value]
