"""A token budget: the rows of a step in as few micro-batches as hold them, none larger than the memory allows.

In: which rows a rank has in a step, their lengths, and how many tokens a micro-batch may have. Out: micro-batches. The
rows of a step stay those that batch size, accumulation and ranks say, so its update does too (``core/loop.py`` divides
by the weight of the whole step); short rows then share a micro-batch, and long ones have one for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.core.errors import Problem
from burnish.data.batching import pack_best_fit


@dataclass(frozen=True)
class Budget:
    """Tokens that a micro-batch may have, padding included.

    Args:
        pads: whether rows are filled up to the longest beside them, and so cost its length.
    """

    max_tokens: int
    pads: bool

    def micro_batches(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """``items`` in micro-batches; ``lengths[item]`` is at most ``max_tokens``. Rows keep their order within one."""
        if self.pads:
            return self._side_by_side(items, lengths)
        parts = pack_best_fit([lengths[item] for item in items], self.max_tokens)
        return [[items[place] for place in sorted(part)] for part in parts]

    def _side_by_side(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Rows of similar length together: from the longest on, as many as fit at the length of the first."""
        places = sorted(range(len(items)), key=lambda place: lengths[items[place]], reverse=True)
        parts: list[list[int]] = []
        while places:
            count = max(1, self.max_tokens // max(1, lengths[items[places[0]]]))
            parts.append([items[place] for place in sorted(places[:count])])
            places = places[count:]
        return parts


def check_budget(max_tokens: int | None, longest: int) -> list[Problem]:
    """Whether the longest row or pack fits: a row is not cut in two."""
    if max_tokens is None or longest <= max_tokens:
        return []
    return [
        Problem(
            f'"max_tokens_per_batch" is {max_tokens:,}, and the longest row has {longest:,} tokens.',
            remedy=f"Set max_tokens_per_batch: {longest} or more, or a shorter cutoff_len.",
        )
    ]
