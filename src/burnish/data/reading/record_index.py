"""Random access to the records of a file; each record is parsed when it is read.

JSON Lines files are indexed by the byte range of each line; only these positions are held in memory. Other text formats
(JSON list, CSV, plain text) are first converted to JSON Lines in an unnamed temporary file, since their records cannot
be located without parsing all records before them. Arrow and Parquet files are memory-mapped by the datasets library.

Opening a file raises the errors of ``files.py``. A broken line of JSON Lines raises when it is read.
"""

from __future__ import annotations

import json
import os
from array import array
from hashlib import blake2b, file_digest
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Protocol

from burnish.config.errors import UserError
from burnish.data.reading.files import arrow_table, read_records
from burnish.data.reading.json_files import (
    BOM,
    NotAnObject,
    Values,
    broken_line,
    decode_text,
    first_character,
    json_places,
    parsed_file,
)
from burnish.utils.sequences import LazySequence


class Table(Protocol):
    """Indexed records of a file or of a hub dataset."""

    path: Path  # used in error messages
    content_hash: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Values: ...


def open_table(path: Path) -> Table:
    """Open a file for random access. Raises UserError if its content does not match its suffix."""
    suffix = path.suffix.lower()
    if suffix not in (".arrow", ".parquet"):
        return RecordIndex(path)
    import datasets

    next(read_records(path), None)  # raises if the content has another type
    if suffix == ".arrow":
        rows = datasets.Dataset(arrow_table(path), fingerprint=str(path))  # without it, all rows are hashed
        return DatasetTable(path, rows, OpenFile(path))
    features = _readable_features(path)
    rows = datasets.Dataset.from_parquet(str(path), features=features, columns=[*features])
    return DatasetTable(path, rows, OpenFile(path), is_copy=True)


def _readable_features(path: Path) -> Any:
    """Return the columns of a Parquet file whose types the datasets library supports; maps are not among them."""
    import datasets
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    schema = pyarrow.parquet.read_schema(path)
    unsupported = []
    for field in schema:
        try:
            datasets.Features.from_arrow_schema(pyarrow.schema([field]))
        except ValueError:
            unsupported.append(field.name)
    kept = [field for field in schema if field.name not in unsupported]
    return datasets.Features.from_arrow_schema(pyarrow.schema(kept, metadata=schema.metadata))


class DatasetTable:
    """A memory-mapped dataset of the datasets library.

    Args:
        path: used in error messages.
        rows: ``datasets.Dataset``.
        file: the local file; None for a hub dataset.
        is_copy: ``rows`` are mapped from a converted file in the cache of datasets.
    """

    def __init__(self, path: Path, rows: Any, file: OpenFile | None = None, is_copy: bool = False) -> None:
        self.path, self.content_hash = path, str(rows._fingerprint) if file is None else file.content_hash
        self._rows, self._mapped = rows, None if is_copy else file

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Values:
        if self._mapped is not None:
            self._mapped.refuse_if_changed()  # reading the mapping of a truncated file would crash the process
        found: Values = self._rows[index]
        return found


class RecordIndex(LazySequence[Values]):
    """Records of a text file, located by the byte range of their lines.

    JSON Lines files are read directly and must not change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = OpenFile(path)
        self.content_hash = self._source.content_hash
        is_lines = path.suffix.lower() in (".json", ".jsonl") and first_character(path) != "["
        if is_lines:
            next(read_records(path, refuses_others=False), None)  # raises if the file is not JSON Lines
        self._is_lines = is_lines
        self._file = self._source.file if is_lines else _as_lines(path)
        self._file.seek(0)
        self._begins, self._ends = _line_places(self._file)

    def __len__(self) -> int:
        return len(self._begins)

    def item(self, index: int) -> Values:
        if self._is_lines:
            self._source.refuse_if_changed()
        begin, end = self._begins[index], self._ends[index]
        # pread does not move the file position, which is shared with forked processes.
        text = decode_text(self.path, os.pread(self._file.fileno(), end - begin, begin))
        try:
            record = parsed_file(text)
        except json.JSONDecodeError as error:
            line = next(islice(json_places(self.path), index, None))
            raise UserError(broken_line(self.path, line, text.rstrip("\r\n"), error)) from None
        return record if isinstance(record, dict) else NotAnObject(record)


class OpenFile:
    """A file that stays open during training, so that renaming or replacing it on disk has no effect."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")
        self.content_hash = self._digest()
        self._seen = self._size_and_time()

    def refuse_if_changed(self) -> None:
        """Raise UserError if the content has changed since the file was opened."""
        now = self._size_and_time()
        if now == self._seen:
            return
        if now[0] != self._seen[0] or self._digest() != self.content_hash:
            is_same = now[0] == self._seen[0]
            how = "its size is unchanged" if is_same else f"it had {self._seen[0]:,} bytes and now has {now[0]:,}"
            raise UserError(
                f"the file was changed during training: {how}.",
                where=str(self.path),
                remedy="Restore the original file, and run the same command to resume from the last checkpoint.",
            )
        self._seen = now

    def _size_and_time(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def _digest(self) -> str:
        self.file.seek(0)
        return file_digest(self.file, lambda: blake2b(digest_size=16)).hexdigest()


def _as_lines(path: Path) -> BinaryIO:
    """Write the records of a file as JSON Lines to an unnamed temporary file."""
    file = TemporaryFile()  # noqa: SIM115 - stays open as long as the index
    for values in read_records(path, refuses_others=False):
        record: Any = values.received if isinstance(values, NotAnObject) else values
        file.write(json.dumps(record).encode() + b"\n")
    file.seek(0)
    return file


def _line_places(file: BinaryIO) -> tuple[array[int], array[int]]:
    """Return (begin, end) in bytes of every non-blank line."""
    begins, ends, end = array("q"), array("q"), 0
    for line in file:
        begin, end = end, end + len(line)
        if begin == 0 and line.startswith(BOM):
            begin, line = len(BOM), line.removeprefix(BOM)
        # Blank lines are those of ``str.strip``, as in ``read_records``. A line that begins an object is not decoded.
        if line.startswith(b"{") or line.decode("utf-8", "replace").strip():
            begins.append(begin)
            ends.append(end)
    return begins, ends
