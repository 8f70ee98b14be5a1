"""Encoded conversations: segments of tokens that alternate between a prompt and the response to it.

A format (``slots.py``, ``chat_template.py``) writes the tokens, ``labels.py`` sets the labels, ``truncate.py`` shortens
segments to ``cutoff_len``, and ``rows.py`` and ``preferences.py`` join them to rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from burnish.loop.types import IGNORE_INDEX, Ids, Message

NO_MESSAGE = Message("user", "")


@dataclass(frozen=True)
class Segment:
    """A prompt or a response, with everything that the template writes before it.

    Args:
        ids: T tokens.
        content: returns T flags, true where truncation may remove the token; called only for rows that are too long.
        message: the message, for its ``train`` and ``weight``.
        begin: the first token that belongs to the message, and not to the opening of the conversation.
        trailing: number of tokens at the end that follow the message, and are not trained.
        labels: T labels; empty until they are set.
        weights: T loss weights, or None where all are 1.
    """

    ids: Ids
    content: Callable[[], Sequence[bool]]
    message: Message = NO_MESSAGE
    begin: int = 0
    trailing: int = 0
    labels: Ids = field(default_factory=lambda: array("i"))
    weights: Sequence[float] | None = None

    @property
    def is_trained(self) -> bool:
        return any(label != IGNORE_INDEX for label in self.labels)

    def only(self, kept: Sequence[int]) -> Segment:
        """The segment with only the tokens at these positions."""
        weights = self.weights and [self.weights[i] for i in kept]
        ids, labels = (array("i", [values[i] for i in kept]) for values in (self.ids, self.labels))
        return replace(self, ids=ids, labels=labels, weights=weights)


Turn: TypeAlias = tuple[Segment, Segment]
"""A prompt and the response to it."""


@dataclass(frozen=True)
class EncodedConversation:
    """A conversation, or a text as one turn.

    Args:
        turns: in the order of the conversation, labelled.
        closing: the token that closes the row, where turns have no end token of their own.
        ends: end tokens, one of which should be trained; empty where none should.
    """

    turns: Sequence[Turn]
    closing: int | None = None
    ends: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return sum(len(segment.ids) for segment in chain(*self.turns)) + (self.closing is not None)


def masked(length: int) -> Ids:
    """Make ``length`` labels ``IGNORE_INDEX``."""
    return _MASKED * length


_MASKED = array("i", [IGNORE_INDEX])


def concatenated(parts: Iterable[Ids]) -> Ids:
    """Concatenate ids or labels."""
    found = array("i")
    for part in parts:
        found += part
    return found
