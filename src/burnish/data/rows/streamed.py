"""Rows of a streamed dataset, each encoded when it is used and not kept.

In: examples that stay in their files, and a function that encodes some of them. Out: ``StreamedRows``, a sequence with
a row per example, None where an example gives none. An example that gives no row keeps its place in the order and has
no label, so the examples of a step depend on options and data alone, and a resumed run continues at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.data.length import refuse_endless
from burnish.data.rows.encode import Encode
from burnish.data.rows.row_set import RowSet
from burnish.data.sets.examples import Examples
from burnish.data.stats import DataStats
from burnish.loop.types import Row, as_lists


class StreamedRows(RowSet["Row | None"]):
    """A row per example.

    Args:
        encode: a batch of examples -> their rows.
        check: raises UserError for a row that the run cannot take.
    """

    is_streamed = True

    def __init__(self, examples: Examples, encode: Encode, check: Callable[[Row], None] = lambda row: None) -> None:
        self.examples, self.encode, self.check = examples, encode, check
        self.stats = DataStats()
        self._is_seen = bytearray(len(examples))  # 1 for an example that is in the stats

    def __len__(self) -> int:
        return len(self.examples)

    def made(self, index: int) -> Row | None:
        return self.some([index])[0]

    def some(self, examples: Sequence[int]) -> list[Row | None]:
        """The rows of these examples. Raises UserError where one of them cannot be encoded."""
        stats = DataStats()
        found = self.examples.make(examples, stats)
        present = [example for example in found if example is not None]
        refuse_endless(present)
        rows = iter(self.encode(present, stats))
        made = [None if example is None else next(rows) for example in found]
        for row in filter(None, made):
            self.check(row)
        if not all(self._is_seen[example] for example in examples):  # all were counted in an earlier epoch
            self.stats.merge(stats)
        for example in examples:
            self._is_seen[example] = 1
        return [as_lists(row) for row in made]

    def counted(self) -> DataStats:
        """The stats of the examples so far, each counted once."""
        whole = DataStats(seen=sum(self._is_seen) if self.stats.seen else 0)
        for reason, found in self.stats.records.items():
            whole.records[reason] = list(dict.fromkeys(found))
        return whole
