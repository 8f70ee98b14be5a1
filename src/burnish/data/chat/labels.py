"""Encoded conversations and their labels, which select the trained tokens.

A conversation is a list of segments of tokens, alternating between a prompt and the response to it. ``slots.py`` and
``chat_template.py`` produce the tokens, this file sets the labels, ``truncate.py`` shortens segments to ``cutoff_len``,
and ``encoding.py`` concatenates them to rows.

By default all responses are trained, including the end token that the template writes after each. ``LearnOptions``
change this for the whole run, ``train`` and ``weight`` of a message for that message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, Protocol, TypeAlias

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.data.images.image_file import ImageFile
from burnish.loop.types import IGNORE_INDEX, Ids, Message

EMPTY_MESSAGE = Message("user", "")


@dataclass(frozen=True)
class Segment:
    """A prompt or a response, including the text that the template writes before it.

    Args:
        ids: T token ids.
        content: returns T flags, true for tokens that truncation may remove; called only for rows that are too long.
        message: the message, for its ``train`` and ``weight``.
        begin: position of the first token that belongs to the message rather than to the start of the conversation.
        trailing: number of final tokens that come after the message and are not trained.
        labels: T labels; empty until they are set.
        weights: T loss weights, or None if all are 1.
        images: images whose tokens are in the segment; ``begin`` and ``end`` are positions in the segment.
    """

    ids: Ids
    content: Callable[[], Sequence[bool]]
    message: Message = EMPTY_MESSAGE
    begin: int = 0
    trailing: int = 0
    labels: Ids = field(default_factory=lambda: array("i"))
    weights: Sequence[float] | None = None
    images: Sequence[ImageFile] = ()

    @property
    def is_trained(self) -> bool:
        return self.labels != masked_labels(len(self.labels))

    def with_labels(self, labels: Ids, weights: Sequence[float] | None) -> Segment:
        """Return the segment with labels and loss weights."""
        return Segment(
            self.ids, self.content, self.message, self.begin, self.trailing, labels, weights, self.images
        )  # faster than dataclasses.replace

    def with_images(
        self, ids: Ids, content: Callable[[], Sequence[bool]], begin: int, images: Sequence[ImageFile]
    ) -> Segment:
        """Return a copy of a segment without labels, with the token ids of its images inserted."""
        return Segment(ids, content, self.message, begin, self.trailing, images=images)

    def only(self, positions: Sequence[int]) -> Segment:
        """Return the segment with only the tokens at these positions."""
        weights = self.weights and [self.weights[i] for i in positions]
        ids, labels = (array("i", [values[i] for i in positions]) for values in (self.ids, self.labels))
        images = [
            replace(one, begin=bisect_left(positions, one.begin), end=bisect_left(positions, one.end))
            for one in self.images
        ]
        return replace(self, ids=ids, labels=labels, weights=weights, images=images)


Turn: TypeAlias = tuple[Segment, Segment]
"""A prompt and the response to it."""


@dataclass(frozen=True)
class EncodedConversation:
    """A labelled conversation, or a text as a single turn.

    Args:
        turns: turns in order.
        closing: token that closes the row, if turns have no end token of their own.
        ends: end tokens, at least one of which should be trained; empty if none should be.
    """

    turns: Sequence[Turn]
    closing: int | None = None
    ends: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return sum(len(segment.ids) for segment in chain(*self.turns)) + (self.closing is not None)

    @property
    def images(self) -> list[ImageFile]:
        """Images of all segments, in order."""
        return [image for segment in chain(*self.turns) for image in segment.images]


def masked_labels(length: int) -> Ids:
    """Return ``length`` labels ``IGNORE_INDEX``."""
    return _MASKED * length


_MASKED = array("i", [IGNORE_INDEX])


def concatenate_ids(parts: Iterable[Ids]) -> Ids:
    """Concatenate ids or labels."""
    found = array("i")
    for part in parts:
        found += part
    return found


class TemplateChoices(Protocol):
    """Options that a template reads."""

    default_system: str | None
    enable_thinking: bool | None
    preserve_thinking: bool
    tool_format: str | None
    mask_history: bool
    train_on_prompt: bool
    train_on_eos: Literal["turn", "all", "last", "none"]
    cutoff_len: int
    truncation: Literal["content", "llamafactory"]
    on_too_long: Literal["truncate", "drop", "raise"]


@dataclass
class LearnOptions:
    """Trained tokens."""

    train_on_prompt: bool = option(False, "Compute the loss on the prompt as well as the response.")
    mask_history: bool = option(False, "Compute the loss on the last response of a conversation only.")
    train_on_eos: Literal["turn", "all", "last", "none"] = option(
        "turn",
        "Which EOS tokens contribute to the loss: those of trained turns (turn), all turns (all), the last "
        "turn (last), or none.",
    )


@check
def check_learning(options: TemplateChoices) -> Iterator[Problem]:
    if options.train_on_prompt and options.mask_history:
        what = "train_on_prompt and mask_history cannot be combined."
        yield Problem(what, remedy="Remove one of them.", option=("train_on_prompt", "mask_history"))


@dataclass(frozen=True)
class EndTokens:
    """Ids of the end tokens, and the id that closes the row if turns have no end token."""

    token_ids: frozenset[int]
    closing_id: int | None = None


def label_turns(turns: Sequence[Turn], options: TemplateChoices, ends: EndTokens) -> list[Turn]:
    """Return the turns of a conversation with labels."""
    before = [None, *(response.message for _, response in turns)]
    last = len(turns) - 1
    return [_label_turn(*turn, before[at], at == last, options, ends) for at, turn in enumerate(turns)]


def _label_turn(
    prompt: Segment, response: Segment, before: Message | None, is_last: bool, options: TemplateChoices, ends: EndTokens
) -> Turn:
    """Return the turn with labels. ``before`` is the response that precedes it."""
    labels, weight_of_end = _prompt_labels(prompt, options, ends), None
    if labels and ends.closing_id is not None and _closes(before, is_last, options):
        # Such a template has no end token between turns. The label of the next turn's first token is therefore EOS, so
        # that the preceding response learns to stop (LLaMA-Factory's efficient_eos).
        labels[0], weight_of_end = ends.closing_id, before.weight if before else 1.0
    return (
        prompt.with_labels(labels, _prompt_weights(prompt, response.message.weight, weight_of_end)),
        response.with_labels(
            _response_labels(response, is_last, options, ends), _response_weights(response, prompt.message.weight)
        ),
    )


def _response_labels(response: Segment, is_last: bool, options: TemplateChoices, ends: EndTokens) -> Ids:
    ids, train = response.ids, response.message.train
    is_trained = train if train is not None else is_last or not options.mask_history
    labels = ids[:] if is_trained else masked_labels(len(ids))
    end = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in ends.token_ids), len(ids))  # the last end token
    if options.train_on_eos == "none" or (options.train_on_eos == "last" and not is_last):
        labels[end:] = masked_labels(len(labels) - end)
    elif options.train_on_eos == "all":
        labels[end : end + 1] = ids[end : end + 1]
    if response.trailing:
        labels[-response.trailing :] = masked_labels(response.trailing)
    return labels


def _prompt_labels(prompt: Segment, options: TemplateChoices, ends: EndTokens) -> Ids:
    ids, begin = prompt.ids, prompt.begin
    labels = ids[:] if options.train_on_prompt else masked_labels(len(ids))
    if prompt.message.train is not None:
        labels[begin:] = ids[begin:] if prompt.message.train else masked_labels(len(ids) - begin)
    if options.train_on_eos == "turn":
        return labels
    for at, token in enumerate(ids):
        if token in ends.token_ids and (options.train_on_eos != "all" or at >= begin):
            labels[at] = token if options.train_on_eos == "all" else IGNORE_INDEX
    return labels


def _closes(before: Message | None, is_last: bool, options: TemplateChoices) -> bool:
    """Return whether the first token of a prompt is trained as the end of the response before it.

    With ``mask_history``, LLaMA-Factory trains these end tokens even for masked responses. burnish does the same.
    """
    if options.train_on_eos in ("last", "none"):
        return False
    if before is not None and before.train is not None:
        return before.train or bool(options.train_on_eos == "all")
    return not is_last if options.mask_history else before is not None


def _prompt_weights(prompt: Segment, of_response: float, of_end: float | None) -> list[float] | None:
    """Return the loss weights of a prompt's tokens, or None if all are 1.

    Args:
        of_response: weight of the response.
        of_end: weight of the first token if it is trained as the end of the previous response, else None.
    """
    if {prompt.message.weight, of_response, of_end or 1.0} == {1.0}:
        return None
    weights = [1.0] * prompt.begin + [prompt.message.weight] * (len(prompt.ids) - prompt.begin)
    if of_end is not None:
        weights[0] = of_end
    return weights


def _response_weights(response: Segment, of_prompt: float) -> list[float] | None:
    weight = response.message.weight
    return None if weight == of_prompt == 1.0 else [weight] * len(response.ids)
