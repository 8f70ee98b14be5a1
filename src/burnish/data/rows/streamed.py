"""Rows of a streamed dataset: encoded on access and not kept.

An example without a row keeps its place in the order and contributes no label. The examples of a step therefore depend
on the options and the data only, and a resumed run continues at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.data.length import check_record_lengths
from burnish.data.rows.encode import Encode
from burnish.data.rows.row_set import RowSet
from burnish.data.sets.examples import Examples
from burnish.data.stats import DataStats
from burnish.loop.types import Row, as_lists


class StreamedRows(RowSet["Row | None"]):
    """One row per example; None for an example without a row.

    Args:
        examples: examples that stay in their files.
        encode: function that encodes a batch of examples.
        check: raises UserError for a row that the run cannot use.
    """

    is_streamed = True

    def __init__(self, examples: Examples, encode: Encode, check: Callable[[Row], None] = lambda row: None) -> None:
        self.examples, self.encode, self.check = examples, encode, check
        self.stats = DataStats()
        self._is_seen = bytearray(len(examples))  # 1 for an example that is counted in the stats

    def __len__(self) -> int:
        return len(self.examples)

    def item(self, index: int) -> Row | None:
        return self.__getitems__([index])[0]

    def __getitems__(self, examples: Sequence[int]) -> list[Row | None]:
        """Return the rows of these examples. Raises UserError if one of them cannot be encoded."""
        stats = DataStats()
        found = self.examples.make(examples, stats)
        present = [example for example in found if example is not None]
        check_record_lengths(present)
        rows = iter(self.encode(present, stats))
        made = [None if example is None else next(rows) for example in found]
        for row in filter(None, made):
            self.check(row)
        if not all(self._is_seen[example] for example in examples):  # all were counted in an earlier epoch
            self.stats.merge(stats)
        for example in examples:
            self._is_seen[example] = 1
        return [as_lists(row) for row in made]

    def seen(self) -> list[int]:
        """Return the examples that were read so far."""
        return [example for example, is_seen in enumerate(self._is_seen) if is_seen]

    def statistics(self) -> DataStats:
        """Return the statistics of the examples read so far, each counted once."""
        whole = DataStats(seen=sum(self._is_seen) if self.stats.seen else 0)
        for reason, found in self.stats.records.items():
            whole.records[reason] = list(dict.fromkeys(found))
        return whole
