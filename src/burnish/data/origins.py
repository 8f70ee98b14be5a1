"""Map the rows of a step back to their records (``data.json, record 17``), for warnings about a bad step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from burnish.data.rows.row_set import RowSet
from burnish.data.sets.examples import Examples
from burnish.loop.types import Row


class Origins:
    """Return the places of the records in a step, given the indices of its rows or packs.

    Args:
        examples: examples of the training set, which need not be in memory.
        rows: rows before packing.
        pack: function rows -> packs, or None if rows are not packed.
    """

    def __init__(self, examples: Examples, rows: RowSet[Any], pack: Callable[[Any], Sequence[Row]] | None) -> None:
        self.place = examples.places()
        self.rows, self.pack = rows, pack

    def __call__(self, indices: Sequence[int]) -> list[str]:
        """Return the places of the records in the rows or packs ``indices``, without duplicates."""
        rows = indices if self.pack is None else [row for index in indices for row in self._rows_of(index)]
        return list(dict.fromkeys(self.place(self.rows.origin(row)) for row in rows))

    def _rows_of(self, item: int) -> list[int]:
        """Return the rows of a pack, found by packing rows of the same lengths whose tokens are their row numbers."""
        assert self.pack is not None
        lengths = (0 if row is None else len(row["input_ids"]) for row in self.rows)
        tagged = [{"input_ids": [n] * length, "labels": [n] * length} for n, length in enumerate(lengths)]
        return list(dict.fromkeys(self.pack(tagged)[item]["input_ids"]))


def origins_in_words(places: Sequence[str], most: int = 8) -> str:
    """Format places: ``data.json, record 3; data.json, record 9 and 4 more``."""
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more
