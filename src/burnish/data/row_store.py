"""Encoded rows in flat arrays: in memory, or in a folder from which they are mapped.

In: rows, one at a time. Out: ``Rows``, a sequence that gives them back as plain lists; a million rows take the memory
of their lengths. A folder holds two files per column (values end to end, where each row's end), and a manifest, written
last, with the sizes of the files and whatever the writer wants to know again.

Refuses a folder whose files are not those of its manifest.
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
from typing import Any, BinaryIO, TypeAlias, overload

from burnish.core.errors import Problem, UserError
from burnish.core.types import FlatRow, Row

MANIFEST = "rows.json"
LAYOUT = 1
"""Of the files in a folder; another number is another layout."""

Numbers: TypeAlias = "array[Any] | memoryview[Any]"
_KINDS = {int: "i", bool: "i", float: "d"}  # of array.array: token ids fit into 32 bits, weights keep all of theirs


@dataclass(frozen=True)
class Column:
    """One column of all rows: ``values`` end to end, ``ends[i]`` where row i's end. A row without values has none."""

    values: Numbers
    ends: Numbers
    is_scalar: bool = False

    def of(self, index: int) -> Any:
        start, end = self.ends[index - 1] if index else 0, self.ends[index]
        if start == end:
            return None
        return self.values[start] if self.is_scalar else self.values[start:end].tolist()


class Rows(Sequence[Row]):
    """Encoded rows. ``rows[i]`` gives plain lists; the lengths are known without reading a token.

    Args:
        columns: name -> values.
        origins: the index of the example that each row was made from; examples without a row are missing here.
        folder: where the values are mapped from, None in memory.
    """

    def __init__(self, columns: Mapping[str, Column], origins: Numbers, folder: Path | None = None) -> None:
        self._columns = dict(columns)
        self.origins = origins
        self.folder = folder

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        ends = self._columns["input_ids"].ends.tolist() if "input_ids" in self._columns else []
        return array("q", (end - start for start, end in pairwise([0, *ends])))

    def __len__(self) -> int:
        return len(self.origins)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(at) for at in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def _row(self, index: int) -> Row:
        found = {name: column.of(index) for name, column in self._columns.items()}
        return {name: value for name, value in found.items() if value is not None}  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        """Another process maps the same files; what is in memory goes along."""
        return (Rows, (self._columns, self.origins)) if self.folder is None else (open_rows, (self.folder,))


def open_rows(folder: Path) -> Rows:
    """The rows of a folder. Raises UserError where it is not whole."""
    manifest = read_manifest(folder)
    columns = {
        name: Column(_mapped(folder / f"{name}.values", kind), _mapped(folder / f"{name}.ends", "q"), is_scalar)
        for name, (kind, is_scalar) in manifest["columns"].items()
    }
    return Rows(columns, _mapped(folder / "origins", "q"), folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, its files held against it. Raises UserError where they are not whole."""
    remedy = "Remove the folder, and the rows are encoded again."
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(f"the encoded rows have no whole {MANIFEST}: {error}.", str(folder), remedy=remedy)
        ) from None
    if manifest.get("layout") != LAYOUT:
        raise UserError(Problem("another version of burnish wrote the encoded rows.", str(folder), remedy=remedy))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for name, size in manifest["files"].items():
        if sizes.get(name) != size:
            what = f'"{name}" of the encoded rows is not whole: expected {size} bytes. Received: {sizes.get(name, 0)}.'
            raise UserError(Problem(what, str(folder), remedy=remedy))
    return manifest


class RowWriter:
    """Takes rows, and lays their values end to end: in files of ``folder``, or in memory where that is None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._columns: dict[str, _Growing] = {}
        self._origins = array("q")

    def add(self, origin: int, row: Row | FlatRow) -> None:
        """Args: origin: the index of the example that the row was made from."""
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
        """The rows added so far, which lie in memory."""
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
            "files": {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())},
            **known,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def _column(self, name: str, values: Any) -> _Growing:
        is_scalar = not isinstance(values, Sized)
        kind = _KINDS[type(values if is_scalar else values[0])]
        file = None if self.folder is None else (self.folder / f"{name}.values").open("wb")
        return _Growing(kind, is_scalar, file, len(self._origins))


class _Growing:
    """One column while rows are added; the rows before it came up have nothing in it."""

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


def _mapped(path: Path, kind: str) -> Numbers:
    """The numbers of a file, read when they are asked for."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return array(kind)
    with path.open("rb") as file:
        cast: Any = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)).cast  # typed for literals only
    numbers: memoryview[Any] = cast(kind)
    return numbers
