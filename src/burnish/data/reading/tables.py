"""Random access to the records of files of every type: memory holds the place of a record and not its content.

In: a file. Out: a ``Table``. JSON, CSV and text are indexed by the bytes of each record; a CSV file is parsed once for
that, since a quoted value may hold line ends. Arrow files are mapped into memory, and so are Parquet files, which the
datasets library first converts to Arrow files in its cache.

Refuses, with the sentences of ``files.py``: a file that is not of the type that its name says; a CSV row with more or
fewer values than the header has names.
"""

from __future__ import annotations

import csv
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from hashlib import blake2b, file_digest
from itertools import accumulate
from pathlib import Path
from typing import Any

from burnish.data.reading.files import arrow_batches, csv_rows, text_record
from burnish.data.reading.json_files import Values, byte_lines, decoded
from burnish.data.reading.record_index import HashedFile, RecordIndex, SpanIndex, Spans
from burnish.data.sets.examples import Table


class CsvIndex(SpanIndex):
    """The rows of a CSV file under its header."""

    def spans(self, file: HashedFile) -> Spans:
        rows = csv_rows(self.path, file)
        header = next(rows, None)
        self._header = header.values if header is not None else []
        return _spans((row.begin, row.end) for row in rows)

    def record(self, index: int, raw: bytes) -> Values:
        (row,) = csv.reader((decoded(self.path, line) for _, line in byte_lines([raw])), strict=True)
        return dict(zip(self._header, row, strict=True))


class TextIndex(SpanIndex):
    """The lines of a text file, empty ones too."""

    def spans(self, file: HashedFile) -> Spans:
        return _spans((offset, offset + len(line)) for offset, line in byte_lines(file))

    def record(self, index: int, raw: bytes) -> Values:
        return text_record(self.path, raw)


def _spans(places: Iterable[tuple[int, int]]) -> Spans:
    import numpy

    flat = array("q")
    for place in places:
        flat.extend(place)
    pairs = numpy.frombuffer(flat, dtype=numpy.int64).reshape(-1, 2) if flat else numpy.zeros((0, 2), numpy.int64)
    return pairs[:, 0], pairs[:, 1]


class ArrowTable:
    """The rows of an Arrow file, stream or random access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.content_hash = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
        self._batches = list(arrow_batches(path))
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Values:
        which = bisect_right(self._ends, index)
        begin = self._ends[which] - self._batches[which].num_rows
        found: list[Values] = self._batches[which].slice(index - begin, 1).to_pylist()
        return found[0]


class MappedTable:
    """A table of the datasets library, mapped into memory from its cache."""

    def __init__(self, path: Path, rows: Any) -> None:
        self.path, self.content_hash = path, str(rows._fingerprint)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Values:
        found: Values = self._rows[index]
        return found


TABLES: dict[str, Callable[[Path], Table]] = {
    ".json": RecordIndex, ".jsonl": RecordIndex, ".csv": CsvIndex, ".txt": TextIndex, ".arrow": ArrowTable,
}  # fmt: skip
"""File type -> its table, for types whose records can be read one by one without conversion."""
