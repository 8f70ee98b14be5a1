"""A model before and after loading, with tokenizer, template and settings, and the adapters that it serves.

Served adapters are not merged: each row of a batch selects one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from burnish.adapters.lora import load_adapter
from burnish.adapters.lora_model import BASE as WITHOUT
from burnish.adapters.lora_model import reason_against_rows, rows_through, set_active
from burnish.config.errors import Problem, UserError
from burnish.config.options import raise_if
from burnish.data.chat.rows import Template
from burnish.data.images.family import Family
from burnish.inference.images.reading import ImageReader
from burnish.inference.replies.reply_forms import ReplyForm
from burnish.inference.slots import AdapterContext
from burnish.inference.types import BASE, Sampling
from burnish.losses.reward import RewardHead
from burnish.models.source import local_folder
from burnish.utils.json_files import read_object

if TYPE_CHECKING:
    from burnish.inference.options import AnsweringOptions


@dataclass(frozen=True)
class UnloadedModel:
    """A model whose weights are not loaded yet: its config, tokenizer and template, to tokenize and check inputs.

    Args:
        name: display name of the model.
        options: inference options, with the recorded template.
        config: config of the model.
        tokenizer: its tokenizer.
        template: its template.
        context: maximum number of tokens of prompt and response together.
        adapters: folders of its adapters, in order.
        served: name -> folder of each adapter that is served in addition to the model.
        family: family of a model that reads images.
        head: head of a reward model.
        notes: notes for the user.
        template_notes: those notes that describe how prompts differ from the model's own chat template.
        explicit: names of options that were set, even to their default value.
    """

    name: str
    options: AnsweringOptions
    config: Any
    tokenizer: Any
    template: Template
    context: int
    adapters: tuple[Path, ...]
    served: Mapping[str, Path]
    family: Family | None
    head: RewardHead | None
    notes: tuple[str, ...]
    template_notes: tuple[str, ...]
    explicit: Container[str]


@dataclass(frozen=True)
class LoadedModel:
    """Everything that inference needs besides the engine. Created by ``loading.py``.

    Args:
        name: display name of the model: the last part of its path.
        options: inference options.
        model: the model; None if another process runs it.
        form: how responses are parsed.
        stop_ids: tokens that end a response.
        defaults: default sampling settings: those of the options, or of the model where the options have defaults.
        max_new_tokens: default maximum length of a response.
        context: maximum number of tokens of prompt and response together.
        adapters: names of adapters served in addition to the model.
        adapter_context: context in which each row of a pass uses its adapter.
        notes: notes for the user.
        head: head of a reward model, which returns scores and generates no text.
        template_notes: those notes that describe how prompts differ from the model's own chat template.
        images: reads the images of prompts; None for text-only models or if another process runs the model.
    """

    name: str
    options: AnsweringOptions
    model: nn.Module | None
    tokenizer: Any
    template: Template
    form: ReplyForm
    stop_ids: tuple[int, ...]
    defaults: Sampling
    max_new_tokens: int
    context: int
    adapters: tuple[str, ...] = ()
    adapter_context: AdapterContext | None = None
    notes: tuple[str, ...] = ()
    head: RewardHead | None = None
    template_notes: tuple[str, ...] = ()
    images: ImageReader | None = None


def served_folders(options: AnsweringOptions) -> dict[str, Path]:
    """Return name -> folder of each adapter that is served in addition to the model."""
    named: dict[str, Path] = {}
    problems: list[Problem] = []
    for name, folder in (options.served_adapters or {}).items():
        if name == BASE:
            problems.append(Problem(f'"{BASE}" is reserved for the model without an adapter.', where="served_adapters"))
        try:
            named[name] = local_folder(folder, options, "served_adapters", ("adapter_*",))
        except UserError as error:
            problems += error.problems
            continue
        config = named[name] / "adapter_config.json"
        whole = read_object(config).get("modules_to_save") if config.is_file() else None
        if whole and len(options.served_adapters or ()) > 1:
            modules = ", ".join(whole)
            what = (
                f'the adapter "{name}" contains modules trained in full ({modules}) and cannot be served with other '
                "adapters."
            )
            problems.append(Problem(what, remedy="Serve it alone, as adapter_name_or_path."))
    raise_if(problems)
    return named


def load_side_by_side(model: nn.Module, folders: Mapping[str, Path]) -> AdapterContext:
    """Load adapters into the model. Returns the context in which each row uses its own adapter."""
    # The names of modules may not contain a dot, as in v1.0, or be those of methods.
    attached = {name: f"served{number}" for number, name in enumerate(folders)}
    for name, folder in folders.items():
        load_adapter(model, folder, attached[name])
        if reason := reason_against_rows(model, attached[name]):
            what = f'the adapter "{name}" cannot be served in addition to the model: {reason}.'
            remedy = "Serve it alone, as adapter_name_or_path."
            raise UserError(what, where=str(folder), remedy=remedy, option="served_adapters")
    set_active(model, [])
    model.eval()
    return partial(_rows, model, attached)


def _rows(model: nn.Module, attached: Mapping[str, str], names: Sequence[str]) -> Any:
    if all(name == BASE for name in names):
        return nullcontext()  # none is active
    return rows_through(model, [WITHOUT if name == BASE else attached[name] for name in names])
