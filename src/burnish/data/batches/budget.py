"""Token budget: split the rows of a step into as few micro-batches as possible, each within a maximum number of tokens.

Batch size, accumulation and number of ranks still determine the rows of a step, and therefore its update
(``loop/loop.py`` divides by ``num_items`` of the whole step). Only the division into micro-batches changes: short rows
share a micro-batch, a long row has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from burnish.config.errors import Problem
from burnish.data.batches.batching import pack_best_fit


@dataclass(frozen=True)
class Budget:
    """Maximum number of tokens in a micro-batch, including padding and image patches.

    A patch counts as one token, because the activations of both take about the same memory. A row whose patches alone
    exceed the budget gets a micro-batch of its own.

    Args:
        max_tokens: the maximum.
        pads: whether rows are padded to the longest row of their micro-batch.
    """

    max_tokens: int
    pads: bool

    def micro_batches(
        self, items: Sequence[int], lengths: Sequence[int], patches: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Divide ``items`` into micro-batches, within which they keep their order. ``lengths[item]`` is at most
        ``max_tokens``.

        Args:
            patches: image patches of each item; None if there are no images.
        """
        of_images = [0] * len(items) if patches is None else [patches[item] for item in items]
        of_rows = [lengths[item] for item in items]
        if self.pads:
            parts = self._side_by_side(of_rows, of_images)
        else:
            costs = [min(self.max_tokens, sum(both)) for both in zip(of_rows, of_images, strict=True)]
            parts = pack_best_fit(costs, self.max_tokens)
        return [[items[place] for place in sorted(part)] for part in parts]

    def _side_by_side(self, lengths: Sequence[int], patches: Sequence[int]) -> list[list[int]]:
        """Group rows of similar length: beginning with the longest row, as many rows as fit when padded to its
        length."""
        parts: list[list[int]] = []
        for place in sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True):
            for part in parts:
                of_images = patches[place] + sum(patches[other] for other in part)
                if (len(part) + 1) * max(1, lengths[part[0]]) + of_images <= self.max_tokens:
                    part.append(place)
                    break
            else:
                parts.append([place])
        return parts


def check_budget(max_tokens: int | None, longest: int) -> Iterator[Problem]:
    """Yield a problem if the longest row or pack exceeds the budget, because rows are never split."""
    if max_tokens is None or longest <= max_tokens:
        return
    what = f'"max_tokens_per_batch" ({max_tokens:,}) is smaller than the longest example ({longest:,} tokens).'
    yield Problem(
        what,
        remedy=f"Set max_tokens_per_batch to at least {longest}, or reduce cutoff_len.",
        option="max_tokens_per_batch",
    )
