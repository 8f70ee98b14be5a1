"""Rows that know their number in the set, where something is a function of it."""

from __future__ import annotations

from typing import Any

from burnish.data.rows.row_set import RowsOver
from burnish.loop.types import Row


class NumberedRows(RowsOver):
    """Rows with a column ``row``, their number in the set."""

    def made(self, index: int) -> Row | None:
        row: Any = self.rows[index]
        return None if row is None else {**row, "row": index}
