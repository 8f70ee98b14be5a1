"""Rows of a large set, encoded while the loop runs: ahead of it by another process, or at the moment of use.

In: a function from example numbers to rows. Out: ``AheadRows``, a sequence with a row per example, None where an
example gives none. If the loop needs a row that is not encoded yet, the loop encodes it. Timing decides only which
process does the work: the examples of a step and the content of rows depend on options and data alone.

The cache holds the rows in segments, each a folder that ``store.py`` writes, in the order in which the loop uses them.
A segment holds as many examples as all before it together, up to a share of the set, so that the first is ready soon
and there are at most about seventy. The next run uses the segments of a run that was stopped; when the segments hold
every example, nothing is encoded any more.

An example that cannot be encoded (a broken record, under ``on_bad_record: raise``) is skipped here: the loop stops when
it comes to it, with its checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from burnish.config.errors import UserError
from burnish.data.length import refuse_endless
from burnish.data.options import DataOptions
from burnish.data.rows.encode import (
    Encode,
    Encoded,
    begin_place,
    is_whole,
    place_ahead,
    replacing,
    without_tokenizer_threads,
)
from burnish.data.rows.row_set import RowSet
from burnish.data.rows.store import MANIFEST, Rows, RowWriter, open_rows, read_rows_manifest
from burnish.data.sets.examples import Examples
from burnish.data.tally import Tally
from burnish.loop.types import Row, as_lists

EncodeSome: TypeAlias = "Callable[[Sequence[int]], Encoded]"
"""Numbers of examples -> their rows and tally."""

_SEGMENTS = 64  # of equal size, after those that double
_NO_ROW: Row = {}
"""The row that stands in a segment for an example that gives no row."""


def encode_ahead(
    examples: Examples, encode: Encode, *, fingerprint: Mapping[str, Any], options: DataOptions,
    check: Callable[[Row], None] = lambda row: None,
) -> AheadRows:  # fmt: skip
    """The rows of ``examples``, encoded when they are used or before.

    Args:
        fingerprint: everything that the rows depend on apart from the examples.
        options: ``DataOptions``.
        check: raises UserError for a row that the run cannot take.
    """

    def encode_some(numbers: Sequence[int]) -> Encoded:
        tally = Tally()
        found = examples.make(numbers, tally)
        there = [example for example in found if example is not None]
        refuse_endless(there)
        rows = iter(encode(there, tally))
        made = [None if example is None else next(rows) for example in found]
        for row in made:
            if row is not None:
                check(row)
        return made, tally

    folder = None if options.streaming else place_ahead(examples, fingerprint, options)
    return AheadRows(encode_some, len(examples), folder, options.preprocessing_batch_size)


class EncodeAheadChoices(Protocol):
    """The options that say what is encoded ahead."""

    dataloader_num_workers: int
    streaming: bool


def ahead_notes(options: EncodeAheadChoices) -> list[str]:
    """Notes on options that have no effect on rows that are encoded while the loop runs."""
    if not options.dataloader_num_workers:
        return []
    how = "when streaming" if options.streaming else "with encode_ahead"
    return [f'"dataloader_num_workers" has no effect: {how}, the loop takes the rows as they come and collates them.']


class AheadRows(RowSet["Row | None"]):
    """A row per example.

    Args:
        encode: example numbers -> rows.
        num_examples: the number of all examples.
        folder: holds the segments; None keeps nothing, and encodes rows at the moment of use.
        batch_size: examples encoded together.
    """

    is_late = True

    def __init__(self, encode: EncodeSome, num_examples: int, folder: Path | None, batch_size: int) -> None:
        self.encode, self.folder, self.batch_size = encode, folder, batch_size
        self.tally = Tally()  # of rows that the loop encoded itself
        self._places = array("q", [-1]) * num_examples  # example -> the number of its row across all segments
        self._made = bytearray(num_examples)  # 1 for an example that the loop encoded itself
        self._segments: list[Rows] = []
        self._starts: list[int] = []
        self._orders: Connection | None = None  # to the process that encodes ahead
        self._is_told = False
        if folder is not None:
            begin_place(folder)
            self._remove_damaged(folder)
            self._look()

    def __len__(self) -> int:
        return len(self._places)

    def made(self, index: int) -> Row | None:
        return self.some([index])[0]

    def some(self, examples: Sequence[int]) -> list[Row | None]:
        """The rows of these examples. Raises UserError where one of them cannot be encoded."""
        if any(self._places[example] < 0 for example in examples):
            self._look()
        missing = [example for example in examples if self._places[example] < 0]
        made: dict[int, Row | None] = {}
        if missing:
            rows, counted = self.encode(missing)
            if not all(self._made[example] for example in missing):  # in a later epoch they were counted already
                self.tally.merge(counted)
            for example in missing:
                self._made[example] = 1
            made = dict(zip(missing, map(as_lists, rows), strict=True))
        return [made[example] if example in made else self._stored(example) for example in examples]

    @property
    def num_encoded(self) -> int:
        """Examples that lie in segments."""
        self._look()
        return sum(map(len, self._segments))

    def counted(self) -> Tally:
        """The tally of the examples so far, each counted once."""
        whole = Tally()
        for folder in self._folders():
            whole.merge(Tally.from_json(read_rows_manifest(folder)["tally"]))
        whole.merge(self.tally)
        if whole.seen:  # records were read while encoding, some of them by both processes
            self._look()
            whole.seen = sum(place >= 0 or made > 0 for place, made in zip(self._places, self._made, strict=True))
        for reason, found in whole.records.items():
            whole.records[reason] = list(dict.fromkeys(found))
        return whole

    # --- the process that encodes ahead ---

    @contextmanager
    def going_ahead(self) -> Iterator[None]:
        """Run a process that encodes in the order given to ``follow``, until the end of the ``with`` block.

        It is forked before the run has locks, devices or threads, which a forked process would keep or break.
        """
        if self.folder is None or "fork" not in get_all_start_methods() or self.num_encoded == len(self):
            yield
            return
        context = get_context("fork")
        orders, self._orders = context.Pipe(duplex=False)
        worker = context.Process(target=self._go_ahead, args=(orders, self._orders), daemon=True)
        worker.start()
        orders.close()
        try:
            yield
        finally:
            self._orders.close()
            self._orders = None
            worker.terminate()
            worker.join()

    def follow(self, order: Sequence[int]) -> None:
        """Encode in this order from now on; only the first call counts, since every epoch has every example."""
        if self._orders is not None and not self._is_told:
            self._is_told = True
            self._orders.send_bytes(array("q", order).tobytes())

    def _go_ahead(self, orders: Connection, other_end: Connection) -> None:
        assert self.folder is not None
        other_end.close()  # so that the pipe closes when the run ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the run ends this one
        parent, order = os.getppid(), array("q")
        try:
            order.frombytes(orders.recv_bytes())
        except EOFError:
            return
        with _alone_in(self.folder) as is_alone, without_tokenizer_threads():
            if not is_alone:  # another rank, or another run of the same set, encodes ahead
                return
            self._look()
            missing = [example for example in order if self._places[example] < 0]
            while missing and os.getppid() == parent:
                done = len(self) - len(missing)
                size = min(max(self.batch_size, done), max(self.batch_size, -(-len(self) // _SEGMENTS)))
                self._write_segment(missing[:size], lambda: os.getppid() == parent)
                missing = missing[size:]

    def _write_segment(self, examples: Sequence[int], goes_on: Callable[[], bool]) -> None:
        assert self.folder is not None
        tally = Tally()
        with replacing(self.folder / f"segment-{len(self._folders()):06}") as partial:
            writer = RowWriter(partial)
            for start in range(0, len(examples), self.batch_size):
                if not goes_on():
                    raise SystemExit
                batch = examples[start : start + self.batch_size]
                try:
                    rows, counted = self.encode(batch)
                except UserError:  # the loop will come to it, and raise the error
                    continue
                tally.merge(counted)
                for example, row in zip(batch, rows, strict=True):
                    writer.add(example, row or _NO_ROW)
            writer.close(tally=tally.to_json())

    # --- segments ---

    def _remove_damaged(self, folder: Path) -> None:
        """A segment that is not as it was written goes, with those behind it; they are encoded again. Where another run
        goes ahead in the folder, it wrote them or has looked."""
        with _alone_in(folder) as is_alone:
            segments = self._folders() if is_alone else []
            sound = list(takewhile(is_whole, segments))
            for segment in segments[len(sound) :]:
                shutil.rmtree(segment)

    def _folders(self) -> list[Path]:
        if self.folder is None:
            return []
        return sorted(path for path in self.folder.glob("segment-*") if (path / MANIFEST).is_file())

    def _look(self) -> None:
        """Open the segments that have been written since the last look."""
        import numpy

        for path in self._folders()[len(self._segments) :]:
            segment = open_rows(path)
            start = self._starts[-1] + len(self._segments[-1]) if self._segments else 0
            places = numpy.frombuffer(self._places, dtype=numpy.int64)
            places[numpy.asarray(segment.origins)] = numpy.arange(start, start + len(segment))
            self._starts.append(start)
            self._segments.append(segment)

    def _stored(self, example: int) -> Row | None:
        place = self._places[example]
        at = bisect_right(self._starts, place) - 1
        return self._segments[at][place - self._starts[at]] or None


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Yield whether no other process goes ahead in a folder; none begins to inside the ``with`` block."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except BlockingIOError:
            is_alone = False
        yield is_alone
