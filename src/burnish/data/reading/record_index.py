"""A JSON or JSON Lines file as a sequence of records, each parsed when it is used.

In: a file. Out: ``RecordIndex``, which holds the begin and end of each record, and a hash of the bytes. A million
records take 16 MB, and the time to read the file once. Indexing looks for line ends, or for the borders of a list's
elements; a record is parsed when it is used.

Refuses, with the sentences of ``json_files.py``: a list whose JSON is broken; and, when they are used, broken lines and
records that are not objects.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from burnish.config.errors import UserError
from burnish.data.reading.json_files import (
    BOM,
    Values,
    broken_line,
    decoded,
    first_character,
    json_places,
    parsed_file,
    read_json_records,
    refuse,
)
from burnish.utils.sequences import OnDemand

if TYPE_CHECKING:
    from numpy import ndarray

Spans: TypeAlias = "tuple[ndarray[Any, Any], ndarray[Any, Any]]"
"""(begin, end) of every record, in bytes."""
_BLOCK = 1 << 22
_SPACE = re.compile(r"[ \t\r\n]*")


class SpanIndex(OnDemand[Values]):
    """The records of one file, each a range of its bytes. The file stays open, so the records stay the same if it is
    renamed or replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        hashed = HashedFile(self._file)
        self._starts, self._ends = self.spans(hashed)
        self.content_hash = hashed.hexdigest()

    def spans(self, file: HashedFile) -> Spans:
        """Find begin and end of each record; ``file`` is read to its end."""
        raise NotImplementedError

    def record(self, index: int, raw: bytes) -> Values:
        """Parse the bytes of a record."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def made(self, index: int) -> Values:
        begin, end = int(self._starts[index]), int(self._ends[index])
        # pread does not move the file position, which forked processes share.
        return self.record(index, os.pread(self._file.fileno(), end - begin, begin))


class RecordIndex(SpanIndex):
    """The records of a JSON or JSON Lines file."""

    def spans(self, file: HashedFile) -> Spans:
        if first_character(self.path) == "[":
            return _element_spans(self.path, file)
        next(read_json_records(self.path), None)  # refuses a file that is not JSON Lines at all
        return _line_spans(self.path, file)

    def record(self, index: int, raw: bytes) -> Values:
        text = decoded(self.path, raw)
        try:
            record = parsed_file(text)
        except json.JSONDecodeError as error:
            line = next(islice(json_places(self.path), index, None))
            raise UserError(broken_line(self.path, line, text.rstrip("\r\n"), error)) from None
        return record if isinstance(record, dict) else refuse(self.path, index + 1, record)


class HashedFile:
    """A file that is read from beginning to end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hashed = file, blake2b(digest_size=16)

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self._hashed.update(block)
        return block

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self._hashed.update(line)
            yield line

    def hexdigest(self) -> str:
        return self._hashed.hexdigest()


def may_hold_more(paths: Sequence[Path], limit: int) -> bool:
    """Return whether JSON files may hold more records than ``limit``. Each begins with a brace, and counting the braces
    is fast."""
    braces = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                braces += block.count(b"{")
                if braces > limit:
                    return True
    return False


def _line_spans(path: Path, file: HashedFile) -> Spans:
    """(begin, end) in bytes of every line that is not blank."""
    import numpy

    ends, firsts, offset, is_new_line = [], [], 0, True
    while block := file.read(_BLOCK):
        read = numpy.frombuffer(block, dtype=numpy.uint8)
        line_ends = numpy.flatnonzero(read == ord("\n"))
        ends.append(line_ends + (offset + 1))
        begins = numpy.concatenate([[0] if is_new_line else [], line_ends + 1]).astype(numpy.int64)
        firsts.append(read[begins[begins < len(read)]])  # a line's first byte tells whether it may be blank
        is_new_line = block.endswith(b"\n")
        offset += len(block)
    if not is_new_line:
        ends.append(numpy.array([offset]))
    if not ends:
        return numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.int64)
    all_ends, all_firsts = numpy.concatenate(ends), numpy.concatenate(firsts)
    begins = numpy.concatenate([[0], all_ends[:-1]])
    keep = numpy.ones(len(begins), dtype=bool)
    with path.open("rb") as again:
        for index in numpy.flatnonzero(all_firsts != ord("{")):
            again.seek(begins[index])
            line = again.read(int(all_ends[index] - begins[index]))
            if index == 0 and line.startswith(BOM):
                begins[0] += len(BOM)
                line = line.removeprefix(BOM)
            keep[index] = bool(line.strip())
    return begins[keep], all_ends[keep]


def _element_spans(path: Path, file: HashedFile) -> Spans:
    """(begin, end) in bytes of every element of a JSON list, which is read whole for it and let go."""
    import numpy

    text = file.read(-1).decode("latin-1")  # each character is one byte; JSON's own are the same in it
    try:
        spans = array("q", chain.from_iterable(_elements(text, len(BOM) * text.startswith(BOM.decode("latin-1")))))
    except (ValueError, RecursionError):
        deque(read_json_records(path), maxlen=0)  # says what is broken, and where
        raise
    starts, ends = numpy.array(spans, numpy.int64).reshape(-1, 2).T.copy()
    return starts, ends


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each element of the list that begins at ``at``, after white space. Raises ValueError where
    the JSON is broken."""
    decode = json.JSONDecoder().raw_decode
    at = _past_space(text, _past_space(text, at) + 1)
    while text[at : at + 1] != "]":
        _, end = decode(text, at)
        yield at, end
        at = _past_space(text, end)
        if text[at : at + 1] == ",":
            at = _past_space(text, at + 1)
            if text[at : at + 1] == "]":
                raise ValueError("expected an element")
        elif text[at : at + 1] != "]":
            raise ValueError("expected a comma")


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
