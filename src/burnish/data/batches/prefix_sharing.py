"""Prefix sharing: compute a prefix that rows have in common once, and skip tokens that no loss depends on.

In: sequences (token ids and labels). Out: segments, each a part of one sequence with the segments that precede it;
together they hold every token on whose hidden states a loss depends.

    rows      a b c d e        segments   0  a b c
              a b c f g h                 1  d         continues 0
              x y                         2  f g       continues 0
                                          3  x

Rows often share a system prompt, the description of tools, the turns before the one that is learned. Under causal
attention the hidden states of such a prefix do not depend on what follows, so they are computed once in every layer,
and the gradients of all rows add up in them. A shared prefix ends before the first position that predicts a learned
token: from there on each row has a loss of its own. The last learned token is predicted and predicts nothing, so
neither it nor what follows it is computed.
"""

# T tokens of a sequence

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

from burnish.loop.types import IGNORE_INDEX, Row
from burnish.utils.sequences import shared_beginning

_LEAST_SPARED = 32
"""Tokens that sharing has to save; fewer do not pay for the attention of a segment to keys of another one."""


@dataclass(frozen=True)
class PrefixNode:
    """A part of one sequence.

    Args:
        sequence: the number of that sequence.
        begin, end: positions of the part's tokens in it.
        path: numbers of the segments that precede the part, from the first on.
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


def segments(sequences: Sequence[Row], least_spared: int = _LEAST_SPARED) -> list[PrefixNode]:
    """Divide the needed tokens of all sequences into segments; a shared prefix is one segment. A segment comes after
    those that it continues; where nothing is shared, segments are in the order of the sequences. A sequence from which
    nothing is learned has no segment."""
    bounds = [_learned(sequence["labels"]) for sequence in sequences]
    needed = [number for number, (_, last) in enumerate(bounds) if last > 0]
    shareable = _contents(sequences, {number: bounds[number][0] - 1 for number in needed})
    # In sorted order, neighbours have the longest prefixes in common.
    order = sorted(needed, key=shareable.__getitem__)
    common = [shared_beginning(shareable[a], shareable[b]) for a, b in pairwise(order)]
    found: list[PrefixNode] = []
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while groups:
        low, high, begin, path = groups.pop()
        chosen = order[low]
        if high - low == 1:
            found.append(PrefixNode(chosen, begin, bounds[chosen][1], path))
            continue
        end = min(common[low : high - 1])
        if (end - begin) * (high - low - 1) >= least_spared:
            path = (*path, len(found))
            found.append(PrefixNode(chosen, begin, end, path[:-1], is_last=False))
            begin = end
        parted = [low, *(place + 1 for place in range(low, high - 1) if common[place] == end), high]
        groups += [(*parts, begin, path) for parts in pairwise(parted)]
    return found if any(segment.path for segment in found) else sorted(found, key=lambda segment: segment.sequence)


def _contents(sequences: Sequence[Row], lengths: Mapping[int, int]) -> dict[int, list[Any]]:
    """Comparable values for the first positions of sequences: ids, or pairs of id and hash if any row has images."""
    if not any("content_hashes" in sequences[number] for number in lengths):
        return {number: list(sequences[number]["input_ids"][:length]) for number, length in lengths.items()}
    return {
        number: list(zip(sequences[number]["input_ids"][:length], _hashes(sequences[number]), strict=False))
        for number, length in lengths.items()
    }


def _hashes(sequence: Row) -> Iterable[int]:
    return sequence.get("content_hashes") or repeat(0)


def _learned(labels: Sequence[int]) -> tuple[int, int]:
    """Positions of the first and the last token that is predicted and learned; 0 and 0 where there is none."""
    places = range(1, len(labels))
    first = next((place for place in places if labels[place] != IGNORE_INDEX), 0)
    return first, next((place for place in reversed(places) if labels[place] != IGNORE_INDEX), 0)
