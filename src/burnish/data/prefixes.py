"""What several sequences of a micro-batch begin with, found so that it is computed once.

In: sequences (token ids and labels). Out: segments, each a piece of one sequence and the segments that it goes on from;
together they hold every token that has to be computed. A system prompt, the description of tools, the turns before the
one that is learned: under causal attention their hidden states do not depend on what follows, so rows that share them
share them to the last layer, and their gradients add up. What is shared ends before the first position that predicts a
learned token: from there on each row has a loss of its own.

    rows      a b c d e        segments   0  a b c
              a b c f g h                 1  d e        goes on from 0
              x y                         2  f g h      goes on from 0
                                          3  x y
"""

# T tokens of a sequence

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from burnish.core.types import IGNORE_INDEX, Row

_LEAST_SPARED = 32
"""Tokens that a shared segment has to spare: about what it costs a small model to attend to it from elsewhere."""


@dataclass(frozen=True)
class Segment:
    """
    Args:
        sequence: the one that it is cut from, by its number.
        begin, end: its tokens there.
        path: numbers of the segments that stand before it, from the first on.
    """

    sequence: int
    begin: int
    end: int
    path: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.end - self.begin


def segments(sequences: Sequence[Row], least_spared: int = _LEAST_SPARED) -> list[Segment] | None:
    """The tokens of all sequences, those that they share once; a segment stands behind those that it goes on from.

    Returns:
        None where nothing is shared.
    """
    shareable = [_shareable(sequence) for sequence in sequences]
    # Neighbours in this order have the longest beginnings in common.
    order = sorted(range(len(sequences)), key=shareable.__getitem__)
    common = [_common(shareable[a], shareable[b]) for a, b in pairwise(order)]
    found: list[Segment] = []
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while groups:
        low, high, begin, path = groups.pop()
        chosen = order[low]
        if high - low == 1:
            found.append(Segment(chosen, begin, len(sequences[chosen]["input_ids"]), path))
            continue
        end = min(common[low : high - 1])
        if (end - begin) * (high - low - 1) >= least_spared:
            path = (*path, len(found))
            found.append(Segment(chosen, begin, end, path[:-1]))
            begin = end
        parted = [low, *(place + 1 for place in range(low, high - 1) if common[place] == end), high]
        groups += [(*bounds, begin, path) for bounds in pairwise(parted)]
    return found if len(found) > len(sequences) else None


def _shareable(sequence: Row) -> list[int]:
    """The tokens before the position that predicts the first learned one; of a sequence without any, all but one."""
    ids, labels = sequence["input_ids"], sequence["labels"]
    learned = (place for place in range(1, len(labels)) if labels[place] != IGNORE_INDEX)
    return list(ids[: next(learned, len(ids)) - 1])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
