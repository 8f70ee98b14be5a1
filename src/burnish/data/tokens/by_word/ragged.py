"""Ragged arrays: the ids of several pieces of text, concatenated, with the number of ids of each piece.

In and out: ``Found``, two arrays of numbers instead of a list for each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# P pieces, K ids of all of them.
Found: TypeAlias = "tuple[Numbers, Numbers]"
"""(K,) the ids, and (P,) the number of each piece; -1 for a piece that cannot be read by itself, which has none."""


def laid(ids: Sequence[Sequence[int] | None]) -> Found:
    """Make a ``Found`` from a list of ids for each piece."""
    counts = [-1 if some is None else len(some) for some in ids]
    return np.array([*chain.from_iterable(filter(None, ids))], np.int32), np.array(counts, np.int64)


def ended(ids: Numbers, end: int) -> Found:
    """Make a ``Found`` from ids in which ``end`` follows those of each piece."""
    is_end = ids == end
    return ids[~is_end], np.diff(np.flatnonzero(is_end), prepend=-1) - 1


def merged(these: Found, others: Found, is_these: Sequence[bool]) -> Found:
    """Merge two; ``is_these`` says for each piece of the result whether it is the next of the first or the second."""
    which = np.array(is_these, bool)
    counts, begins = np.empty(len(which), np.int64), np.empty(len(which), np.int64)
    before = 0
    for (ids, some), of_these in ((these, which), (others, ~which)):
        counts[of_these] = some
        begins[of_these] = before + starts(some)
        before += len(ids)
    return np.concatenate([these[0], others[0]])[stretches(begins, counts)], counts


def starts(counts: Numbers) -> Numbers:
    """(P,) the position at which the ids of each piece begin."""
    lengths = np.maximum(counts, 0)
    ends: Numbers = lengths.cumsum()
    return ends - lengths


def stretches(begins: Numbers, counts: Numbers) -> Numbers:
    """(K,) the positions of all ids, from the begin and the count of each piece."""
    lengths = np.maximum(counts, 0)
    ends = lengths.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    places += np.repeat(begins - (ends - lengths), lengths)
    return places
