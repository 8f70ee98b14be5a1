"""Rows of a large set, encoded while the loop runs: by a process that goes ahead of it, or on the spot.

In: a function from example numbers to rows. Out: ``AheadRows``, a sequence with a row per example, None where an
example gives none. What the loop wants and nobody has encoded yet is encoded where it is wanted, so timing decides who
does the work and nothing else: which examples share a step, and what their rows hold, depends on options and data.

The rows lie in the cache in segments, each a folder that ``row_store.py`` writes, in the order in which the loop asks
for them. A segment holds as many examples as all before it together, up to a share of the set: the first is there soon,
and there are never more than some seventy. A run that was stopped leaves its segments to the next; when every example
is in one, the set is read and not encoded.

An example that cannot be encoded (a broken record, under ``on_bad_record: raise``) is left to the loop, which meets it
in its turn and stops there, with its checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import signal
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, overload

from burnish.core.errors import UserError
from burnish.core.types import FlatRow, Row, as_lists
from burnish.data.examples import LazyExamples
from burnish.data.prepare import Encode, begin_place, place_ahead, replacing, without_tokenizer_threads
from burnish.data.row_store import MANIFEST, Rows, RowWriter, open_rows, read_manifest
from burnish.data.tally import Tally

EncodeSome: TypeAlias = "Callable[[Sequence[int]], tuple[Sequence[Row | FlatRow | None], Tally]]"
"""Numbers of examples -> a row for each, None where it gives none, and what was counted on the way."""

_SEGMENTS = 64  # of equal size, behind those that double
_NO_ROW: Row = {}
"""How a segment keeps an example that gives no row."""


def encode_ahead(
    examples: LazyExamples, encode: Encode, *, fingerprint: Mapping[str, Any], options: Any,
    check: Callable[[Row | FlatRow], None] = lambda row: None,
) -> AheadRows:  # fmt: skip
    """The rows of ``examples``, encoded when they are wanted or before.

    Args:
        fingerprint: what the rows depend on beside the examples.
        options: ``DataOptions``.
        check: raises UserError for a row that the run cannot take.
    """

    def encode_some(numbers: Sequence[int]) -> tuple[Sequence[Row | FlatRow | None], Tally]:
        tally = Tally()
        found = examples.take(numbers, tally)
        rows = iter(encode([example for example in found if example is not None], tally))
        made = [None if example is None else next(rows) for example in found]
        for row in made:
            if row is not None:
                check(row)
        return made, tally

    folder = None if options.streaming else place_ahead(examples, fingerprint, options)
    return AheadRows(encode_some, len(examples), folder, options.preprocessing_batch_size)


def ahead_notes(options: Any) -> list[str]:
    """What has no effect on rows that are encoded while the loop runs."""
    if not options.dataloader_num_workers:
        return []
    how = "when streaming" if options.streaming else "with encode_ahead"
    return [f'"dataloader_num_workers" has no effect: {how}, the loop takes the rows as they come and collates them.']


def going_ahead(rows: Any) -> AbstractContextManager[None]:
    """A process that goes ahead of the loop in the block, where ``rows`` are encoded while it runs."""
    return rows.going_ahead() if isinstance(rows, AheadRows) else nullcontext()


class AheadRows(Sequence["Row | None"]):
    """A row per example.

    Args:
        encode: example numbers -> rows.
        num_examples: in all.
        folder: of the segments; None keeps nothing, and encodes where rows are wanted.
        batch_size: examples encoded together.
    """

    def __init__(self, encode: EncodeSome, num_examples: int, folder: Path | None, batch_size: int) -> None:
        self.encode, self.folder, self.batch_size = encode, folder, batch_size
        self.tally = Tally()  # of what was encoded on the spot
        self._places = array("q", [-1]) * num_examples  # example -> its row, counted through all segments
        self._made = bytearray(num_examples)  # 1 for what was encoded on the spot
        self._segments: list[Rows] = []
        self._starts: list[int] = []
        self._orders: Connection | None = None  # to the process that goes ahead
        self._is_told = False
        if folder is not None:
            begin_place(folder)
            self._look()

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row | None]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row | None] | None:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return self.take([range(len(self))[index]])[0]

    def take(self, examples: Sequence[int]) -> list[Row | None]:
        """The rows of these examples. Raises UserError where one of them cannot be encoded."""
        if any(self._places[example] < 0 for example in examples):
            self._look()
        missing = [example for example in examples if self._places[example] < 0]
        made: dict[int, Row | None] = {}
        if missing:
            rows, counted = self.encode(missing)
            if not all(self._made[example] for example in missing):  # of a later epoch it is known
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
        """What happened to the examples so far, each counted once."""
        whole = Tally()
        for folder in self._folders():
            whole.merge(Tally.from_json(read_manifest(folder)["tally"]))
        whole.merge(self.tally)
        if whole.seen:  # records were read on the way, some of them here and there
            self._look()
            whole.seen = sum(place >= 0 or made > 0 for place, made in zip(self._places, self._made, strict=True))
        for reason, found in whole.records.items():
            whole.records[reason] = list(dict.fromkeys(found))
        return whole

    # --- the process that goes ahead ---

    @contextmanager
    def going_ahead(self) -> Iterator[None]:
        """A process that encodes what ``follow`` tells it, from now to the end of the block.

        It is forked before the run holds locks, devices or threads, which a forked process would keep or break.
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
        """Encode in this order from now on; said once, since every epoch has every example."""
        if self._orders is not None and not self._is_told:
            self._is_told = True
            self._orders.send_bytes(array("q", order).tobytes())

    def _go_ahead(self, orders: Connection, other_end: Connection) -> None:
        assert self.folder is not None
        other_end.close()  # so that the end of the run is the end of the pipe
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the run says when to end
        parent, order = os.getppid(), array("q")
        try:
            order.frombytes(orders.recv_bytes())
        except EOFError:
            return
        with (self.folder / ".lock").open("w") as lock, without_tokenizer_threads():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another rank, or another run of the same set, goes ahead
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
                except UserError:  # the loop meets it, and says it
                    continue
                tally.merge(counted)
                for example, row in zip(batch, rows, strict=True):
                    writer.add(example, row or _NO_ROW)
            writer.close(tally=tally.to_json())

    # --- segments ---

    def _folders(self) -> list[Path]:
        if self.folder is None:
            return []
        return sorted(path for path in self.folder.glob("segment-*") if (path / MANIFEST).is_file())

    def _look(self) -> None:
        """Take in the segments that have come up."""
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
