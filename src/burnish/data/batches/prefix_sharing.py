"""Prefix sharing: compute common prefixes of rows once, and skip tokens that do not affect the loss.

Sequences (token ids and labels) are divided into segments. Each segment is a part of one sequence and refers to the
segments that precede it. Together the segments contain every token whose hidden states affect a loss.

    rows      a b c d e        segments   0  a b c
              a b c f g h                 1  d         continues 0
              x y                         2  f g       continues 0
                                          3  x

Rows often share a system prompt, tool definitions, or the turns before the trained one. With causal attention, the
hidden states of such a prefix do not depend on what follows. They are computed once in every layer, and the gradients
of all rows are summed in them. A shared prefix ends before the first position that predicts a trained token, because
from there on each row has its own loss. The last trained token is predicted but predicts nothing, so neither it nor
later tokens are computed.
"""

# T tokens of a sequence

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

from burnish.loop.types import IGNORE_INDEX, Row
from burnish.utils.sequences import shared_beginning

_LEAST_SKIPPED = 32
"""Minimum number of tokens saved by sharing. Below it, attention to keys of other segments costs more than it saves."""


@dataclass(frozen=True)
class PrefixNode:
    """A segment: a part of one sequence.

    Args:
        sequence: index of the sequence.
        begin: position of its first token in the sequence.
        end: position after its last token.
        path: indices of the segments that precede it, first to last.
        is_last: whether the sequence ends here, so that the last token predicts the token at ``end``.
    """

    sequence: int
    begin: int
    end: int
    path: tuple[int, ...] = ()
    is_last: bool = True

    @property
    def length(self) -> int:
        return self.end - self.begin


def segments(sequences: Sequence[Row], least_skipped: int = _LEAST_SKIPPED) -> list[PrefixNode]:
    """Divide the needed tokens of all sequences into segments, with one segment per shared prefix.

    A segment comes after those that it continues. If nothing is shared, segments are in the order of the sequences. A
    sequence without trained tokens has no segment.
    """
    bounds = [_trained_range(sequence["labels"]) for sequence in sequences]
    needed = [number for number, (_, last) in enumerate(bounds) if last > 0]
    shareable = _comparable_contents(sequences, {number: bounds[number][0] - 1 for number in needed})
    # In sorted order, neighbours have the longest common prefixes.
    order = sorted(needed, key=shareable.__getitem__)
    common = [shared_beginning(shareable[a], shareable[b]) for a, b in pairwise(order)]
    nodes: list[PrefixNode] = []
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while groups:
        low, high, begin, path = groups.pop()
        chosen = order[low]
        if high - low == 1:
            nodes.append(PrefixNode(chosen, begin, bounds[chosen][1], path))
            continue
        end = min(common[low : high - 1])
        if (end - begin) * (high - low - 1) >= least_skipped:
            path = (*path, len(nodes))
            nodes.append(PrefixNode(chosen, begin, end, path[:-1], is_last=False))
            begin = end
        parted = [low, *(place + 1 for place in range(low, high - 1) if common[place] == end), high]
        groups += [(*parts, begin, path) for parts in pairwise(parted)]
    return nodes if any(segment.path for segment in nodes) else sorted(nodes, key=lambda segment: segment.sequence)


def _comparable_contents(sequences: Sequence[Row], lengths: Mapping[int, int]) -> dict[int, list[Any]]:
    """Return comparable values for the first positions of sequences: ids, or (id, hash) pairs if any row has images."""
    if not any("content_hashes" in sequences[number] for number in lengths):
        return {number: list(sequences[number]["input_ids"][:length]) for number, length in lengths.items()}
    contents = {}
    for number, length in lengths.items():
        hashes = sequences[number].get("content_hashes") or repeat(0)
        contents[number] = list(zip(sequences[number]["input_ids"][:length], hashes, strict=False))
    return contents


def _trained_range(labels: Sequence[int]) -> tuple[int, int]:
    """Return the positions of the first and last predicted and trained token, or (0, 0) if there is none."""
    places = range(1, len(labels))
    first = next((place for place in places if labels[place] != IGNORE_INDEX), 0)
    return first, next((place for place in reversed(places) if labels[place] != IGNORE_INDEX), 0)
