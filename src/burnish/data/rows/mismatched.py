"""KTO rows with a mismatched completion from the same step, for the KL term (``kl_pairing: group``).

Each row gets the completion of the nearest preceding row in its step whose completion differs; the search wraps around
from the first row to the last. A step covers all ranks and is ordered globally, so the pairing depends neither on
micro-batches nor on ranks. A row for which no other completion exists gets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast, overload

from burnish.data.rows.row_set import RowSet, RowsOver
from burnish.loop.types import IGNORE_INDEX, Row

Key: TypeAlias = tuple[int, int | None]
"""A row index, and the index of the row whose completion it is paired with."""
_CACHE_SIZE = 4096
"""Size of the row cache. A row is read twice: when its step is partitioned, and when it is collated."""


class RowsWithMismatched(RowsOver):
    """Rows with the columns ``kl_input_ids`` and ``kl_labels``.

    Args:
        rows: encoded rows; None for an example without a row.
        limit: maximum number of tokens of a row.
    """

    def __init__(self, rows: RowSet[Any], limit: int) -> None:
        super().__init__(rows)
        self.limit = limit
        self._recent_rows: dict[int, Row | None] = {}

    @overload
    def __getitem__(self, index: int | Key) -> Row | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row | None]: ...
    def __getitem__(self, index: int | Key | slice) -> Row | list[Row | None] | None:
        if isinstance(index, slice):
            return self.rows[index]
        return self.__getitems__([index])[0]

    def __getitems__(self, items: Sequence[int | Key]) -> list[Row | None]:
        """Return the rows with these indices or keys."""
        keys = [item if isinstance(item, tuple) else (item, None) for item in items]
        self._fetch([number for key in keys for number in key if number is not None])
        return [self._join_halves(number, other) for number, other in keys]

    def keys_of_step(self, chosen: Sequence[int]) -> Mapping[int, Key]:
        """Return the key of each row of a step.

        Args:
            chosen: row indices of the whole step, over all ranks, in order.
        """
        self._fetch(chosen)
        return keys_of(chosen, [row and answer_of(row) for row in map(self._recent_rows.get, chosen)])

    def _fetch(self, numbers: Sequence[int]) -> None:
        missing = [number for number in dict.fromkeys(numbers) if number not in self._recent_rows]
        if len(self._recent_rows) + len(missing) > _CACHE_SIZE:
            self._recent_rows = {number: self._recent_rows[number] for number in numbers if number in self._recent_rows}
        self._recent_rows.update(zip(missing, self.rows.__getitems__(missing), strict=True))

    def _join_halves(self, number: int, other: int | None) -> Row | None:
        row, beside = self._recent_rows[number], None if other is None else self._recent_rows[other]
        if row is None or beside is None:
            return row
        begin = _first_trained_position(row)
        whole = (answer_of(beside), list(beside["labels"][_first_trained_position(beside) :]))
        answer, labels = (part[: self.limit - begin] for part in whole)
        more = {"kl_input_ids": [*row["input_ids"][:begin], *answer], "kl_labels": [IGNORE_INDEX] * begin + labels}
        if images := [one for one in row.get("images", ()) if one["end"] <= begin]:
            more["kl_images"] = images
        return cast(Row, {**row, **more})


def keys_of(chosen: Sequence[int], answers: Sequence[Any]) -> dict[int, Key]:
    """Return the key of each row of a step.

    Args:
        chosen: row indices of the step, in order.
        answers: completion of each of them; a falsy value for a row without one.
    """
    found: dict[int, Key] = {}
    for place, number in enumerate(chosen):
        before = (place - back for back in range(1, len(chosen)))
        other = next((at for at in before if answers[at] and answers[at] != answers[place]), None)
        found[number] = number, None if other is None else chosen[other]
    return found


def answer_of(row: Row) -> list[int]:
    """Return the tokens of a row from the first trained token on."""
    return list(row["input_ids"][_first_trained_position(row) :])


def _first_trained_position(row: Row) -> int:
    return next(at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX)
