"""The records behind the rows of a step: ``data.json, record 17``, for sentences about a step that went wrong.

In: the examples of a training set, which need not be kept, and its rows before packing. Out: a function from the items
of a step (rows or packs, by their index) to the places of their records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from burnish.core.types import Example, Row
from burnish.data.sets.examples import LazyExamples
from burnish.data.tally import Tally


class Origins:
    """Places of records, by the index of a row or a pack.

    Args:
        rows: before they were packed.
        pack: rows -> packs; None where rows are not packed.
    """

    def __init__(
        self, examples: Sequence[Example], rows: Sequence[Row | None], pack: Callable[[Any], Sequence[Row]] | None
    ) -> None:
        self.lazy = examples if isinstance(examples, LazyExamples) else None
        known = [] if self.lazy is not None else examples
        self.sources = list(dict.fromkeys(example.source for example in known))
        index_of = {source: index for index, source in enumerate(self.sources)}
        self.which = array("i", (index_of[example.source] for example in known))
        self.numbers = array("q", (example.number for example in known))
        self.rows, self.pack = rows, pack

    def __call__(self, items: Sequence[int]) -> list[str]:
        """The places of the records in ``items``, each once."""
        rows = items if self.pack is None else [row for item in items for row in self._rows_of(item)]
        origins = getattr(self.rows, "origins", None)
        examples = (index if origins is None else origins[index] for index in rows)
        return list(dict.fromkeys(map(self._place, examples)))

    def _place(self, example: int) -> str:
        if self.lazy is not None:
            (found,) = self.lazy.take([example], Tally())
            return f"example {example + 1}" if found is None else found.place
        return f"{self.sources[self.which[example]]}, record {self.numbers[example]}"

    def _rows_of(self, item: int) -> list[int]:
        """The rows of a pack: rows of the same lengths whose tokens are their own indices are packed again."""
        assert self.pack is not None
        tagged = [{"input_ids": [n] * len(ids), "labels": [n] * len(ids)} for n, ids in enumerate(self._ids())]
        return list(dict.fromkeys(self.pack(tagged)[item]["input_ids"]))

    def _ids(self) -> list[list[int]]:
        return [[] if row is None else row["input_ids"] for row in self.rows]


def in_words(places: Sequence[str], most: int = 8) -> str:
    """``data.json, record 3; data.json, record 9 and 4 more``."""
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return "; ".join(places[:most]) + more
