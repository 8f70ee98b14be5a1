"""Which weights of a model move: the family of adapters, and what its members share.

A member is a class ``(options, folders) -> ModelAdapter``: ``options`` the flat options object, ``folders`` the local
folders of the adapters that the run begins with (``adapter_name_or_path``, resolved by ``models/``).

    model = adapter.attach(model)        # freezes, wraps, loads
    set_precision(model, torch.float32)  # what trains, in float32
    adapter.state(model)                 # what a checkpoint holds
    adapter.save(model, folder)          # what another program loads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from burnish.core.errors import Problem, UserError, did_you_mean
from burnish.core.options import option
from burnish.core.registry import Registry


class ModelAdapter(Protocol):
    """``core.types.Adapter`` with what a run asks of it besides.

    Attributes:
        saves_whole_model: whether ``save`` and ``state`` hold the model rather than an addition to it.
        file_stem: the checkpoint's name for the weights: "model" or "adapter_model".
        notes: sentences for a person: what was merged, found or chosen while attaching.
    """

    saves_whole_model: bool
    file_stem: str
    notes: list[str]

    def check(self, model: nn.Module) -> list[Problem]:
        """What would keep this adapter from being attached. ``model`` may be on the meta device."""
        ...

    def attach(self, model: nn.Module) -> nn.Module: ...
    def reference(self, model: nn.Module) -> AbstractContextManager[Any]: ...
    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Everything that training changes, in the dtype in which it is trained."""
        ...

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Raises UserError where ``state`` is another model's."""
        ...

    def save(self, model: nn.Module, folder: str) -> None: ...
    def save_config(self, model: nn.Module, folder: str) -> None:
        """What has to lie beside a checkpoint's weights for another program to load them."""
        ...


AdapterFactory: TypeAlias = Callable[[Any, Sequence[Path]], ModelAdapter]
ADAPTERS: Registry[AdapterFactory] = Registry("finetuning type")


@dataclass
class FinetuningOptions:
    """Which weights move."""

    finetuning_type: str = option(
        "lora", "Which weights are trained: all (full), some layers (freeze), or an adapter.", choices=ADAPTERS.names
    )
    print_param_status: bool = option(False, "Print name, dtype, device and trainability of every parameter.")


def finetuning_notes(options: Any) -> list[str]:
    """What was set for another finetuning type than the one that runs."""
    unread = ADAPTERS.unread(ADAPTERS.get(options.finetuning_type), options)
    return [f'"{name}" has no effect: it is not for finetuning_type {options.finetuning_type}.' for name in unread]


class ModelState:
    """The weights as the part of a checkpoint that is called "model"."""

    def __init__(self, model: nn.Module, adapter: ModelAdapter) -> None:
        self.model, self.adapter = model, adapter
        self.file_stem = adapter.file_stem

    def state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.adapter.load_state(self.model, state)


def set_precision(model: nn.Module, trainable_dtype: torch.dtype) -> None:
    """Give the parameters that train ``trainable_dtype``; the others keep the dtype they were loaded in.

    Float32 is what an update of one part in ten thousand needs to be seen: bfloat16 has eight bits (pure_bf16 accepts
    that loss). Tied weights stay tied.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trainable_dtype)


def trainable_summary(model: nn.Module) -> tuple[int, int]:
    """Parameters that train, and all; a tied weight counts once."""
    sizes = [(_size(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def _size(parameter: nn.Parameter) -> int:
    """Numbers in a parameter; bitsandbytes keeps two of 4 bits in a byte."""
    per_element = 2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else 1
    return parameter.numel() * per_element


def parameter_lines(model: nn.Module, options: Any) -> list[str]:
    """A line per parameter, where ``print_param_status`` asks for them: name, dtype, device, whether it trains."""
    if not options.print_param_status:
        return []
    return [
        f"name: {name}, dtype: {p.dtype}, device: {p.device}, trainable: {p.requires_grad}"
        for name, p in model.named_parameters()
    ]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and stored buffer; a tied weight once, under its first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what ``whole_state`` gave, bit for bit.

    Raises:
        UserError: where names or shapes differ, naming a few.
    """
    own = whole_state(model)
    raise_unless_same(own, state, "the weights")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def raise_unless_same(own: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> None:
    """Raise one UserError where two states differ in names or shapes."""
    parts = [
        f"{verb} {_few(names)}"
        for verb, names in (("lack", sorted(own.keys() - given)), ("have beyond it", sorted(given.keys() - own)))
        if names
    ]
    other = [
        f"{name} is {_shape(given[name])}, here {_shape(own[name])}"
        for name in own.keys() & given.keys()
        if own[name].shape != given[name].shape
    ]
    parts += [f"differ in shape ({_few(sorted(other))})"] if other else []
    if parts:
        raise UserError(
            Problem(
                f"{what} of the checkpoint are not this model's: they {', and '.join(parts)}.",
                remedy="Continue with the model and the adapter options that the checkpoint was written with.",
            )
        )


def unknown_names(option_name: str, wanted: Sequence[str], known: Sequence[str], what: str) -> list[Problem]:
    """A problem for each wanted name that is not known, with the names there are."""
    listed = ", ".join(list(dict.fromkeys(known))[:30])
    return [
        Problem(
            f'{option_name} "{name}" names no {what} of this model.{did_you_mean(name, known)}',
            remedy=f"There are: {listed}." if listed else "",
        )
        for name in wanted
        if name not in known
    ]


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _few(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
