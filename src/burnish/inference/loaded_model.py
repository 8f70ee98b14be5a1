"""All that is needed for answers beside the engine: ``loading.py`` makes it, an engine is made over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from burnish.data.chat.rows import Template
from burnish.inference.images.reading import ImageReader
from burnish.inference.replies.reply_forms import ReplyForm
from burnish.inference.slots import Through
from burnish.inference.types import Sampling
from burnish.losses.reward import RewardHead

if TYPE_CHECKING:
    from burnish.inference.options import AnsweringOptions


@dataclass(frozen=True)
class LoadedModel:
    """Everything beside the engine.

    Args:
        name: of the model, as a person would call it: the last part of its path.
        model: None where another process answers.
        form: how replies are read.
        stop_ids: tokens that end an answer.
        defaults: sampling where a request says nothing: the options', and where they are at their defaults the model's.
        max_new_tokens: the longest answer where a request says nothing.
        context: tokens that prompt and answer may have together.
        adapters: names beside the model itself.
        through: lets each row of a pass go through its adapter.
        images: reads the images of prompts; None where the model reads text only, or another process answers.
        head: of a reward model, which gives scores and writes no answers.
        notes: sentences for a person.
        template_notes: those of them that say how prompts differ from the model's own.
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
    through: Through | None = None
    notes: tuple[str, ...] = ()
    head: RewardHead | None = None
    template_notes: tuple[str, ...] = ()
    images: ImageReader | None = None
