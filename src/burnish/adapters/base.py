"""The registry of adapters, which select the trainable weights of a model, and their shared functions.

A member is a class ``(options, folders) -> ModelAdapter``. ``options`` is the flat options object. ``folders`` are the
local folders of the initial adapters (``adapter_name_or_path``, resolved by ``models/``).

    model = adapter.attach(model)        # freezes, wraps, loads
    parallel.move_model(model, torch.float32)   # converts the trainable weights to float32
    adapter.state(model)                 # weights for a checkpoint
    adapter.save(model, folder)          # files for other programs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from burnish.checkpoint.snapshot import named_tensors_without_duplicates
from burnish.config.checks import notes
from burnish.config.errors import Problem, UserError, did_you_mean, few, shape_in_words
from burnish.config.options import changed_options, option
from burnish.config.registry import Registry
from burnish.kernels.model_parts import PartName, has_vision_tower, part_at, parts_of
from burnish.kernels.probe import unwrap_peft


class ModelAdapter(Protocol):
    """Selects which weights are trained and how: full, freeze, LoRA.

    Attributes:
        saves_whole_model: whether ``save`` and ``state`` contain the whole model rather than an adapter.
        file_stem: file name of the weights in a checkpoint: "model" or "adapter_model".
        notes: sentences for the user about what was merged, found or chosen while attaching.
    """

    saves_whole_model: bool
    file_stem: str
    notes: list[str]

    def check(self, model: nn.Module) -> list[Problem]:
        """Return problems that prevent attaching this adapter. ``model`` may be on the meta device."""
        ...

    def attach(self, model: nn.Module) -> nn.Module: ...
    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which the model computes as it did before training."""
        ...

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The trained weights, in the dtype of training."""
        ...

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load weights. Raises UserError if ``state`` belongs to another model."""
        ...

    def save(self, model: nn.Module, folder: str) -> None: ...
    def save_config(self, model: nn.Module, folder: str) -> None:
        """Write the configuration files that other programs need to load a checkpoint's weights."""
        ...


AdapterFactory: TypeAlias = Callable[[Any, Sequence[Path]], ModelAdapter]
ADAPTERS: Registry[AdapterFactory] = Registry("finetuning type")


@dataclass
class FinetuningOptions:
    """Fine-tuning method."""

    finetuning_type: str = option(
        "lora", "Fine-tuning method: all weights (full), some layers (freeze), or an adapter.", choices=ADAPTERS.names
    )
    freeze_vision_tower: bool = option(True, "Freeze the vision tower of a vision-language model.")
    freeze_multi_modal_projector: bool = option(True, "Freeze the projector between vision tower and language model.")
    freeze_language_model: bool = option(False, "Freeze the language model of a vision-language model.")
    train_mm_proj_only: bool = option(
        False, "Train only the projector; freeze the vision tower and the language model (older LLaMA-Factory option)."
    )
    print_param_status: bool = option(False, "Print name, dtype, device and requires_grad of every parameter.")


@notes
def finetuning_notes(options: FinetuningOptions) -> list[str]:
    """Notes on options of other finetuning types."""
    unread = ADAPTERS.unread(ADAPTERS.get(options.finetuning_type), options)
    if options.finetuning_type == "peft":  # peft's config selects the layers
        unread += [name for name in _FREEZE_OPTIONS if name in changed_options(options)]
    return [f'"{name}" has no effect with finetuning_type {options.finetuning_type}.' for name in unread]


def frozen_parts(options: FinetuningOptions) -> set[PartName]:
    """The frozen parts of a vision model."""
    if options.train_mm_proj_only:
        return {"vision_tower", "language_model"}
    requested: dict[PartName, bool] = {
        "vision_tower": options.freeze_vision_tower,
        "multi_modal_projector": options.freeze_multi_modal_projector,
        "language_model": options.freeze_language_model,
    }
    return {part for part, is_frozen in requested.items() if is_frozen}


def part_problems(options: FinetuningOptions, model: nn.Module) -> list[Problem]:
    """Problems of the options that select the trained parts of a vision model."""
    if has_vision_tower(model):
        if len(frozen_parts(options)) < 3:
            return []
        what = "vision tower, projector and language model are all frozen: nothing is left to train."
        return [Problem(what, remedy="Set freeze_language_model: false.", option=tuple(_FREEZE_OPTIONS))]
    requested = [name for name, usual in _FREEZE_OPTIONS.items() if getattr(options, name) != usual]
    what = f"{type(unwrap_peft(model)).__name__} is a text-only model without a vision tower."
    return [Problem(f'"{name}" cannot be set: {what}', remedy="Remove it.", option=name) for name in requested]


_FREEZE_OPTIONS = {
    "freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False,
    "train_mm_proj_only": False,
}  # fmt: skip


def is_frozen(model: nn.Module, options: FinetuningOptions) -> Callable[[str], bool]:
    """A function from the path of a module or parameter to whether its part is frozen."""
    if not has_vision_tower(model):
        return lambda path: False
    parts, frozen = parts_of(model), frozen_parts(options)
    return lambda path: part_at(path, parts) in frozen


class ModelState:
    """The weights as the part "model" of a checkpoint."""

    def __init__(self, model: nn.Module, adapter: ModelAdapter) -> None:
        self.model, self.adapter = model, adapter
        self.file_stem = adapter.file_stem

    def state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(self.model, state)


def trainable_summary(model: nn.Module) -> tuple[int, int]:
    """(number of trainable parameters, number of all parameters). A tied weight counts once."""
    sizes = [(_num_elements(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def parameters_without_embeddings(model: nn.Module) -> int:
    """Number of parameters N: forward and backward take 6 N floating-point operations per token. An output layer that
    shares the embedding's weight counts as an embedding.

    Source: Kaplan et al. 2020, section 2.1 and appendix B, https://arxiv.org/abs/2001.08361: 2 N per token for the
    forward pass, twice as much for the backward pass, without the attention products.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(_num_elements(parameter) for parameter in model.parameters() if id(parameter) not in embeddings)


def _num_elements(parameter: nn.Parameter) -> int:
    """Number of elements of a parameter. bitsandbytes packs two 4-bit numbers into a byte."""
    per_element = 2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else 1
    # With ZeRO-3 a sharded weight is an empty tensor.
    return int(getattr(parameter, "ds_numel", parameter.numel()) * per_element)


def parameter_lines(model: nn.Module, options: FinetuningOptions) -> list[str]:
    """A line per parameter if ``print_param_status`` is set: name, dtype, device, whether it is trainable."""
    if not options.print_param_status:
        return []
    return [
        f"name: {name}, dtype: {p.dtype}, device: {p.device}, trainable: {p.requires_grad}"
        for name, p in model.named_parameters()
    ]


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer. A tied weight is listed once, under its first name."""
    return {name: tensor.detach() for name, tensor in named_tensors_without_duplicates(model).items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the result of ``model_state`` exactly.

    Raises:
        UserError: if names or shapes differ; the message contains a few of them.
    """
    own = model_state(model)
    raise_unless_same_tensors(own, state, "the weights")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def raise_unless_same_tensors(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor], what: str) -> None:
    """Raise one UserError if two states differ in names or shapes."""
    parts = [
        f"{verb} {few(names)}"
        for verb, names in (("lack", sorted(own.keys() - loaded)), ("contain unexpected", sorted(loaded.keys() - own)))
        if names
    ]
    other = [
        f"{name}: {shape_in_words(loaded[name].shape)} instead of {shape_in_words(own[name].shape)}"
        for name in own.keys() & loaded.keys()
        if own[name].shape != loaded[name].shape
    ]
    parts += [f"differ in shape ({few(sorted(other))})"] if other else []
    if parts:
        raise UserError(
            f"{what} of the checkpoint do not match this model: they {', and '.join(parts)}.",
            remedy="Use the model and the adapter options that the checkpoint was saved with.",
        )


def unknown_names(option_name: str, requested: Sequence[str], known: Sequence[str], what: str) -> list[Problem]:
    """A problem for each requested name that is not known. It lists the known names."""
    listed = ", ".join(list(dict.fromkeys(known))[:30])
    return [
        Problem(
            f'{option_name} "{name}" does not match any {what} of this model.{did_you_mean(name, known)}',
            remedy=f"Available: {listed}." if listed else "",
            option=option_name,
        )
        for name in requested
        if name not in known
    ]
