"""Labels: the tokens of a conversation that are learned.

In: the turns of one conversation, encoded. Out: the same with labels and, where a message asks for it, weights.

By default the answers are learned, each with the end token that the template writes after it. ``LearnOptions`` change
this for the whole run, ``train`` and ``weight`` of a message for that message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from burnish.core.errors import Problem
from burnish.core.options import option
from burnish.core.types import IGNORE_INDEX, Ids, Message
from burnish.data.templates.truncate import Half


class TemplateChoices(Protocol):
    """The options that a template reads."""

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
    """Learned tokens of a conversation."""

    train_on_prompt: bool = option(False, "Learn the questions too, not only the answers.")
    mask_history: bool = option(False, "Learn the last answer of a conversation only.")
    train_on_eos: Literal["turn", "all", "last", "none"] = option(
        "turn",
        "Which end tokens are learned: of what is learned (turn), of every message (all), of the last answer only "
        "(last), or none.",
    )


def check_learning(options: TemplateChoices) -> list[Problem]:
    if options.train_on_prompt and options.mask_history:
        what = "train_on_prompt and mask_history contradict each other: learn everything, or the last answer only."
        return [Problem(what, remedy="Leave one of them out.")]
    return []


@dataclass(frozen=True)
class Turn:
    """A question and its answer, encoded.

    Args:
        source: all tokens up to the answer; in the first turn also the opening of the conversation.
        target: the answer's tokens, with the end token that belongs to it.
        asked_from: the position in ``source`` at which the question itself begins.
        question, answer: the messages, for their ``train`` and ``weight``.
        content: marks the tokens of source and target that may be cut when the row is too long.
        unlearned: number of tokens at the end of ``target`` that only follow the answer, and are not learned.
    """

    source: Ids
    target: Ids
    asked_from: int
    question: Message
    answer: Message
    content: Callable[[], tuple[list[bool], list[bool]]]
    unlearned: int = 0


@dataclass(frozen=True)
class Ends:
    """The ids of end tokens, and the id that closes the row where turns have no end token."""

    token_ids: frozenset[int]
    closing_id: int | None = None


def label_turns(turns: Sequence[Turn], options: TemplateChoices, ends: Ends) -> list[tuple[Half, Half]]:
    """Label each turn; returns (question, answer) in order of priority: with ``mask_history`` the last turn first."""
    before = [None, *(turn.answer for turn in turns)]
    labelled = [_label(turn, before[at], turn is turns[-1], options, ends) for at, turn in enumerate(turns)]
    return labelled[::-1] if options.mask_history else labelled


def _label(
    turn: Turn, before: Message | None, is_last: bool, options: TemplateChoices, ends: Ends
) -> tuple[Half, Half]:
    """Label question and answer of one turn; ``before`` is the answer that precedes them."""
    source, target = _source_labels(turn, options, ends), _target_labels(turn, is_last, options, ends)
    content, weight_of_end = _Once(turn.content), None
    if source and ends.closing_id is not None and _closes(before, is_last, options):
        # Such a template has no end token between turns. The label of the next turn's first token is therefore eos, so
        # that the answer before it learns to stop (LLaMA-Factory's efficient_eos).
        source[0], weight_of_end = ends.closing_id, before.weight if before else 1.0
    return (
        Half(turn.source, source, _source_weights(turn, weight_of_end), lambda: content()[0]),
        Half(turn.target, target, _target_weights(turn), lambda: content()[1]),
    )


def _target_labels(turn: Turn, is_last: bool, options: TemplateChoices, ends: Ends) -> Ids:
    is_learned = turn.answer.train if turn.answer.train is not None else is_last or not options.mask_history
    labels = turn.target[:] if is_learned else unlearned(len(turn.target))
    places = range(len(turn.target) - 1, -1, -1)
    end = next((at for at in places if turn.target[at] in ends.token_ids), len(turn.target))  # the last end token
    if options.train_on_eos == "none" or (options.train_on_eos == "last" and not is_last):
        labels[end:] = unlearned(len(labels) - end)
    elif options.train_on_eos == "all":
        labels[end : end + 1] = turn.target[end : end + 1]
    if turn.unlearned:
        labels[-turn.unlearned :] = unlearned(turn.unlearned)
    return labels


def _source_labels(turn: Turn, options: TemplateChoices, ends: Ends) -> Ids:
    labels = turn.source[:] if options.train_on_prompt else unlearned(len(turn.source))
    if turn.question.train is not None:
        asked = turn.source[turn.asked_from :]
        labels[turn.asked_from :] = asked if turn.question.train else unlearned(len(asked))
    if options.train_on_eos == "turn":
        return labels
    for at, token in enumerate(turn.source):
        if token in ends.token_ids and (options.train_on_eos != "all" or at >= turn.asked_from):
            labels[at] = token if options.train_on_eos == "all" else IGNORE_INDEX
    return labels


def _closes(before: Message | None, is_last: bool, options: TemplateChoices) -> bool:
    """Return whether the first token of a question is learned as the end of the answer before it.

    With ``mask_history`` LLaMA-Factory learns these ends even of answers that it masks; so does burnish.
    """
    if options.train_on_eos in ("last", "none"):
        return False
    if before is not None and before.train is not None:
        return before.train or bool(options.train_on_eos == "all")
    return not is_last if options.mask_history else before is not None


def unlearned(length: int) -> Ids:
    """Make ``length`` labels ``IGNORE_INDEX``."""
    return _UNLEARNED * length


_UNLEARNED = array("i", [IGNORE_INDEX])


def _source_weights(turn: Turn, weight_of_end: float | None) -> list[float] | None:
    """Loss weights of the question's tokens, or None where all are 1.

    Args:
        weight_of_end: the weight of the first token, where it is learned as the end of the answer before.
    """
    if {turn.question.weight, turn.answer.weight, weight_of_end or 1.0} == {1.0}:
        return None
    weights = [1.0] * turn.asked_from + [turn.question.weight] * (len(turn.source) - turn.asked_from)
    if weight_of_end is not None:
        weights[0] = weight_of_end
    return weights


def _target_weights(turn: Turn) -> list[float] | None:
    is_plain = turn.question.weight == turn.answer.weight == 1.0
    return None if is_plain else [turn.answer.weight] * len(turn.target)


class _Once:
    """A function without arguments that is called at most once."""

    def __init__(self, function: Callable[[], tuple[list[bool], list[bool]]]) -> None:
        self._function = function
        self._value: tuple[list[bool], list[bool]] | None = None

    def __call__(self) -> tuple[list[bool], list[bool]]:
        if self._value is None:
            self._value = self._function()
        return self._value
