"""Storage of encoded rows as Arrow record batches, in memory or memory-mapped from a folder.

Rows may have any columns: lists of numbers, or JSON values. ``Rows`` returns them as they were added, with arrays as
lists. Only the lengths are held in memory.

A folder holds two files:

- ``rows.arrow``: blocks of up to ``BLOCK_ROWS`` rows. Each block is a complete Arrow stream, so that a column may first
  appear in a later block. The last block is the index: the example that each row was made from, and its lengths.
- ``rows.json``: the position and checksum of each block, and metadata of the writer.

The index is verified when the folder is opened, each other block when it is first read. Damage raises UserError.
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

from burnish.checkpoint.manifest import manifest_sha256
from burnish.config.errors import Problem, UserError
from burnish.data.rows.row_set import RowSet
from burnish.data.stats import DataStats
from burnish.loop.types import Row
from burnish.utils.json_files import read_object, write_json

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

MANIFEST = "rows.json"
BLOCKS = "rows.arrow"
LAYOUT = 5
"""Version of the folder's format."""
BLOCK_ROWS, BLOCK_NUMBERS = 1000, 1 << 20
"""Maximum number of rows per block, and the total sequence length at which a block is full."""

_ORIGIN = "origin"
_BLOCK_KEYS = ("begin", "end", "rows", "crc32")
_KINDS = {int: "i", float: "d"}  # type code of array.array for lists of this type
_REMEDY = "Delete the folder to tokenize the dataset again."


class Rows(RowSet[Row]):
    """Encoded rows. The lengths are known without reading a row.

    Args:
        index: a record batch with ``origin`` and the length of each column of token ids, for each row.
        blocks: (number of rows, function that returns the record batch) for each block, in order.
        folder: folder that the rows are mapped from; None in memory.
        is_cache: see ``open_rows``.
    """

    def __init__(
        self, index: pyarrow.RecordBatch, blocks: Sequence[tuple[int, Callable[[], pyarrow.RecordBatch]]],
        folder: Path | None = None, is_cache: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.is_cache = folder, is_cache
        self.origins = numbers_of(index.column(_ORIGIN))
        self._index, self._blocks = index, blocks
        self._ends = list(accumulate(num_rows for num_rows, _ in blocks))
        self._opened: dict[int, list[tuple[str, Callable[[int], Any]]]] = {}  # block -> its columns

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each row: the sum over its sequences."""
        return array("q", map(sum, zip(*self._lengths, strict=True)))

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        return [length for of_column in self._lengths for length in of_column]

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """Number of tokens of each row, for each column of token ids (several if a row has several sequences)."""
        return [numbers_of(self._index.column(name)).tolist() for name in self._index.schema.names if name != _ORIGIN]

    @cached_property
    def has_images(self) -> bool:
        return any("images" in block.schema.names for block in self.blocks())

    def __len__(self) -> int:
        return len(self.origins)

    def origin(self, index: int) -> int:
        return int(self.origins[index])

    def item(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        if number not in self._opened:
            block = self._blocks[number][1]()
            self._opened[number] = [
                (name, _reader(block.column(at), name, self.folder)) for at, name in enumerate(block.schema.names)
            ]
        at = index - (self._ends[number - 1] if number else 0)
        found = ((name, value(at)) for name, value in self._opened[number])
        return {name: value for name, value in found if value is not None}

    def blocks(self) -> list[pyarrow.RecordBatch]:
        """Return all rows as Arrow record batches. Columns are lists of numbers or JSON bytes, and may differ."""
        return [block() for _, block in self._blocks]

    def __reduce__(self) -> Any:
        """Pickle for another process: rows in a folder are mapped again, rows in memory are copied."""
        if self.folder is not None:
            return open_rows, (self.folder, self.is_cache)
        return _in_memory, (self._index, self.blocks())


def _in_memory(index: pyarrow.RecordBatch, blocks: Sequence[pyarrow.RecordBatch]) -> Rows:
    return Rows(index, [(block.num_rows, lambda block=block: block) for block in blocks])  # type: ignore[misc]


def open_rows(folder: Path, is_cache: bool = False) -> Rows:
    """Open the rows of a folder.

    Args:
        folder: folder written by ``RowWriter``.
        is_cache: if true, a damaged block invalidates the folder, so that the next run encodes the rows again.

    Raises:
        UserError: if the manifest, the file size or the index is damaged.
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


def _block(
    folder: Path, mapped: mmap, number: int, block: Mapping[str, int], is_cache: bool = False
) -> pyarrow.RecordBatch:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    content = memoryview(mapped)[block["begin"] : block["end"]]
    if crc32(content) != block["crc32"]:
        what = f'block {number} of "{BLOCKS}" of the tokenized dataset is corrupted (checksum mismatch).'
        if is_cache:
            (folder / MANIFEST).unlink(missing_ok=True)
        remedy = (
            "Run the same command again: the dataset is tokenized again, and the run resumes." if is_cache else _REMEDY
        )
        raise UserError(what, str(folder), remedy=remedy)
    return pyarrow.ipc.open_stream(pyarrow.py_buffer(content)).read_next_batch()


def read_rows_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder. Raises UserError if it is damaged or the size of the data file differs."""
    if not (folder / MANIFEST).is_file():
        raise UserError(f"the tokenized dataset has no {MANIFEST}.", str(folder), remedy=_REMEDY)
    manifest = read_object(folder / MANIFEST, _REMEDY, [("layout", int)])
    if manifest["layout"] != LAYOUT:
        raise UserError(
            "the tokenized dataset was written by a different version of burnish.", str(folder), remedy=_REMEDY
        )
    if manifest.get("sha256") != manifest_sha256(manifest):
        what = f'"{MANIFEST}" of the tokenized dataset is corrupted (checksum mismatch).'
        raise UserError(Problem(what, str(folder), remedy=_REMEDY))
    if not _has_known_types(manifest):
        what = f'"{MANIFEST}" of the tokenized dataset has an invalid format.'
        raise UserError(Problem(what, str(folder), remedy=_REMEDY))
    size, expected = _size_of(folder / BLOCKS), manifest["blocks"][-1]["end"]
    if size != expected:
        what = f'"{BLOCKS}" of the tokenized dataset is incomplete. Expected {expected} bytes. Received: {size}.'
        raise UserError(what, str(folder), remedy=_REMEDY)
    return manifest


def _has_known_types(manifest: Mapping[str, Any]) -> bool:
    """Whether the fields that are read have the types that ``RowWriter.close`` gives them."""
    blocks, made_from = manifest.get("blocks"), manifest.get("made_from", {})
    if not (isinstance(blocks, list) and blocks and isinstance(made_from, dict)):
        return False
    numbers = [block.get(name) if isinstance(block, dict) else None for block in blocks for name in _BLOCK_KEYS]
    try:
        numbers.append(DataStats.from_json(manifest.get("stats", {"seen": 0, "records": []})).seen)
    except (KeyError, TypeError, ValueError):
        return False
    return all(type(number) is int for number in numbers)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# --- writing ----------------------------------------------------------------------------------------------------------


class RowWriter:
    """Writes rows in blocks to a file of ``folder``, or to memory if ``folder`` is None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None if folder is None else (folder / BLOCKS).open("wb")
        self._blocks: list[dict[str, int]] = []
        self._in_memory: list[pyarrow.RecordBatch] = []
        self._rows: list[Row] = []
        self._numbers = 0
        self._origins = array("q")
        self._lengths: dict[str, array[int]] = {}

    def add(self, origin: int, row: Row) -> None:
        """Append a row. Columns that are None or an empty array are omitted.

        Args:
            origin: index of the example that the row was made from.
            row: column name -> value.
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
        return _in_memory(self._index(), self._in_memory)

    def close(self, **known: Any) -> None:
        """Finish the folder. ``known`` is added to its manifest."""
        assert self.folder is not None
        assert self._file is not None
        self._flush()
        self._write(self._index())
        self._file.close()
        manifest = {"layout": LAYOUT, "rows": len(self._origins), "blocks": self._blocks, **known}
        manifest["sha256"] = manifest_sha256(json.loads(json.dumps(manifest)))
        write_json(self.folder / MANIFEST, manifest, indent=1)

    def _index(self) -> pyarrow.RecordBatch:
        return _batch({name: _numbers(values) for name, values in {_ORIGIN: self._origins, **self._lengths}.items()})

    def _flush(self) -> None:
        if self._rows:
            names = dict.fromkeys(name for row in self._rows for name in row)
            block = _batch({name: _column([row.get(name) for row in self._rows]) for name in names})
            if self._file is None:
                self._in_memory.append(block)
            else:
                self._write(block)
        self._rows, self._numbers = [], 0

    def _write(self, batch: pyarrow.RecordBatch) -> None:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]

        assert self._file is not None
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        content, begin = sink.getvalue(), self._file.tell()
        self._file.write(content)
        self._blocks.append(
            {"begin": begin, "end": begin + len(content), "rows": batch.num_rows, "crc32": crc32(content)}
        )


# pyarrow.array and pyarrow.table import pandas (0.4 s, 40 MB); arrays built from buffers do not.


def _batch(columns: Mapping[str, pyarrow.Array]) -> pyarrow.RecordBatch:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    return pyarrow.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _column(values: Sequence[Any]) -> pyarrow.Array:
    """Build a column: lists of numbers natively, any other value as JSON text. None means that a row has no value."""
    lists = [value for value in values if isinstance(value, list | array)]
    first: Any = next(filter(len, lists), [0])
    kind = first.typecode if isinstance(first, array) else _KINDS.get(type(first[0]))
    if lists and kind:
        try:
            return _lists(kind, values)
        except (TypeError, OverflowError):  # values of several types, or of more than 32 bits
            pass
    written = [None if value is None else array("B", _as_json(value).encode()) for value in values]
    return _lists("B", written)


def _as_json(value: Any) -> str:
    return json.dumps(value.tolist() if isinstance(value, array) else value)


def _lists(kind: str, values: Sequence[Any]) -> pyarrow.Array:
    """Build an array with a list of numbers per value; None and an empty ``array`` become null."""
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    flat, ends, valid = array(kind), array("i", [0]), bytearray(-(-len(values) // 8))
    for number, value in enumerate(values):
        if value is not None:
            flat.extend(value if isinstance(value, array) and value.typecode == kind else array(kind, value))
        if value is not None and not (isinstance(value, array) and not value):
            valid[number // 8] |= 1 << number % 8
        ends.append(len(flat))
    numbers = _numbers(flat)
    buffers = [pyarrow.py_buffer(valid), pyarrow.py_buffer(ends)]
    return pyarrow.Array.from_buffers(pyarrow.list_(numbers.type), len(values), buffers, children=[numbers])


def _numbers(values: array[Any]) -> pyarrow.Array:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]

    types = {"B": pyarrow.uint8(), "i": pyarrow.int32(), "q": pyarrow.int64(), "d": pyarrow.float64()}
    return pyarrow.Array.from_buffers(types[values.typecode], len(values), [None, pyarrow.py_buffer(values)])


# --- reading ----------------------------------------------------------------------------------------------------------


def numbers_of(column: pyarrow.Array) -> memoryview[Any]:
    """Return the numbers of an array without nulls, sharing its memory."""
    kind = {"uint8": "B", "int32": "i", "int64": "q", "double": "d"}[str(column.type)]
    content: Any = memoryview(column.buffers()[1] or b"")
    return content.cast(kind)[: len(column)]  # type: ignore[no-any-return]


def _reader(column: pyarrow.Array, name: str, folder: Path | None) -> Callable[[int], Any]:
    """Return a function from a row's position in the block to its value (None if it has none).

    It raises UserError for a value that is not JSON or is nested too deeply, which burnish does not write.
    """
    ends: Any = memoryview(column.buffers()[1]).cast("i")
    numbers = numbers_of(column.values)
    valid = None if not column.null_count else column.is_valid().to_pylist()
    is_json = str(column.type.value_type) == "uint8"

    def value(at: int) -> Any:
        if valid is not None and not valid[at]:
            return None
        found = numbers[ends[at] : ends[at + 1]]
        if not is_json:
            return found.tolist()
        try:
            return json.loads(found.tobytes())
        except (ValueError, RecursionError) as error:
            what = f'a value in the column "{name}" of the tokenized dataset '
            what += "is not valid JSON." if isinstance(error, ValueError) else "is nested too deeply."
            raise UserError(what, str(folder or ""), remedy=_REMEDY) from None

    return value
