"""Freeze training: some of the model's own layers are trained, everything else is frozen.

In:  the number of layers counted from either end, the modules in them, and modules outside of the layers.
Out: ``requires_grad`` on exactly those parameters. The whole model is saved.
Refuses: module names that the model does not have; the error lists those that it has.

LLaMA Pro (Wu et al. 2024, section 3.2, https://arxiv.org/abs/2401.02415) inserts a new layer after each group of layers
and trains only the new ones. ``use_llama_pro`` trains the last layer of each group of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from burnish.adapters.base import ADAPTERS, FinetuningOptions, frozen_parts, unknown_names
from burnish.adapters.full import FullAdapter
from burnish.config.errors import Problem
from burnish.config.options import option, raise_if
from burnish.kernels.model_parts import has_vision_tower, part_at, parts_of


@dataclass
class FreezeOptions:
    """Freeze fine-tuning."""

    freeze_trainable_layers: int = option(
        2, "Number of layers to train: the last n, or the first n if negative. 0: freeze_extra_modules only.",
        unit="layers", aliases=("num_layer_trainable",),
    )  # fmt: skip
    freeze_trainable_modules: list[str] = option(
        ["all"], "Modules to train in those layers, by name (self_attn, mlp, q_proj, ...). all: every module.",
        aliases=("name_module_trainable",),
    )  # fmt: skip
    freeze_extra_modules: list[str] | None = option(
        None, "Additional modules to train outside the layers (lm_head, norm, embed_tokens, ...)."
    )
    use_llama_pro: bool = option(
        False,
        "Divide the layers into freeze_trainable_layers groups and train the last layer of each group "
        "(the expanded blocks of LLaMA Pro).",
    )


class FreezeChoices(FinetuningOptions, FreezeOptions):
    """Options that select the trained layers."""


@ADAPTERS.register("freeze", options=FreezeOptions)
class FreezeAdapter(FullAdapter):
    """Trains some layers of the model and freezes the rest. Saved and resumed like full training."""

    def __init__(self, options: FreezeChoices, folders: Sequence[Path] = ()) -> None:
        super().__init__(options, folders)
        self._options = options

    def check(self, model: nn.Module) -> list[Problem]:
        problems = super().check(model)
        _, layers = decoder_layers(model)
        if not layers:
            return [
                *problems,
                Problem(
                    "finetuning_type: freeze requires a model with a list of decoder layers.", option="finetuning_type"
                ),
            ]
        problems += self._check_count(len(layers))
        inside = {part for layer in layers for name, _ in layer.named_parameters() for part in name.split(".")[:-1]}
        requested = [name for name in self._options.freeze_trainable_modules if name != "all"]
        problems += unknown_names("freeze_trainable_modules", requested, sorted(inside), "module in the layers")
        outside = sorted({name for name, _ in _modules_outside_layers(model)})
        extra = self._options.freeze_extra_modules or []
        return problems + unknown_names("freeze_extra_modules", extra, outside, "module outside the layers")

    def _check_count(self, num_layers: int) -> Iterator[Problem]:
        count = self._options.freeze_trainable_layers
        if count == 0 and not (self._options.freeze_extra_modules and not self._options.use_llama_pro):
            what = (
                f"freeze_trainable_layers is 0; set 1 to {num_layers} for the last layers, or -1 to "
                f"-{num_layers} for the first."
            )
            yield Problem(what, option="freeze_trainable_layers")
        elif self._options.use_llama_pro and (count < 0 or num_layers % count):
            what = (
                f"use_llama_pro requires freeze_trainable_layers to divide the {num_layers} layers into "
                f"equal groups. Received: {count}."
            )
            yield Problem(
                what,
                remedy="Set it to the number of layers that were added to the model.",
                option=("use_llama_pro", "freeze_trainable_layers"),
            )

    def _trained_layers(self, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """The trained layers."""
        count = self._options.freeze_trainable_layers
        if self._options.use_llama_pro:
            group = len(layers) // count
            return layers[group - 1 :: group]
        return layers[-count:] if count > 0 else layers[:-count]

    def attach(self, model: nn.Module) -> nn.Module:
        raise_if(self.check(model))
        model.requires_grad_(False)
        _, layers = decoder_layers(model)
        if abs(self._options.freeze_trainable_layers) > len(layers):
            requested = abs(self._options.freeze_trainable_layers)
            self.notes.append(
                f"freeze_trainable_layers is {requested}, but the model has {len(layers)} layers: all are trained."
            )
        modules = set(self._options.freeze_trainable_modules)
        for layer in self._trained_layers(layers):
            for name, parameter in layer.named_parameters():
                if "all" in modules or modules & set(name.split(".")[:-1]):
                    parameter.requires_grad_(parameter.is_floating_point())
        for name, module in _modules_outside_layers(model):
            if name in (self._options.freeze_extra_modules or []):
                module.requires_grad_(True)
        parts = parts_of(model) if has_vision_tower(model) else {}
        frozen = frozen_parts(self._options)
        for name, parameter in model.named_parameters():
            part = part_at(name, parts)
            if part in frozen:
                parameter.requires_grad_(False)
            elif part != "language_model":
                parameter.requires_grad_(parameter.is_floating_point())
        return model


def decoder_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The decoder layers and their path: the ModuleList with the config's number of layers, else the longest."""
    parts = parts_of(model) if has_vision_tower(model) else {}
    stacks = [
        (path, list(m))
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) and part_at(path, parts) == "language_model"
    ]
    config = getattr(model, "config", None)
    expected = getattr(getattr(config, "text_config", config), "num_hidden_layers", None)
    fitting = [stack for stack in stacks if len(stack[1]) == expected] or stacks
    return max(fitting, key=lambda stack: len(stack[1]), default=("", []))


def _modules_outside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (last part of the name, module) for modules with parameters outside of the layers."""
    path, _ = decoder_layers(model)
    for name, module in model.named_modules():
        if not f"{name}.".startswith(f"{path}.") and next(module.parameters(recurse=False), None) is not None:
            yield name.split(".")[-1], module
