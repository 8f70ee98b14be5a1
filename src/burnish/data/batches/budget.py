"""Token budget: split the rows of a step into as few micro-batches as possible, each within a maximum number of tokens.

Batch size, accumulation and number of ranks still determine the rows of a step, and therefore its update
(``loop/loop.py`` divides by ``num_items`` of the whole step). Only the division into micro-batches changes: short rows
share a micro-batch, a long row has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.errors import Problem
from burnish.data.batches.batching import pack_best_fit


@dataclass(frozen=True)
class Budget:
    """Maximum number of tokens of a micro-batch, including padding.

    Args:
        max_tokens: the maximum.
        pads: whether rows are padded to the longest row of their micro-batch.
    """

    max_tokens: int
    pads: bool

    def micro_batches(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Split ``items`` into micro-batches that preserve their order.

        ``lengths[item]`` is at most ``max_tokens``.
        """
        if self.pads:
            return self._side_by_side(items, lengths)
        parts = pack_best_fit([lengths[item] for item in items], self.max_tokens)
        return [[items[place] for place in sorted(part)] for part in parts]

    def _side_by_side(self, items: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Group rows of similar length: from the longest down, as many as fit when padded to the first one."""
        places = sorted(range(len(items)), key=lambda place: lengths[items[place]], reverse=True)
        parts: list[list[int]] = []
        while places:
            count = max(1, self.max_tokens // max(1, lengths[items[places[0]]]))
            parts.append([items[place] for place in sorted(places[:count])])
            places = places[count:]
        return parts


def check_budget(max_tokens: int | None, longest: int) -> list[Problem]:
    """Return a problem if the longest row or pack exceeds the budget, because rows are never split."""
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
