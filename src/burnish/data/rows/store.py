"""Encoded rows as Arrow tables: in memory, or in a folder from which they are mapped into memory.

In: rows, one at a time, with any columns: token ids, numbers, booleans, texts, bytes, lists and mappings of these. Out:
``Rows``, a sequence that returns them as they were added, arrays as lists; memory holds only their lengths.

A folder holds ``rows.arrow`` and ``rows.json``. The first consists of blocks of up to ``BLOCK_ROWS`` rows, each a whole
Arrow stream, so that a column may begin in a later block. The last block is the index: the example that each row was
made from, and the lengths of its sequences. The second file has the place and the checksum of each block, and further
facts from the writer. The index is checked when the folder is opened, and every other block when it is first read.

Raises UserError for a folder or a block that is not as it was written.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zlib import crc32

from burnish.checkpoint.manifest import own_sha256
from burnish.config.errors import Problem, UserError
from burnish.data.rows.row_set import RowSet
from burnish.loop.types import Row
from burnish.utils.json_files import read_object, write_json

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

MANIFEST = "rows.json"
BLOCKS = "rows.arrow"
LAYOUT = 4
"""Version of the layout of a folder."""
BLOCK_ROWS, BLOCK_NUMBERS = 1000, 1 << 20
"""Most rows of a block, and most numbers in the sequences of its rows before it is full."""

_ORIGIN = "origin"
_JSON = {b"written as": b"json"}
_REMEDY = "Remove the folder, and the rows are encoded again."


class Rows(RowSet[Row]):
    """Encoded rows. The lengths are known without reading a row.

    Args:
        index: a row per row: ``origin``, and the length of each column of token ids.
        blocks: number of rows -> function that returns the table, for each block in order.
        folder: where they are mapped from; None in memory.
        is_cache: see ``open_rows``.
    """

    def __init__(
        self, index: pyarrow.Table, blocks: Sequence[tuple[int, Callable[[], pyarrow.Table]]],
        folder: Path | None = None, is_cache: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.is_cache = folder, is_cache
        self.origins: array[int] = array("q", index.column(_ORIGIN).to_numpy().tobytes())
        self._index, self._blocks = index, blocks
        self._ends = list(accumulate(num_rows for num_rows, _ in blocks))
        self._opened: dict[int, list[tuple[str, Callable[[int], Any]]]] = {}  # block -> its columns

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row; of one of several sequences, of all of them."""
        return array("q", map(sum, zip(*self._lengths, strict=True)))

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        return [length for of_column in self._lengths for length in of_column]

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """Tokens of each row, by the columns that hold token ids: one, or several where a row is several sequences."""
        return [self._index.column(name).to_pylist() for name in self._index.column_names if name != _ORIGIN]

    def __len__(self) -> int:
        return len(self.origins)

    def origin(self, index: int) -> int:
        return self.origins[index]

    def made(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        if number not in self._opened:
            self._opened[number] = _columns(self._blocks[number][1]())
        at = index - (self._ends[number - 1] if number else 0)
        found = ((name, value(at)) for name, value in self._opened[number])
        return {name: value for name, value in found if value is not None}

    def tables(self) -> list[pyarrow.Table]:
        """All rows as Arrow tables, which may differ in their columns."""
        return [table() for _, table in self._blocks]

    def __reduce__(self) -> Any:
        """Pickle for another process: it maps the same file; rows in memory are copied."""
        if self.folder is not None:
            return open_rows, (self.folder, self.is_cache)
        return _in_memory, (self._index, [(num_rows, table()) for num_rows, table in self._blocks])


def _in_memory(index: pyarrow.Table, tables: Sequence[tuple[int, pyarrow.Table]]) -> Rows:
    return Rows(index, [(num_rows, lambda table=table: table) for num_rows, table in tables])  # type: ignore[misc]


def open_rows(folder: Path, is_cache: bool = False) -> Rows:
    """Open the rows of a folder. Raises UserError where its manifest, the size of its file or its index is damaged.

    Args:
        is_cache: a damaged block makes the folder invalid, so that the next run encodes the rows again.
    """
    manifest = read_rows_manifest(folder)
    with (folder / BLOCKS).open("rb") as file:
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
    *blocks, index = manifest["blocks"]
    found = [
        (block["rows"], lambda number=number, block=block: _block(folder, mapped, number, block, is_cache))
        for number, block in enumerate(blocks)
    ]
    return Rows(_block(folder, mapped, len(blocks), index), found, folder, is_cache)


def _block(folder: Path, mapped: mmap, number: int, block: Mapping[str, int], is_cache: bool = False) -> pyarrow.Table:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    content = memoryview(mapped)[block["begin"] : block["end"]]
    if crc32(content) != block["crc32"]:
        what = (
            f'block {number} of "{BLOCKS}" of the encoded rows was changed after it was written (its checksum differs).'
        )
        if is_cache:
            (folder / MANIFEST).unlink(missing_ok=True)
        remedy = "The same command encodes the rows again and continues." if is_cache else _REMEDY
        raise UserError(what, str(folder), remedy=remedy)
    return pyarrow.ipc.open_stream(pyarrow.py_buffer(content)).read_all()


def read_rows_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises UserError where it is damaged, or the file beside it has another size."""
    if not (folder / MANIFEST).is_file():
        raise UserError(f"the encoded rows have no {MANIFEST}.", str(folder), remedy=_REMEDY)
    manifest = read_object(folder / MANIFEST, _REMEDY, [("layout", int)])
    if manifest["layout"] != LAYOUT:
        raise UserError("another version of burnish wrote the encoded rows.", str(folder), remedy=_REMEDY)
    if manifest.get("sha256") != own_sha256(manifest):
        what = f'"{MANIFEST}" of the encoded rows was changed after it was written (its checksum differs).'
        raise UserError(Problem(what, str(folder), remedy=_REMEDY))
    size, expected = _size_of(folder / BLOCKS), manifest["blocks"][-1]["end"]
    if size != expected:
        what = f'"{BLOCKS}" of the encoded rows is not whole: expected {expected} bytes. Received: {size}.'
        raise UserError(what, str(folder), remedy=_REMEDY)
    return manifest


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# --- writing ----------------------------------------------------------------------------------------------------------


class RowWriter:
    """Collects rows to blocks: in a file of ``folder``, or in memory where that is None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None if folder is None else (folder / BLOCKS).open("wb")
        self._blocks: list[dict[str, int]] = []
        self._tables: list[tuple[int, pyarrow.Table]] = []
        self._rows: list[Row] = []
        self._numbers = 0
        self._origins = array("q")
        self._lengths: dict[str, array[int]] = {}

    def add(self, origin: int, row: Row) -> None:
        """Append a row; a column that is None, or an empty array, is left out.

        Args:
            origin: the index of the example that the row was made from.
        """
        for name, values in row.items():
            if name.endswith("input_ids"):
                if name not in self._lengths:
                    self._lengths[name] = array("q", [0]) * len(self._origins)
                self._lengths[name].append(len(values))
                self._numbers += len(values)
        self._origins.append(origin)
        for lengths in self._lengths.values():
            if len(lengths) < len(self._origins):
                lengths.append(0)
        self._rows.append(row)
        if len(self._rows) == BLOCK_ROWS or self._numbers >= BLOCK_NUMBERS:
            self._flush()

    def in_memory(self) -> Rows:
        """The rows added so far, in memory."""
        self._flush()
        return _in_memory(self._index(), self._tables)

    def close(self, **known: Any) -> None:
        """Finish the folder. ``known`` is written into its manifest."""
        assert self.folder is not None
        assert self._file is not None
        self._flush()
        self._write(self._index())
        self._file.close()
        manifest = {"layout": LAYOUT, "rows": len(self._origins), "blocks": self._blocks, **known}
        manifest["sha256"] = own_sha256(json.loads(json.dumps(manifest)))
        write_json(self.folder / MANIFEST, manifest, indent=1)

    def _index(self) -> pyarrow.Table:
        import pyarrow

        columns = {_ORIGIN: self._origins, **self._lengths}
        return pyarrow.table({name: _numbers(values) for name, values in columns.items()})

    def _flush(self) -> None:
        if self._rows:
            table = _table(self._rows)
            if self._file is None:
                self._tables.append((len(self._rows), table))
            else:
                self._write(table)
        self._rows, self._numbers = [], 0

    def _write(self, table: pyarrow.Table) -> None:
        import pyarrow

        assert self._file is not None
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue()
        begin = self._file.tell()
        self._file.write(content)
        self._blocks.append(
            {"begin": begin, "end": begin + len(content), "rows": table.num_rows, "crc32": crc32(content)}
        )


def _table(rows: Sequence[Row]) -> pyarrow.Table:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    names = dict.fromkeys(name for row in rows for name in row)
    made = {name: _column([row.get(name) for row in rows]) for name in names}
    fields = [pyarrow.field(name, column.type, metadata=metadata) for name, (column, metadata) in made.items()]
    return pyarrow.table([column for column, _ in made.values()], schema=pyarrow.schema(fields))


def _column(values: Sequence[Any]) -> tuple[pyarrow.Array, dict[bytes, bytes] | None]:
    """The values of a column, None where a row has none, and how they are written."""
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    if kind := _kind_of_numbers(values):
        try:
            return _lists_of_numbers(values, kind), None
        except (TypeError, OverflowError):  # numbers of several kinds, or more than 32 bits: pyarrow finds the type
            pass
    if any(map(_holds_mapping, values)):  # Arrow would give every mapping the keys of all
        return pyarrow.array([None if value is None else json.dumps(value) for value in values]), _JSON
    return pyarrow.array([value.tolist() if isinstance(value, array) else value for value in values]), None


def _kind_of_numbers(values: Sequence[Any]) -> str:
    """The type code (``array.array``) of lists of numbers; "" where the first value is something else."""
    first: Any = next((value for value in values if value is not None and not _is_scalar(value) and len(value)), None)
    if isinstance(first, array):
        return first.typecode
    return {int: "i", float: "d"}.get(type(first[0]), "") if isinstance(first, list) else ""


def _is_scalar(value: Any) -> bool:
    return not hasattr(value, "__len__")


def _lists_of_numbers(values: Sequence[Any], kind: str) -> pyarrow.Array:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    flat, ends = array(kind), array("i", [0])
    is_missing = []
    for value in values:
        is_missing.append(value is None or (isinstance(value, array) and not value))
        if value is not None:
            flat.extend(value if isinstance(value, array) and value.typecode == kind else array(kind, value))
        ends.append(len(flat))
    mask = pyarrow.array(is_missing) if any(is_missing) else None
    return pyarrow.ListArray.from_arrays(_numbers(ends), _numbers(flat), mask=mask)


def _numbers(values: array[Any]) -> pyarrow.Array:
    import numpy
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    return pyarrow.array(numpy.frombuffer(values, dtype=values.typecode) if values else numpy.zeros(0, values.typecode))


def _holds_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_holds_mapping, value)))


# --- reading ----------------------------------------------------------------------------------------------------------


def _columns(table: pyarrow.Table) -> list[tuple[str, Callable[[int], Any]]]:
    """Name, and a function from the number of a row to its value or None, of each column of a block."""
    return [(field.name, _reader(table.column(at).chunk(0), field)) for at, field in enumerate(table.schema)]


def _reader(column: pyarrow.Array, field: pyarrow.Field) -> Callable[[int], Any]:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    if isinstance(column, pyarrow.ListArray) and field.type.value_type in (pyarrow.int32(), pyarrow.float64()):
        numbers = memoryview(column.values.to_numpy())
        ends: Any = memoryview(column.offsets.to_numpy())
        is_there = column.is_valid().to_pylist() if column.null_count else None

        def numbers_of(at: int) -> Any:
            return numbers[ends[at] : ends[at + 1]].tolist() if is_there is None or is_there[at] else None

        return numbers_of
    if field.metadata == _JSON:
        return lambda at: json.loads(column[at].as_py()) if column[at].is_valid else None
    return lambda at: column[at].as_py()
