"""The rows of a dataset: in memory, in a file, or encoded when they are used (streaming).

In: a number. Out: a row, or None where an example gives none; and what is known of rows without reading them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from burnish.data.batches.batching import PackingChoices, lengths_of, pack, packs_rows, strategy_of
from burnish.data.stats import DataStats
from burnish.loop.types import Row
from burnish.utils.sequences import OnDemand

RowT_co = TypeVar("RowT_co", bound="Row | None", covariant=True)


class RowSet(OnDemand[RowT_co]):
    """The rows of a dataset. Subclasses give ``__len__`` and ``made``."""

    is_streamed = False
    """True where rows are encoded when they are used, so that lengths and stats are not known before."""

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row; of a pack or of one of several sequences, of all of them."""
        return [0 if row is None else sum(lengths_of(row)) for row in self]

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        """Tokens of each sequence, in no order: a pack has several, and a pair."""
        return [length for row in self if row is not None for length in lengths_of(row)]

    @cached_property
    def has_images(self) -> bool:
        """Whether a row has images; taken to be so where rows are not known before."""
        return self.is_streamed or any("images" in row for row in self if row is not None)

    def origin(self, index: int) -> int:
        """The number of the example that a row was made from."""
        return index

    def keys_of_step(self, chosen: Sequence[int]) -> Mapping[int, Any]:
        """Return a key for each row of a step (of all ranks, in order), where a row depends on the others of it."""
        return dict(zip(chosen, chosen, strict=True))

    def counted(self) -> DataStats:
        """Count what was dropped or cut since the run began."""
        return DataStats()


class RowsOver(RowSet["Row | None"]):
    """Rows with more in them; what is known of the rows below holds."""

    def __init__(self, rows: RowSet[Any]) -> None:
        self.rows, self.is_streamed = rows, rows.is_streamed

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_images(self) -> bool:
        return self.rows.has_images

    @property
    def lengths(self) -> Sequence[int]:
        return self.rows.lengths

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return self.rows.sequence_lengths

    def origin(self, index: int) -> int:
        return self.rows.origin(index)

    def counted(self) -> DataStats:
        return self.rows.counted()


class ListedRows(RowSet[Row]):
    """Rows in memory, such as packs."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def made(self, index: int) -> Row:
        return self.rows[index]


def packed(
    rows: RowSet[Row], options: PackingChoices, default: str | None, capacity: int, is_eval: bool = False
) -> RowSet[Row]:
    """Pack ``rows`` into packs of ``capacity`` tokens if the options ask for it; else return them as they are."""
    if not packs_rows(options, default, is_eval):
        return rows
    return ListedRows(pack(rows, capacity, strategy_of(options, default), options.drop_incomplete_block))
