"""Encoded rows in concatenated arrays: in memory, or in a folder from which they are mapped.

In: rows, one at a time. Out: ``Rows``, a sequence that returns them as plain lists; of mapped rows only the lengths are
in memory. A folder holds two files per column (the concatenated values, and the end of each row in them), and a
manifest, written last, with the sizes and checksums of the files and further facts from the writer.

Refuses a folder whose files do not match its manifest: by their sizes whenever it is opened, by their contents where
a run takes it up, since rows with one bit changed train as well as any.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from burnish.checkpoint.manifest import own_sha256, sha256_of
from burnish.config.errors import Problem, UserError
from burnish.data.rows.row_set import RowSet
from burnish.loop.types import Row
from burnish.utils.json_files import read_object, write_json

MANIFEST = "rows.json"
LAYOUT = 2
"""Version of the layout of the files in a folder."""

ColumnValues: TypeAlias = "array[Any] | memoryview[Any]"
_KINDS = {int: "i", bool: "i", float: "d"}  # of array.array: token ids fit into 32 bits, weights keep all of theirs


@dataclass(frozen=True)
class Column:
    """One column of all rows: ``values`` concatenated; those of row i end at ``ends[i]``. A row may have none."""

    values: ColumnValues
    ends: ColumnValues
    is_scalar: bool = False

    def of(self, index: int) -> Any:
        start, end = self.ends[index - 1] if index else 0, self.ends[index]
        if start == end:
            return None
        return self.values[start] if self.is_scalar else self.values[start:end].tolist()


class Rows(RowSet[Row]):
    """Encoded rows. ``rows[i]`` returns plain lists; the lengths are known without reading a token.

    Args:
        columns: name -> values.
        origins: the index of the example that each row was made from; examples without a row are missing here.
        folder: where the values are mapped from, None in memory.
    """

    def __init__(self, columns: Mapping[str, Column], origins: ColumnValues, folder: Path | None = None) -> None:
        self.columns = dict(columns)
        self.origins = origins
        self.folder = folder

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row; of one of several sequences, of all of them."""
        of_sequences = list(self._lengths.values())
        return of_sequences[0] if len(of_sequences) == 1 else array("q", map(sum, zip(*of_sequences, strict=True)))

    @cached_property
    def sequence_lengths(self) -> Sequence[int]:
        return [length for of_column in self._lengths.values() for length in of_column]

    @cached_property
    def _lengths(self) -> dict[str, Sequence[int]]:
        """Tokens of each row, by the columns that hold token ids: one, or where a row is several sequences, several."""
        names = [name for name in self.columns if name.endswith("input_ids")]
        ends = {name: [0, *self.columns[name].ends.tolist()] for name in names}
        return {name: array("q", (end - start for start, end in pairwise(ends[name]))) for name in names}

    def __len__(self) -> int:
        return len(self.origins)

    def origin(self, index: int) -> int:
        return int(self.origins[index])

    def made(self, index: int) -> Row:
        found = {name: column.of(index) for name, column in self.columns.items()}
        return {name: value for name, value in found.items() if value is not None}  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        """Pickle for another process: it maps the same files; rows in memory are copied."""
        return (Rows, (self.columns, self.origins)) if self.folder is None else (open_rows, (self.folder,))


def open_rows(folder: Path) -> Rows:
    """Open the rows of a folder. Raises UserError where it is not whole."""
    manifest = read_rows_manifest(folder)
    columns = {
        name: Column(_mapped(folder / f"{name}.values", kind), _mapped(folder / f"{name}.ends", "q"), is_scalar)
        for name, (kind, is_scalar) in manifest["columns"].items()
    }
    return Rows(columns, _mapped(folder / "origins", "q"), folder)


_REMEDY = "Remove the folder, and the rows are encoded again."


def read_rows_manifest(folder: Path, contents: bool = False) -> dict[str, Any]:
    """The manifest of a folder, its files held against it. Raises UserError where they are not whole.

    Args:
        contents: read every byte of them, and compare the checksums.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"the encoded rows have no {MANIFEST}.", str(folder), remedy=_REMEDY)
    manifest = read_object(folder / MANIFEST, _REMEDY, [("layout", int)])
    if manifest["layout"] != LAYOUT:
        raise UserError("another version of burnish wrote the encoded rows.", str(folder), remedy=_REMEDY)
    if manifest.get("sha256") != own_sha256(manifest):
        raise UserError(_changed(folder, MANIFEST))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    for name, (size, checksum) in manifest["files"].items():
        if sizes.get(name) != size:
            what = f'"{name}" of the encoded rows is not whole: expected {size} bytes. Received: {sizes.get(name, 0)}.'
            raise UserError(what, str(folder), remedy=_REMEDY)
        if contents and sha256_of(folder / name) != checksum:
            raise UserError(_changed(folder, name))
    return manifest


def _changed(folder: Path, name: str) -> Problem:
    what = f'"{name}" of the encoded rows was changed after it was written (its checksum differs).'
    return Problem(what, str(folder), remedy=_REMEDY)


class RowWriter:
    """Appends the values of rows to arrays: in files of ``folder``, or in memory where that is None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._columns: dict[str, _Growing] = {}
        self._origins = array("q")

    def add(self, origin: int, row: Row) -> None:
        """Append a row. Args: origin: the index of the example that the row was made from."""
        for name, values in row.items():
            if isinstance(values, Sized) and not len(values):
                continue
            if name not in self._columns:
                self._columns[name] = self._column(name, values)
            self._columns[name].add(values)
        for column in self._columns.values():
            column.ends.append(column.end)
        self._origins.append(origin)

    def in_memory(self) -> Rows:
        """The rows added so far, in memory."""
        columns = {name: Column(c.values, c.ends, c.is_scalar) for name, c in self._columns.items()}
        return Rows(columns, self._origins)

    def close(self, **known: Any) -> None:
        """Finish the folder. ``known`` is written into its manifest."""
        assert self.folder is not None
        for name, column in self._columns.items():
            assert column.file is not None
            column.file.close()
            (self.folder / f"{name}.ends").write_bytes(column.ends.tobytes())
        (self.folder / "origins").write_bytes(self._origins.tobytes())
        manifest = {
            "layout": LAYOUT,
            "rows": len(self._origins),
            "columns": {name: (column.kind, column.is_scalar) for name, column in self._columns.items()},
            "files": {file.name: (file.stat().st_size, sha256_of(file)) for file in sorted(self.folder.iterdir())},
            **known,
        }
        manifest["sha256"] = own_sha256(json.loads(json.dumps(manifest)))
        write_json(self.folder / MANIFEST, manifest, indent=1)

    def _column(self, name: str, values: Any) -> _Growing:
        is_scalar = not isinstance(values, Sized)
        kind = _KINDS[type(values if is_scalar else values[0])]
        file = None if self.folder is None else (self.folder / f"{name}.values").open("wb")
        return _Growing(kind, is_scalar, file, len(self._origins))


class _Growing:
    """One column while rows are added; rows before the first one that has the column have no values in it."""

    def __init__(self, kind: str, is_scalar: bool, file: BinaryIO | None, num_rows: int) -> None:
        self.kind, self.is_scalar, self.file = kind, is_scalar, file
        self.values = array(kind)  # stays empty where there is a file
        self.ends = array("q", [0]) * num_rows
        self.end = 0

    def add(self, values: Any) -> None:
        is_flat = isinstance(values, array) and values.typecode == self.kind
        flat = values if is_flat else array(self.kind, [values] if self.is_scalar else values)
        self.end += len(flat)
        if self.file is None:
            self.values.extend(flat)
        else:
            self.file.write(flat)


def _mapped(path: Path, kind: str) -> ColumnValues:
    """The numbers of a file, mapped into memory."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return array(kind)
    with path.open("rb") as file:
        cast: Any = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)).cast  # typed for literals only
    numbers: memoryview[Any] = cast(kind)
    return numbers
