"""Which tokens of a conversation are learned.

In: the turns of one conversation, encoded. Out: the same with labels and, where a message asks for it, weights.

By default the answers are learned, each with the end token that the template writes after it. ``LearnOptions`` say
otherwise for the whole run, a message's ``train`` and ``weight`` for itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from burnish.core.errors import Problem
from burnish.core.options import option
from burnish.core.types import IGNORE_INDEX, Message
from burnish.data.pre_tokens import Ids
from burnish.data.truncate import Half


@dataclass
class LearnOptions:
    """What is learned of a conversation."""

    train_on_prompt: bool = option(False, "Learn the questions too, not only the answers.")
    mask_history: bool = option(False, "Learn the last answer of a conversation only.")
    train_on_eos: Literal["turn", "all", "last", "none"] = option(
        "turn",
        "Which end tokens are learned: of every learned answer, of questions too, of the last answer only, or none.",
    )


def check_learning(options: Any) -> list[Problem]:
    if options.train_on_prompt and options.mask_history:
        return [
            Problem(
                "train_on_prompt and mask_history contradict each other: learn everything, or the last answer only.",
                remedy="Leave one of them out.",
            )
        ]
    return []


@dataclass(frozen=True)
class Turn:
    """A question and its answer, encoded.

    Args:
        source: all tokens up to the answer; of the first turn also what opens the conversation.
        target: the answer's tokens, with the end token that belongs to it.
        asked_from: where in ``source`` the question itself begins.
        question, answer: the messages, for their ``train`` and ``weight``.
        content: tells which tokens of source and target may be given up when the row is too long.
        unlearned: how many tokens at the end of ``target`` only follow the answer, and are not learned.
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
    """How turns end: the ids of end tokens, and the id that closes the row where there is none per turn."""

    token_ids: frozenset[int]
    closing_id: int | None = None


def label_turns(turns: Sequence[Turn], options: Any, ends: Ends) -> list[tuple[Half, Half]]:
    """(question, answer) of each turn, labelled, in order of priority: with ``mask_history`` the last turn first."""
    by_priority = list(reversed(turns)) if options.mask_history else list(turns)
    return [_label(turn, place, turn is turns[-1], options, ends) for place, turn in enumerate(by_priority)]


def _label(turn: Turn, place: int, is_last: bool, options: Any, ends: Ends) -> tuple[Half, Half]:
    learn_answer = turn.answer.train if turn.answer.train is not None else is_last or not options.mask_history
    target = turn.target[:] if learn_answer else unlearned(len(turn.target))
    if options.train_on_eos == "none" or (options.train_on_eos == "last" and not is_last):
        end = _end_of(turn.target, ends)
        target[end:] = unlearned(len(target) - end)
    if turn.unlearned:
        target[-turn.unlearned :] = unlearned(turn.unlearned)
    content = _Once(turn.content)
    return (
        Half(turn.source, _source_labels(turn, place, options, ends), _weights(turn, "source"), lambda: content()[0]),
        Half(turn.target, target, _weights(turn, "target"), lambda: content()[1]),
    )


def _source_labels(turn: Turn, place: int, options: Any, ends: Ends) -> Ids:
    if options.train_on_prompt and turn.question.train is not False:
        return turn.source[:]
    labels = unlearned(len(turn.source))
    if turn.question.train:
        labels[turn.asked_from :] = turn.source[turn.asked_from :]
    if options.train_on_eos == "all" and ends.closing_id is None:
        for at in range(turn.asked_from, len(turn.source)):
            if turn.source[at] in ends.token_ids:
                labels[at] = turn.source[at]
    if ends.closing_id is not None and place and labels and options.train_on_eos in ("turn", "all"):
        # No end token stands between the turns of such a template; what is learned at the next turn's first token is
        # therefore eos, and the answer before it learns to stop (LLaMA-Factory's efficient_eos).
        labels[0] = ends.closing_id
    return labels


def unlearned(length: int) -> Ids:
    """So many labels of what is not learned."""
    return _UNLEARNED * length


_UNLEARNED = array("i", [IGNORE_INDEX])


def _end_of(target: Sequence[int], ends: Ends) -> int:
    """Where the last end token of an answer stands; its length where there is none."""
    return next((at for at in range(len(target) - 1, -1, -1) if target[at] in ends.token_ids), len(target))


def _weights(turn: Turn, side: Literal["source", "target"]) -> list[float] | None:
    if turn.question.weight == 1.0 and turn.answer.weight == 1.0:
        return None
    if side == "target":
        return [turn.answer.weight] * len(turn.target)
    return [1.0] * turn.asked_from + [turn.question.weight] * (len(turn.source) - turn.asked_from)


class _Once:
    """A function without arguments that is called at most once."""

    def __init__(self, function: Callable[[], tuple[list[bool], list[bool]]]) -> None:
        self._function = function
        self._value: tuple[list[bool], list[bool]] | None = None

    def __call__(self) -> tuple[list[bool], list[bool]]:
        if self._value is None:
            self._value = self._function()
        return self._value
