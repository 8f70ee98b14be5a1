"""Rows that carry their index, for values that are looked up by row."""

from __future__ import annotations

from typing import Any

from burnish.data.rows.row_set import RowsOver
from burnish.loop.types import Row


class NumberedRows(RowsOver):
    """Rows with an additional column ``row``: their index in the dataset."""

    def made(self, index: int) -> Row | None:
        row: Any = self.rows[index]
        return None if row is None else {**row, "row": index}
