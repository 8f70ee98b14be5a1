"""The rows of a dataset: in memory, in a file, or encoded on access (streaming).

Indexing returns a row, or None for an example without a row. Lengths are known without reading rows, unless streaming.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from burnish.config.errors import UserError
from burnish.data.batches.batching import (
    PackingChoices,
    PackPlan,
    lengths_of,
    packing_strategy_of,
    packs_rows,
    plan_packs,
)
from burnish.data.stats import DataStats
from burnish.loop.types import Row
from burnish.utils.sequences import LazySequence

RowT_co = TypeVar("RowT_co", bound="Row | None", covariant=True)


class RowSet(LazySequence[RowT_co]):
    """Base class for the rows of a dataset. Subclasses define ``__len__`` and ``item``."""

    is_streamed = False
    """True if rows are encoded on access, so that their lengths and statistics are not known in advance."""

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each row: the sum over its sequences."""
        return [0 if row is None else sum(lengths_of(row)) for row in self]

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        """Number of tokens of each sequence, in no particular order. A pack or a pair has several sequences."""
        return [length for row in self if row is not None for length in lengths_of(row)]

    @property
    def num_examples(self) -> Sequence[int] | None:
        """Number of examples in each row, if rows are packs; None: one per row."""
        return None

    @cached_property
    def has_images(self) -> bool:
        """Whether any row has images; always True when streaming, where rows are not known in advance."""
        return self.is_streamed or any("images" in row for row in self if row is not None)

    def origin(self, index: int) -> int:
        """Return the index of the example that a row was made from."""
        return index

    def keys_of_step(self, chosen: Sequence[int]) -> Mapping[int, Any]:
        """Return a key for each row of a step (all ranks, in order).

        Keys other than the index are needed if a row depends on the other rows of its step.
        """
        return dict(zip(chosen, chosen, strict=True))

    def statistics(self) -> DataStats:
        """Return statistics of what was dropped or truncated since the run began."""
        return DataStats()


class RowsOver(RowSet["Row | None"]):
    """Wrapper that adds columns to rows. Lengths and statistics are those of the wrapped rows."""

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

    @property
    def num_examples(self) -> Sequence[int] | None:
        return self.rows.num_examples

    def origin(self, index: int) -> int:
        return self.rows.origin(index)

    def statistics(self) -> DataStats:
        return self.rows.statistics()


class ListedRows(RowSet[Row]):
    """Rows in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Row:
        return self.rows[index]

    @cached_property
    def num_examples(self) -> Sequence[int]:
        return [len(row.get("seq_lengths") or (row,)) for row in self.rows]


class PackedRows(RowSet[Row]):
    """The packs of a dataset, each assembled when it is accessed. Only the plan is held in memory.

    Args:
        rows: rows before packing.
        plan: pieces of each pack.
    """

    def __init__(self, rows: RowSet[Row], plan: PackPlan) -> None:
        self.rows, self.plan = rows, plan

    def __len__(self) -> int:
        return len(self.plan)

    def item(self, index: int) -> Row:
        return self.plan.assemble(self.rows, index)

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each pack."""
        pieces = map(self.plan.pieces, range(len(self)))
        return array("q", (sum(end - begin for _, begin, end in pack) for pack in pieces))

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        return array("q", (end - begin for begin, end in zip(self.plan.begins, self.plan.ends, strict=True)))

    @cached_property
    def num_examples(self) -> Sequence[int]:
        """Number of pieces of each pack."""
        return array("q", (end - begin for begin, end in pairwise(self.plan.splits)))

    @property
    def has_images(self) -> bool:
        return self.rows.has_images

    def statistics(self) -> DataStats:
        return self.rows.statistics()


def pack_rows(
    rows: RowSet[Row], options: PackingChoices, default: str | None, capacity: int, is_eval: bool = False
) -> RowSet[Row]:
    """Return packs of ``capacity`` tokens if the options enable packing, otherwise ``rows``.

    Raises:
        UserError: if ``drop_incomplete_block`` drops all tokens, or a pack would split an image.
    """
    if not packs_rows(options, default, is_eval):
        return rows
    strategy = packing_strategy_of(options, default)
    packs = PackedRows(rows, plan_packs(rows.lengths, capacity, strategy, options.drop_incomplete_block))
    if not packs and (tokens := sum(rows.lengths)):
        what = f"The {'evaluation' if is_eval else 'training'} set has {tokens:,} tokens, less than one block of "
        what += f"cutoff_len {capacity:,}, and drop_incomplete_block drops incomplete blocks."
        raise UserError(
            what, remedy="Remove drop_incomplete_block, or lower cutoff_len.", option="drop_incomplete_block"
        )
    if strategy != "bfd" and rows.has_images:
        deque(packs, maxlen=0)  # raises an error before training
    return packs
