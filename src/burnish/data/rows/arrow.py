"""Encoded rows as an Arrow table that shares their memory, for the ``datasets`` library."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from burnish.data.rows.store import Rows

_FRAME = {
    "path": pa.string(), "width": pa.int32(), "height": pa.int32(), "num_bytes": pa.int64(), "modified_ns": pa.int64(),
}  # fmt: skip
_IMAGE = {
    **_FRAME, "min_pixels": pa.int64(), "max_pixels": pa.int64(), "place": pa.string(), "is_animated": pa.bool_(),
    "begin": pa.int32(), "end": pa.int32(), "frames": pa.list_(pa.struct(list(_FRAME.items()))), "fps": pa.float64(),
    "is_padded": pa.bool_(),
}  # fmt: skip
TYPES: Mapping[str, pa.DataType] = {
    "margin": pa.float32(), "label": pa.bool_(), "images": pa.list_(pa.struct(list(_IMAGE.items()))),
    "kl_images": pa.list_(pa.struct(list(_IMAGE.items()))),
}  # fmt: skip
"""Types of columns that hold one value per row or the row's images. All other columns are lists of ids or labels."""


def arrow_table(rows: Rows, names: tuple[str, ...]) -> pa.Table:
    """Return a table with the columns ``names``: those of ``TYPES`` with their type, all others as lists of int32."""
    schema = pa.schema([(name, TYPES.get(name, pa.list_(pa.int32()))) for name in names])
    blocks = [pa.table([_column(block, field) for field in schema], schema=schema) for block in rows.blocks()]
    return pa.concat_tables([schema.empty_table(), *blocks])


def _column(block: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in block.schema.names:
        return pa.nulls(len(block), field.type) if field.name in TYPES else pa.array([[]] * len(block), field.type)
    lists = block.column(field.name)
    if field.name in TYPES:  # stored as JSON bytes
        return pa.array([json.loads(bytes(value)) if value else None for value in lists.to_pylist()], field.type)
    return pa.ListArray.from_arrays(lists.offsets, lists.values)  # a row without the column has an empty list
