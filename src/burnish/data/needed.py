"""Which tokens of a micro-batch have to be computed: what several sequences begin with once, and none for nothing.

In: sequences (token ids and labels). Out: segments, each a piece of one sequence and the segments that it goes on from;
together they hold every token on whose hidden states a loss depends.

    rows      a b c d e        segments   0  a b c
              a b c f g h                 1  d         goes on from 0
              x y                         2  f g       goes on from 0
                                          3  x

A system prompt, the description of tools, the turns before the one that is learned: under causal attention their hidden
states do not depend on what follows, so rows that share them share them to the last layer, and their gradients add up.
What is shared ends before the first position that predicts a learned token: from there on each row has a loss of its
own. And nothing depends on the last learned token itself, which is predicted and predicts nothing, nor on what follows.
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
        is_last: whether its sequence ends here, so that its last token predicts the token at ``end``.
    """

    sequence: int
    begin: int
    end: int
    path: tuple[int, ...] = ()
    is_last: bool = True

    @property
    def length(self) -> int:
        return self.end - self.begin


def segments(sequences: Sequence[Row], least_spared: int = _LEAST_SPARED) -> list[Segment]:
    """The needed tokens of all sequences, those that they share once; a segment stands behind those that it goes on
    from. In the order of the sequences where nothing is shared. Nothing of one from which nothing is learned."""
    bounds = [_learned(sequence["labels"]) for sequence in sequences]
    needed = [number for number, (_, last) in enumerate(bounds) if last > 0]
    shareable = {number: list(sequences[number]["input_ids"][: bounds[number][0] - 1]) for number in needed}
    # Neighbours in this order have the longest beginnings in common.
    order = sorted(needed, key=shareable.__getitem__)
    common = [_common(shareable[a], shareable[b]) for a, b in pairwise(order)]
    found: list[Segment] = []
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while groups:
        low, high, begin, path = groups.pop()
        chosen = order[low]
        if high - low == 1:
            found.append(Segment(chosen, begin, bounds[chosen][1], path))
            continue
        end = min(common[low : high - 1])
        if (end - begin) * (high - low - 1) >= least_spared:
            path = (*path, len(found))
            found.append(Segment(chosen, begin, end, path[:-1], is_last=False))
            begin = end
        parted = [low, *(place + 1 for place in range(low, high - 1) if common[place] == end), high]
        groups += [(*parts, begin, path) for parts in pairwise(parted)]
    return found if any(segment.path for segment in found) else sorted(found, key=lambda segment: segment.sequence)


def _learned(labels: Sequence[int]) -> tuple[int, int]:
    """The places of the first and of the last token that is predicted and learned; 0 and 0 where there is none."""
    places = range(1, len(labels))
    first = next((place for place in places if labels[place] != IGNORE_INDEX), 0)
    return first, next((place for place in reversed(places) if labels[place] != IGNORE_INDEX), 0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
