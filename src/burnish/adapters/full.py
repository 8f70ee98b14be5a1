"""Full training: every weight of the model is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from burnish.adapters.base import ADAPTERS, FinetuningOptions, is_frozen, load_model_state, model_state, part_problems
from burnish.config.errors import Problem, UserError


@ADAPTERS.register("full")
class FullAdapter:
    """Trains every weight."""

    saves_whole_model = True
    file_stem = "model"

    def __init__(self, options: FinetuningOptions, folders: Sequence[Path] = ()) -> None:
        self.options, self.folders = options, list(folders)
        self.notes: list[str] = []

    def check(self, model: nn.Module) -> list[Problem]:
        problems = whole_model_problems(self.folders, self.options.finetuning_type, model)
        return [*problems, *part_problems(self.options, model)]

    def attach(self, model: nn.Module) -> nn.Module:
        frozen = is_frozen(model, self.options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point() and not frozen(name))
        return model

    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        raise UserError(
            "the reference model is the initial model, but finetuning_type "
            f"{self.options.finetuning_type} keeps no copy of its weights.",
            remedy="Set ref_model to the reference model, or set finetuning_type: lora, which uses the base "
            "model as the reference.",
            option="finetuning_type",
        )

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return model_state(model)

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        load_model_state(model, state)

    def save(self, model: nn.Module, folder: str) -> None:
        model.save_pretrained(folder)  # type: ignore[operator]

    def save_config(self, model: nn.Module, folder: str) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]


def whole_model_problems(folders: Sequence[Path], finetuning_type: str, model: nn.Module) -> Iterator[Problem]:
    """Yield problems that prevent training the model's own weights."""
    if folders:
        yield Problem(
            f"finetuning_type {finetuning_type} does not train adapters, but adapter_name_or_path is set "
            f"({', '.join(map(str, folders))}).",
            remedy="Set finetuning_type: lora to train the adapter, or merge it first with burnish export.",
            option=("finetuning_type", "adapter_name_or_path"),
        )
    if getattr(model, "quantization_method", None) is not None:
        what = f"a quantized model cannot be trained with finetuning_type {finetuning_type}."
        yield Problem(what, remedy="Set finetuning_type: lora, or remove quantization_bit.", option="finetuning_type")
