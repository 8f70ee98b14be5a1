"""A loaded model with tokenizer, template and settings: everything that inference needs besides the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from burnish.data.chat.rows import Template
from burnish.inference.images.reading import ImageReader
from burnish.inference.replies.reply_forms import ReplyForm
from burnish.inference.slots import AdapterContext
from burnish.inference.types import Sampling
from burnish.losses.reward import RewardHead

if TYPE_CHECKING:
    from burnish.inference.options import AnsweringOptions


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
