"""LoRA in a whole model, in peft's modules: put them in, find them, switch them, merge them.

A model keeps its class and its methods; only the layers named are replaced by peft's, which keep them as
``base_layer``. What the layers compute is ``ops.lora``, where that stands as their forward pass. Nothing here knows
options; of files it knows the names of tensors.
"""

from __future__ import annotations

import copy
import re
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
"""The beginning that peft's classes around a model add to every name in a file."""
BASE = "__base__"
"""In ``rows_through``: the row that gets no adapter; peft's name."""
ROWS = Reason("adapted layer", "each row of a batch uses its own adapter")

_ALL = {"all", "all-linear"}
_FACTORS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "modules_to_save"}
"""Under which of its names a module of peft's keeps an adapter's weights, each under the adapter's name."""


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of peft's that hold adapters or copies that are trained whole."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kinds))


def adapters_in(module: Any) -> list[str]:
    """The names of the adapters that a module of peft's holds."""
    held = [vars(module)["_modules"].get(factors) for factors in _FACTORS]
    return list(dict.fromkeys(name for names in held if names is not None for name in names))


# --- which layers ---------------------------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by path, without those inside adapters."""
    adapted = dict(adapter_modules(model))
    inside = {f"{path}.{name}" for path, m in adapted.items() for name, _ in m.named_modules() if name}
    found = ((path, m) for path, m in model.named_modules() if path not in inside)
    return {path: m for path, m in found if is_linear(getattr(m, "base_layer", m))}


def find_targets(
    model: nn.Module, wanted: Sequence[str], left_out: Sequence[str] = (),
    is_frozen: Callable[[str], bool] = lambda path: False,
) -> tuple[list[str], list[Problem]]:  # fmt: skip
    """The paths of the layers that ``lora_target`` names, and a problem for each name that names none.

    Args:
        wanted: "all" for every linear layer but the head; ends of paths ("q_proj", "mlp.up_proj"); regular expressions
            for whole paths.
        left_out: paths of modules that are trained whole, and so get no adapter in them.
        is_frozen: whether the layer at a path is in a part of the model that does not train.
    """
    linear = linear_layers(model)
    head = output_head(model)
    known = [path for path in [*linear, *embeddings(model)] if not is_frozen(path)]
    free = [path for path in known if not any(_within(path, whole) for whole in left_out)]
    found: dict[str, None] = {}
    missing = []
    for name in wanted:
        if name in _ALL:
            paths = [path for path in free if path in linear and linear[path] is not head and not _skips(model, path)]
        else:
            paths = [path for path in free if _names(name, path)]
        if not paths and any(_names(name, path) for path in known):
            what = f'lora_target "{name}" matches layers that additional_target already trains in full.'
            missing.append(
                Problem(
                    what,
                    remedy="Remove these layers from one of the two options.",
                    option=("lora_target", "additional_target"),
                )
            )
        elif not paths:
            missing.append(_no_target(model, name, list(linear)))
        found.update(dict.fromkeys(paths))
    return [path for path, _ in model.named_modules() if path in found], missing


def shortest_names(paths: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """The ends of ``paths`` that name them and no other layer; whole paths where the end would name more."""
    others = set(linear_layers(model)) - set(paths)
    taken = {path.split(".")[-1] for path in others}
    return tuple(dict.fromkeys(path if path.split(".")[-1] in taken else path.split(".")[-1] for path in paths))


def embeddings(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]


def output_head(model: nn.Module) -> nn.Module | None:
    get: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return get() if get else None


def find_modules(model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """The paths of the modules whose path ends in the letters of one of ``names``, as peft takes them ("norm": an
    "input_layernorm" too), none within another; and a problem for each name that fits none."""
    paths = [path for path, _ in model.named_modules() if path]
    found = [path for path in paths if path.endswith(tuple(names))]
    outer = [path for path in found if not any(_within(path, other) for other in found if other != path)]
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
    """Put adapter ``name`` over the layers at ``targets`` and train copies of the modules at ``whole``; make it the
    active one. Where modules that are copied share a weight, their copies share one too.

    Factors are kept in float32: peft draws them so, and rounds them to the format of the layer.

    Args:
        config: peft's ``LoraConfig``; what it says of targets is not read.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    here = copy.copy(config)
    here.target_modules, here.modules_to_save = set(targets), list(whole) or None
    here.fan_in_fan_out = any(is_conv1d(model.get_submodule(path)) for path in targets)
    packed = {type(layer) for layer in map(model.get_submodule, targets) if is_packed(layer)}
    if packed:  # of whatever library: what peft does over a dense layer asks nothing of its weight
        here._register_custom_module(dict.fromkeys(packed, Linear))
    is_shape = any(parameter.is_meta for parameter in model.parameters())
    if is_shape:
        here.init_lora_weights = True  # nothing is there that could be decomposed
    before, mode = torch.get_rng_state(), model.training
    try:
        with torch.device("meta") if is_shape else nullcontext():
            inject_adapter_in_model(here, model, name)
    except ValueError as error:  # what peft says of layers that it cannot adapt
        raise UserError(f"peft rejects this adapter: {error}") from error
    model.train(mode)
    if not is_shape and config.init_lora_weights is True:
        _draw_again(model, name, before)
    for path, parameter in model.named_parameters():
        if _file_name(path, name) and "modules_to_save" not in path:
            parameter.data = parameter.data.float()
    copied: dict[int, nn.Parameter] = {}
    for path in whole:
        module: Any = model.get_submodule(path)
        _share(module.original_module, module.modules_to_save[name], copied)
    set_active(model, [name])


def _draw_again(model: nn.Module, name: str, before: Tensor) -> None:
    """A of each linear layer as it was drawn, in float32; the draws are peft's, one by one."""
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
    """The adapters whose updates are added up; a layer that lacks one of them leaves it out."""
    for _, module in adapter_modules(model):
        held = [name for name in names if name in adapters_in(module)]
        module.set_adapter(held if hasattr(module, "base_layer") else held[-1:])


def train_only(model: nn.Module, name: str) -> None:
    """Let adapter ``name`` move, and nothing else."""
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(bool(_file_name(path, name)))


# --- switching ------------------------------------------------------------------------------------------------------


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model as it was before any adapter."""
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
def merged(model: nn.Module) -> Iterator[None]:
    """Inside it, adapted layers compute with the sum of base and update, so that a token costs one product per layer.

    The sums stand in tensors of their own, and the weights of the base come back as they were, to the bit. Without
    effect where the sum would round the update away or is not defined: a base that is quantized or narrower than
    float32, several adapters, a variant such as DoRA.
    """
    is_adapted = any(hasattr(module, "base_layer") for module in model.modules())
    layers = [module for _, module in adapter_modules(model) if hasattr(module, "base_layer")] if is_adapted else []
    kept = [layer.base_layer.weight.data for layer in layers] if all(map(_merges_exactly, layers)) else []
    try:
        for layer, weight in zip(layers, kept, strict=False):
            (name,) = layer.active_adapters
            layer.base_layer.weight.data = weight + layer.get_delta_weight(name)
            layer.merged_adapters.append(name)
        yield
    finally:
        for layer, weight in zip(layers, kept, strict=False):
            layer.base_layer.weight.data = weight
            layer.merged_adapters.clear()


def _merges_exactly(layer: Any) -> bool:
    if type(layer.base_layer) is not nn.Linear or layer.base_layer.weight.dtype not in (torch.float32, torch.float64):
        return False
    names = layer.active_adapters
    is_plain = len(names) == 1 and names[0] in layer.lora_A and layer.lora_B[names[0]].bias is None
    return is_plain and not (layer.merged or layer.disable_adapters or layer.lora_variant)


@contextmanager
def rows_through(model: nn.Module, adapters: Sequence[str]) -> Iterator[None]:
    """Each row of a batch through an adapter of its own; ``"__base__"`` for none.

    Raises:
        UserError: for a name that the model has no adapter of.
    """
    modules = [module for _, module in adapter_modules(model)]
    known = {name for module in modules for name in adapters_in(module)} | {BASE}
    if set(adapters) - known:
        raise UserError(f"There is no adapter {sorted(set(adapters) - known)}. Known: {', '.join(sorted(known))}.")
    rows = list(adapters)
    ways = ((module, partial(type(module).forward, module, adapter_names=rows)) for module in modules)
    made = [patch(module, "forward", way, ROWS) for module, way in ways]
    try:
        yield
    finally:
        restore(made)


def _is_quantized(layer: nn.Module) -> bool:
    """Return whether the weight of ``layer`` is anything but a matrix of floating-point numbers."""
    weight = getattr(layer, "weight", None)
    return not (isinstance(weight, Tensor) and weight.is_floating_point())


def merge_into_base(model: nn.Module) -> nn.Module:
    """The model with its adapters merged for good, in float32, and their layers gone.

    Raises:
        UserError: where a merged weight is not finite; the model is then as it was.
    """
    modules = list(adapter_modules(model))
    layers = [(path, module) for path, module in modules if hasattr(module, "base_layer")]
    for _, layer in layers:
        if _is_quantized(layer.base_layer):
            kind = type(layer.base_layer).__name__
            raise UserError(
                f"an adapter cannot be merged into a quantized base ({kind}): rounding would discard the update.",
                remedy="Merge it into the base in full precision: burnish export without quantization_bit.",
            )
    before = [(layer, dict(layer.base_layer.named_parameters(recurse=False))) for _, layer in layers]
    broken = [path for path, layer in layers if not _merges(layer)]
    if broken:
        for layer, parameters in before:
            layer.merged_adapters.clear()
            for name, parameter in parameters.items():
                layer.base_layer.register_parameter(name, parameter)
        raise UserError(
            f"merging the adapter produces NaN or infinite weights in {', '.join(broken[:3])}.",
            remedy="The adapter is damaged or diverged in training; use an earlier checkpoint.",
        )
    for path, module in modules:
        model.set_submodule(path, module.base_layer if hasattr(module, "base_layer") else _in_use(module))
    vars(model).pop("peft_config", None)
    _settle_tie(model)
    return model


def _merges(layer: Any) -> bool:
    """Merge one layer, into weights of its own: they may be another module's too. False where the sum is not finite."""
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


def _in_use(module: Any) -> nn.Module:
    """The copy that stands for a module that is trained whole, or the module itself where none is active."""
    names = [name for name in module.active_adapters if name in module.modules_to_save]
    used: nn.Module = module.modules_to_save[names[-1]] if names else module.original_module
    return used


# --- files ----------------------------------------------------------------------------------------------------------


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Adapter ``name`` as a file holds it: a weight that two modules share is there under both names, as two tensors,
    because safetensors refuses names that share memory."""
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
    """Put a file's tensors into adapter ``name``. Names and shapes have been checked."""
    for path, tensor in model.state_dict(keep_vars=True).items():
        if key := _file_name(path, name):
            tensor.copy_(state[key])


def _file_name(path: str, name: str) -> str:
    """``a.lora_A.default.weight`` -> ``base_model.model.a.lora_A.weight``; "" for what is not of adapter ``name``."""
    parts = path.split(".")
    at = next((i for i, (kind, whose) in enumerate(pairwise(parts)) if kind in _FACTORS and whose == name), None)
    if at is None:
        return ""
    kept = parts[:at] if parts[at] == "modules_to_save" else parts[: at + 1]
    rest = [] if parts[at] == "lora_magnitude_vector" else parts[at + 2 :]
    return FILE_PREFIX + ".".join([*kept, *rest])


# --- parts ----------------------------------------------------------------------------------------------------------


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _within(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _skips(model: nn.Module, path: str) -> bool:
    """Tell whether the fast kernels of a state-space model go past a layer, so that peft refuses to adapt it."""
    family = getattr(getattr(model, "config", None), "model_type", "")
    return "mamba" in family and path.endswith("out_proj")


def _names(name: str, path: str) -> bool:
    """Return whether ``name`` is the end of ``path``, or a regular expression for all of it."""
    if _ends(path, name):
        return True
    return bool(re.search(r"[*+?|()\[\]^$\\]", name) and re.fullmatch(name, path))


def _no_target(model: nn.Module, name: str, linear: Sequence[str]) -> Problem:
    short = list(dict.fromkeys(path.split(".")[-1] for path in linear))
    others = [path for path, _ in model.named_modules() if path and _ends(path, name)]
    what = f"matches no linear layer of {type(model).__name__}"
    if others:
        what += f"; {others[0]} is a {type(model.get_submodule(others[0])).__name__}"
    guess = did_you_mean(name, short)
    return Problem(
        f'lora_target "{name}" {what}.{guess}', remedy=f"Linear layers: {', '.join(short)}.", option="lora_target"
    )


def _is_finite(module: nn.Module) -> bool:
    return all(p.is_meta or bool(torch.isfinite(p).all()) for p in module.parameters())


def _share(original: nn.Module, copied_module: nn.Module, copied: dict[int, nn.Parameter]) -> None:
    for (name, parameter), (_, own) in zip(original.named_parameters(), copied_module.named_parameters(), strict=True):
        shared = copied.setdefault(id(parameter), own)
        if shared is not own:
            holder, _, leaf = name.rpartition(".")
            copied_module.get_submodule(holder).register_parameter(leaf, shared)


def _settle_tie(model: nn.Module) -> None:
    """Say in the config that embedding and head are two weights now, if they are: loading goes by it."""
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "tie_word_embeddings", False):
        return
    head, embedding = output_head(model), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        config.tie_word_embeddings = False


def is_conv1d(module: nn.Module) -> bool:
    """transformers' ``Conv1D``: a linear layer that stores its weight as (I, O). Known by name, so that adapters work
    without transformers."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_packed(module)


def is_packed(module: nn.Module) -> bool:
    """A linear layer of GPTQ or AWQ, whatever the library: known by the name of its packed weight."""
    return isinstance(getattr(module, "qweight", None), Tensor) and hasattr(module, "in_features")


def features(layer: nn.Module) -> tuple[int, int]:
    """(I, O) of a linear layer."""
    if is_conv1d(layer):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return weight.shape[0], weight.shape[1]
    return layer.in_features, layer.out_features  # type: ignore[return-value]
