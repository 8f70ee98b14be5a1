"""Encoded rows as an Arrow table over the same memory, for the ``datasets`` library."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from burnish.data.rows.store import Column, Rows

TYPES: Mapping[str, pa.DataType] = {"margin": pa.float32(), "label": pa.bool_()}
"""Types of columns that hold one value per row; all others hold token ids, or labels."""


def arrow_table(rows: Rows, names: tuple[str, ...]) -> pa.Table:
    """These columns of the rows; lists of int32, which share the memory of the rows, but for those of ``TYPES``."""
    return pa.table({name: _column(rows.columns.get(name), len(rows), TYPES.get(name)) for name in names})


def _column(column: Column | None, length: int, kind: pa.DataType | None) -> pa.Array:
    if kind is not None:
        single = [None if column is None else column.of(index) for index in range(length)]
        return pa.array(single).cast(kind)
    values: Any = array("i") if column is None else column.values
    ends: Any = array("q", [0] * length) if column is None else column.ends
    offsets = np.zeros(length + 1, np.int64)
    offsets[1:] = _numbers(ends, np.int64)
    made = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(_numbers(values, np.int32)))
    return made.cast(pa.list_(pa.int32())) if len(values) < 2**31 else made


def _numbers(values: Any, kind: Any) -> Any:
    return np.frombuffer(values, kind) if len(values) else np.zeros(0, kind)
