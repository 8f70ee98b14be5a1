"""LoRA in a whole model: put the layers in, find them, switch them, merge them.

A model keeps its class and its methods; only the layers named are replaced by ``LoraLinear``, ``LoraEmbedding`` or
``TrainedCopy`` (lora_layer.py). Nothing here knows files or options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from burnish.adapters.lora_config import LoraConfig
from burnish.adapters.lora_layer import LoraEmbedding, LoraLayer, LoraLinear, is_linear
from burnish.adapters.switch import BASE, AdapterModule, TrainedCopy
from burnish.core.errors import Problem, UserError, did_you_mean

FILE_PREFIX = "base_model.model."
"""What peft's classes around a model add to every name in a file."""

_ALL = {"all", "all-linear"}


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, AdapterModule]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, AdapterModule))


# --- which layers ---------------------------------------------------------------------------------------------------


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers by path, without those inside adapters."""
    inside = {f"{path}.{name}" for path, m in adapter_modules(model) for name, _ in m.named_modules() if name}
    return {path: m for path, m in model.named_modules() if path not in inside and _adaptable(m)}


def find_targets(
    model: nn.Module, wanted: Sequence[str], left_out: Sequence[str] = ()
) -> tuple[list[str], list[Problem]]:
    """The paths of the layers that ``lora_target`` names, and a problem for each name that names none.

    Args:
        wanted: "all" for every linear layer but the head; ends of paths ("q_proj", "mlp.up_proj"); regular expressions
            for whole paths.
        left_out: paths of modules that are trained whole, and so get no adapter in them.
    """
    linear = linear_layers(model)
    head = output_head(model)
    free = [path for path in [*linear, *embeddings(model)] if not any(_within(path, whole) for whole in left_out)]
    found: dict[str, None] = {}
    missing = []
    for name in wanted:
        if name in _ALL:
            paths = [path for path in free if path in linear and linear[path] is not head]
        else:
            paths = [path for path in free if _names(name, path)]
        if not paths and any(_names(name, path) for path in linear):
            what = f'lora_target "{name}" names layers that additional_target trains whole already.'
            missing.append(Problem(what, remedy="Name other layers in one of the two."))
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
            f'additional_target "{name}" names no module of {type(model).__name__}.{did_you_mean(name, known)}',
            remedy=f"Modules: {', '.join(known)}.",
        )
        for name in names
        if not any(path.endswith(name) for path in paths)
    ]
    return outer, missing


# --- putting in -----------------------------------------------------------------------------------------------------


def add_adapter(model: nn.Module, name: str, config: LoraConfig, targets: Sequence[str], whole: Sequence[str]) -> None:
    """Put adapter ``name`` over the layers at ``targets`` and train copies of the modules at ``whole``; make it the
    active one. Where modules that are copied share a weight, their copies share one too."""
    for path in targets:
        module = model.get_submodule(path)
        if not isinstance(module, LoraLayer):
            module = (LoraEmbedding if isinstance(module, nn.Embedding) else LoraLinear)(module)
            model.set_submodule(path, module)
        module.add(name, config.at(path))
        module.train(model.training)
    copied: dict[int, nn.Parameter] = {}
    for path in whole:
        module = model.get_submodule(path)
        if not isinstance(module, TrainedCopy):
            module = TrainedCopy(module)
            model.set_submodule(path, module)
        module.add(name)
        module.train(model.training)
        _share(module.original_module, module.modules_to_save[name], copied)
    set_active(model, [name])


def set_active(model: nn.Module, names: Sequence[str]) -> None:
    """The adapters whose updates are added up; a layer that lacks one of them leaves it out."""
    for _, module in adapter_modules(model):
        module.active = list(names)


def train_only(model: nn.Module, name: str) -> None:
    """Let adapter ``name`` move, and nothing else."""
    model.requires_grad_(False)
    for _, module in adapter_modules(model):
        if name in module.adapters:
            for parameter in module.trainable(name):
                parameter.requires_grad_(True)


# --- switching ------------------------------------------------------------------------------------------------------


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model as it was before any adapter. What was merged is taken out for the while, to the bit."""
    modules = [module for _, module in adapter_modules(model)]
    merged = [module for module in modules if module.is_merged]
    before = [module.is_disabled for module in modules]
    try:
        for module in modules:
            module.unmerge()
            module.is_disabled = True
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.is_disabled = was
        for module in merged:
            module.merge()


@contextmanager
def rows_through(model: nn.Module, adapters: Sequence[str]) -> Iterator[None]:
    """Each row of a batch through an adapter of its own; ``"__base__"`` for none.

    Raises:
        UserError: for a name that the model has no adapter of, and where an adapter is merged.
    """
    modules = [module for _, module in adapter_modules(model)]
    known = {name for module in modules for name in module.adapters} | {BASE}
    if set(adapters) - known:
        raise UserError(f"There is no adapter {sorted(set(adapters) - known)}. Known: {', '.join(sorted(known))}.")
    if any(module.is_merged for module in modules):
        raise UserError("Rows cannot go through adapters of their own while one is merged; unmerge it first.")
    try:
        for module in modules:
            module.rows = list(adapters)
        yield
    finally:
        for module in modules:
            module.rows = None


def merge(model: nn.Module) -> None:
    """Put the active adapters into the base weights, for faster generation; ``unmerge`` undoes it exactly. Costs a
    second copy of the adapted weights."""
    for _, module in adapter_modules(model):
        module.merge()


def unmerge(model: nn.Module) -> None:
    for _, module in adapter_modules(model):
        module.unmerge()


def merge_into_base(model: nn.Module) -> nn.Module:
    """The model with its adapters merged for good and their layers gone.

    Raises:
        UserError: where a merged weight is not finite; the model is then as it was.
    """
    merge(model)
    broken = [path for path, module in adapter_modules(model) if not _is_finite(module.bare())]
    if broken:
        unmerge(model)
        raise UserError(
            Problem(
                f"merging the adapter gives weights that are not finite, in {', '.join(broken[:3])}.",
                remedy="The adapter is damaged or diverged in training; take an earlier checkpoint of it.",
            )
        )
    for path, module in list(adapter_modules(model)):
        model.set_submodule(path, module.bare())
    _settle_tie(model)
    return model


# --- files ----------------------------------------------------------------------------------------------------------


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Adapter ``name`` as a file holds it: a weight that two modules share is there under both names, as two tensors,
    because safetensors refuses names that share memory."""
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for path, module in adapter_modules(model):
        for key, tensor in module.state(name).items() if name in module.adapters else ():
            is_shared = tensor.data_ptr() in places and not tensor.is_meta
            found[f"{FILE_PREFIX}{path}.{key}"] = tensor.detach().clone() if is_shared else tensor.detach()
            places.add(tensor.data_ptr())
    return found


def load_adapter_state(model: nn.Module, name: str, state: Mapping[str, Tensor]) -> None:
    """Put a file's tensors into adapter ``name``. Names and shapes have been checked."""
    for path, module in adapter_modules(model):
        if name in module.adapters:
            prefix = f"{FILE_PREFIX}{path}."
            module.load(name, {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)})


# --- parts ----------------------------------------------------------------------------------------------------------


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, LoraLinear) or is_linear(module)


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _within(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _names(name: str, path: str) -> bool:
    """Whether ``name`` is the end of ``path``, or a regular expression for all of it."""
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
    return Problem(f'lora_target "{name}" {what}.{guess}', remedy=f"Linear layers: {', '.join(short)}.")


def _is_finite(module: nn.Module) -> bool:
    return all(p.is_meta or bool(torch.isfinite(p).all()) for p in module.parameters())


def _share(original: nn.Module, copied_module: nn.Module, copied: dict[int, nn.Parameter]) -> None:
    for (name, parameter), (_, own) in zip(original.named_parameters(), copied_module.named_parameters(), strict=True):
        shared = copied.setdefault(id(parameter), own)
        if shared is not own:
            holder, _, leaf = name.rpartition(".")
            setattr(copied_module.get_submodule(holder), leaf, shared)


def _settle_tie(model: nn.Module) -> None:
    """Say in the config that embedding and head are two weights now, if they are: loading goes by it."""
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "tie_word_embeddings", False):
        return
    head, embedding = output_head(model), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        config.tie_word_embeddings = False
