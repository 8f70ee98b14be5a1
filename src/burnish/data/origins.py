"""Map the rows of a step back to their records (``data.json, record 17``), for warnings about a bad step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.data.batches.batching import PackPlan
from burnish.data.rows.row_set import RowSet
from burnish.data.sets.examples import Examples


class Origins:
    """Return the places of the records in a step, given the indices of its rows or packs.

    Args:
        examples: examples of the training set, which need not be in memory.
        rows: rows before packing.
        plan: the pieces of each pack, or None if rows are not packed.
    """

    def __init__(self, examples: Examples, rows: RowSet[Any], plan: PackPlan | None) -> None:
        self.place = examples.places()
        self.rows, self.plan = rows, plan

    def __call__(self, indices: Sequence[int]) -> list[str]:
        """Return the places of the records in the rows or packs ``indices``, without duplicates."""
        plan = self.plan
        rows = indices if plan is None else [row for index in indices for row, _, _ in plan.pieces(index)]
        return list(dict.fromkeys(self.place(self.rows.origin(row)) for row in rows))


def origins_in_words(places: Sequence[str], most: int = 8) -> str:
    """Format places: ``data.json, record 3; data.json, record 9 and 4 more``."""
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more
