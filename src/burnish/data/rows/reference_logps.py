"""Log-probabilities of the reference model, computed once before the first step and stored with their rows.

The reference is a second model, the model without its adapter, or the policy before training, which then needs no copy.
Each row is evaluated once without gradients; training steps need no reference model.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import nn

from burnish.data.rows.row_set import RowSet, RowsOver
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Row
from burnish.utils.work import progress


class UsesReference(Protocol):
    """An objective that compares the policy with a reference model."""

    @property
    def collate(self) -> Callable[[Sequence[Row]], Batch]: ...
    def reference_columns(
        self, module: nn.Module, rows: Sequence[Row], parallel: Parallel
    ) -> dict[str, list[float]]: ...


class RowsWithReference(RowsOver):
    """Rows with one reference value per completion, after ``fill`` or ``restore``.

    Args:
        rows: encoded rows; None for an example without a row.
    """

    def __init__(self, rows: RowSet[Any]) -> None:
        super().__init__(rows)
        self.columns: dict[str, array[float]] = {}

    def item(self, index: int) -> Row | None:
        row = self.rows[index]
        completed: Any = None if row is None else {**row, **self.numbers(index)}
        return completed  # type: ignore[no-any-return]

    def numbers(self, index: int) -> dict[str, float]:
        """Return column name -> the row's reference value; NaN for rows that were not evaluated."""
        return {name: of[index] for name, of in self.columns.items()}

    def restore(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Restore the ``numbers`` of all rows from a saved list."""
        for name in numbers[0] if numbers else ():
            self.columns[name] = array("d", [one[name] for one in numbers])

    def batches(self, objective: UsesReference, size: int) -> Iterator[Batch]:
        """Yield every batch that ``fill`` evaluates, on the CPU."""
        for part in self._parts(size):
            if rows := [row for row in self.rows.__getitems__(part) if row is not None]:
                yield objective.collate(rows)

    def _parts(self, size: int) -> list[range]:
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def fill(self, objective: UsesReference, module: nn.Module, parallel: Parallel, size: int) -> None:
        """Evaluate the reference on all rows, in batches of ``size`` that are distributed over the ranks."""
        parts = self._parts(size)
        mine, found = parts[parallel.rank :: parallel.world_size], []
        with progress("Reference", len(self)) as advance:
            for at in range(-(-len(parts) // parallel.world_size)):
                part = mine[at] if at < len(mine) else parts[0]  # equal count on all ranks: each may hold a shard
                rows = {n: row for n, row in zip(part, self.rows.__getitems__(part), strict=True) if row is not None}
                columns = objective.reference_columns(module, list(rows.values()), parallel) if rows else {}
                found += [(list(rows), columns)] if at < len(mine) and rows else []
                advance(len(part) * parallel.world_size)
        for there, columns in chain.from_iterable(parallel.gather_objects(found)):
            for name, values in columns.items():
                column = self.columns.setdefault(name, array("d", [float("nan")] * len(self)))
                for number, value in zip(there, values, strict=True):
                    column[number] = value
