"""LoRA: a low-rank update beside the frozen weights (Hu et al. 2021, https://arxiv.org/abs/2106.09685), with rsLoRA,
DoRA and PiSSA, in peft's file format.

In:  the options below; folders of adapters to begin with. All but the last are merged in order; the last goes on
     training, unless ``create_new_adapter``.
Out: the same model object with LoRA layers in it; ``adapter_model.safetensors`` and ``adapter_config.json``.
Refuses: targets that the model does not have, adapters that do not fit it, damaged files; all before any weight is
read, since ``check`` needs no more than the model's shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.adapters.base import ADAPTERS
from burnish.adapters.lora_config import WEIGHTS_NAME, LoraConfig
from burnish.adapters.lora_fit import Fit, check_fit, raise_unless_fitting
from burnish.adapters.lora_layer import LoraLayer, LoraSettings, is_conv1d
from burnish.adapters.lora_model import (
    adapter_state,
    add_adapter,
    disabled,
    embeddings,
    find_modules,
    find_targets,
    load_adapter_state,
    merge_into_base,
    output_head,
    shortest_names,
    train_only,
)
from burnish.core.errors import Problem, UserError
from burnish.core.options import option, set_without

DEFAULT = "default"
"""The name, in memory, of the adapter that trains; peft's."""


@dataclass
class LoraOptions:
    """The adapter that is trained with finetuning_type lora."""

    lora_rank: int = option(8, "The rank of the update: how many directions of a layer it can change.", ge=1)
    lora_alpha: float | None = option(
        None, "The update is multiplied by alpha / rank; twice the rank if not given.", gt=0
    )
    lora_dropout: float = option(0.0, "The share of a layer's inputs that the update does not see.", ge=0, lt=1)
    lora_target: list[str] = option(
        ["all"], "The layers that get an adapter, by name or regular expression; all for every linear one but the head."
    )
    additional_target: list[str] | None = option(
        None, "Modules that are trained whole beside the adapter and saved with it: all whose names end so."
    )
    use_rslora: bool = option(False, "Multiply the update by alpha / sqrt(rank), so that high ranks learn as fast.")
    use_dora: bool = option(False, "Train the length of each output's weights apart from their direction (DoRA).")
    pissa_init: bool = option(False, "Start from the largest singular vectors of the weights (PiSSA).")
    pissa_iter: int = option(
        16, "Iterations of the fast decomposition for PiSSA; -1 decomposes exactly.", ge=-1, unit="iterations"
    )
    pissa_convert: bool = option(
        False, "Save a PiSSA adapter as plain LoRA.",
        ignored="an adapter that began as PiSSA is always saved as plain LoRA of twice the rank, so that it fits the "
        "base model everyone has",
    )  # fmt: skip
    create_new_adapter: bool = option(False, "Merge all of adapter_name_or_path and train a new adapter on top.")
    loraplus_lr_ratio: float | None = option(
        None, "How many times faster B learns than A (LoRA+, https://arxiv.org/abs/2402.12354).", gt=0
    )
    loraplus_lr_embedding: float = option(1e-6, "The learning rate of an embedding's B, with LoRA+.", gt=0)


def lora_notes(options: Any) -> list[str]:
    """What was set for a part of LoRA that is off."""
    if options.finetuning_type != "lora":
        return []  # said for the whole group
    switches = {
        "pissa_iter": "pissa_init",
        "loraplus_lr_embedding": "loraplus_lr_ratio",
        "create_new_adapter": "adapter_name_or_path",
    }
    return set_without(options, switches)


@ADAPTERS.register("lora", options=LoraOptions)
class LoraAdapter:
    """Low-rank updates of the linear layers are trained, the model itself is frozen."""

    saves_whole_model = False
    file_stem = WEIGHTS_NAME.removesuffix(".safetensors")

    def __init__(self, options: Any, folders: Sequence[Path] = ()) -> None:
        self.options = options
        continues = bool(folders) and not options.create_new_adapter
        self.to_merge = list(folders)[: -1 if continues else None]
        self.to_continue = folders[-1] if continues else None
        self.notes: list[str] = []
        self.config: LoraConfig | None = None

    def check(self, model: nn.Module) -> list[Problem]:
        problems = []
        for folder in [*self.to_merge, *([self.to_continue] if self.to_continue else [])]:
            problems += check_fit(model, folder)
        if self.to_continue is None:
            problems += self._new_config(model)[1]
        return problems

    def attach(self, model: nn.Module) -> nn.Module:
        problems = self.check(model)
        if problems:
            raise UserError(problems)
        for folder in self.to_merge:
            load_adapter(model, folder)
            merge_into_base(model)
            self.notes.append(f"The adapter {folder} was merged.")
        if self.to_continue is not None:
            self.config = load_adapter(model, self.to_continue)
            self.notes += _continued(model, self.to_continue, self.config)
        else:
            fit, _ = self._new_config(model)
            self.config = fit.config
            add_adapter(model, DEFAULT, fit.config, fit.targets, fit.whole)
            self.notes += _chosen(model, self.options, fit)
        train_only(model, DEFAULT)
        return model

    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        return disabled(model)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return adapter_state(model, DEFAULT)

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        raise_unless_fitting(self.state(model), state)
        load_adapter_state(model, DEFAULT, state)

    def save(self, model: nn.Module, folder: str) -> None:
        save_adapter(model, self._attached(), Path(folder))

    def save_config(self, model: nn.Module, folder: str) -> None:
        write_config(model, self._attached(), Path(folder))

    def _attached(self) -> LoraConfig:
        if self.config is None:
            raise RuntimeError("Nothing is attached yet, so there is no adapter to save.")
        return self.config

    def _new_config(self, model: nn.Module) -> tuple[Fit, list[Problem]]:
        """The adapter that the options ask for, and what keeps it from being made."""
        options = self.options
        extra = options.additional_target or _new_tokens(model)
        whole, problems = find_modules(model, extra)
        targets, missing = find_targets(model, options.lora_target, left_out=whole)
        config = LoraConfig(
            settings=LoraSettings(
                rank=options.lora_rank,
                alpha=2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha,
                dropout=options.lora_dropout,
                use_rslora=options.use_rslora,
                use_dora=options.use_dora,
                pissa=options.pissa_iter if options.pissa_init else None,
            ),
            target_modules=shortest_names(targets, model),
            modules_to_save=tuple(extra),
            base_model=getattr(getattr(model, "config", None), "name_or_path", None) or None,
        )
        fit = Fit(config, targets, whole)
        return fit, [*problems, *missing, *fit.problems(model)]


def _new_tokens(model: nn.Module) -> list[str]:
    """Embedding and head, where the vocabulary was given new rows: frozen, the new tokens would stay noise."""
    if not getattr(model, "has_new_tokens", False):
        return []
    head = output_head(model)
    paths = [path for path, module in model.named_modules() if module is head] + embeddings(model)[:1]
    return sorted({path.split(".")[-1] for path in paths})


def _continued(model: nn.Module, folder: Path, config: LoraConfig) -> list[str]:
    """What a person should know of an adapter that goes on training."""
    settings = config.settings
    kind = f"rank {settings.rank}, alpha {settings.alpha:g}, dropout {settings.dropout:g}"
    notes = [f"The adapter {folder} is taken as it is: {kind}; lora_rank and its kin describe new ones."]
    base = getattr(getattr(model, "config", None), "name_or_path", None)
    if config.base_model and base and Path(config.base_model).name != Path(base).name:
        notes.append(f"That adapter was trained on {config.base_model}; the base here is {base}.")
    return notes


def _chosen(model: nn.Module, options: Any, fit: Fit) -> list[str]:
    """What was decided for a new adapter that the options do not say."""
    notes = []
    if options.additional_target:
        more = f" and {len(fit.whole) - 3} more" if len(fit.whole) > 3 else ""
        notes.append(f"Trained whole beside the adapter: {', '.join(fit.whole[:3])}{more} (additional_target).")
    elif fit.whole:
        names = " and ".join(fit.config.modules_to_save)
        notes.append(f"The vocabulary has grown, so {names} are trained whole beside the adapter.")
    # Experts that are one tensor of three dimensions are no layers, and neither is a convolution (Mamba).
    solid = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    fused = [name for name in solid if "experts" in name]
    others = [name for name in solid if name not in fused]
    for kind, frozen in (("fused expert weights", fused), ("convolutions", others)):
        if frozen:
            notes.append(f"{len(frozen)} {kind} get no adapter and stay frozen: {frozen[0]}, ...")
    return notes


def load_adapter(model: nn.Module, folder: Path, name: str = DEFAULT) -> LoraConfig:
    """Put the adapter in ``folder`` into the model, under ``name``, active and frozen.

    Raises:
        UserError: where it does not fit.
    """
    problems = check_fit(model, folder)
    if problems:
        raise UserError(problems)
    from safetensors.torch import load_file

    fit = Fit.of_folder(folder)
    add_adapter(model, name, fit.config, fit.targets, fit.whole)
    state = load_file(folder / WEIGHTS_NAME)
    load_adapter_state(model, name, state)
    for key, path in fit.base.items():
        _set_parameter(model, path, state[key])
    for path in [*fit.targets, *fit.whole]:
        model.get_submodule(path).requires_grad_(False)
    return fit.config


def _set_parameter(model: nn.Module, path: str, value: Tensor) -> None:
    """Put a weight of the model itself, saved with an adapter, where it belongs, whether or not that is wrapped now."""
    holder, _, leaf = path.rpartition(".")
    module = model.get_submodule(holder)
    if isinstance(module, LoraLayer):
        module = module.base_layer
    with torch.no_grad():
        module.get_parameter(leaf).copy_(value)


def save_adapter(model: nn.Module, config: LoraConfig, folder: Path, name: str = DEFAULT) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.cpu().contiguous().clone() for key, tensor in adapter_state(model, name).items()}
    save_file(state, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    write_config(model, config, folder)


def write_config(model: nn.Module, config: LoraConfig, folder: Path) -> None:
    """Write ``adapter_config.json``."""
    is_stored_transposed = any(is_conv1d(module) for module in model.modules())
    replace(config, fan_in_fan_out=is_stored_transposed).write(folder)


def learning_rates(model: nn.Module, options: Any) -> dict[str, float]:
    """Parameter name -> its own learning rate, for those that LoRA+ gives one; the others learn at ``learning_rate``.

    Source: Hayou et al. 2024, section 4, https://arxiv.org/abs/2402.12354
    """
    if options.loraplus_lr_ratio is None:
        return {}
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_embedding_B." in name:
            found[name] = options.loraplus_lr_embedding
        elif parameter.requires_grad and ".lora_B." in name:
            found[name] = options.learning_rate * options.loraplus_lr_ratio
    return found
