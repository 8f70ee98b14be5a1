"""A token budget: the rows of a step in as few micro-batches as possible, none with more tokens than is allowed.

In: the rows of a rank in a step, their lengths, and how many tokens a micro-batch may have. Out: micro-batches. The
rows of a step, and so its update, are still determined by batch size, accumulation and ranks (``loop/loop.py`` divides
by the weight of the whole step); only their division changes: short rows share a micro-batch, a long row has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.errors import Problem
from burnish.data.batches.batching import pack_best_fit


@dataclass(frozen=True)
class Budget:
    """Tokens that a micro-batch may have, padding included.

    Args:
        pads: whether rows are padded to the longest one beside them, and so cost its length.
    """

    max_tokens: int
    pads: bool

    def micro_batches(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Divide ``items`` into micro-batches, within which they keep their order. ``lengths[item]`` is at most
        ``max_tokens``."""
        if self.pads:
            return self._side_by_side(items, lengths)
        parts = pack_best_fit([lengths[item] for item in items], self.max_tokens)
        return [[items[place] for place in sorted(part)] for part in parts]

    def _side_by_side(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Put rows of similar length together: from the longest on, as many as fit at the length of the first."""
        places = sorted(range(len(items)), key=lambda place: lengths[items[place]], reverse=True)
        parts: list[list[int]] = []
        while places:
            count = max(1, self.max_tokens // max(1, lengths[items[places[0]]]))
            parts.append([items[place] for place in sorted(places[:count])])
            places = places[count:]
        return parts


def check_budget(max_tokens: int | None, longest: int) -> list[Problem]:
    """Check that the longest row or pack fits, because a row is never split."""
    if max_tokens is None or longest <= max_tokens:
        return []
    what = f'"max_tokens_per_batch" ({max_tokens:,}) is smaller than the longest row ({longest:,} tokens).'
    return [
        Problem(
            what,
            remedy=f"Set max_tokens_per_batch to at least {longest}, or reduce cutoff_len.",
            option="max_tokens_per_batch",
        )
    ]
