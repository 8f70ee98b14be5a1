"""Statistics of records that were dropped, truncated or changed during encoding, with reasons and record numbers.

No record is dropped, truncated or left without labels silently: the code that does it adds a reason here. ``explain``,
the log and the model card print the statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.loop.types import Example

TRUNCATED = "truncated"
"""First word of the reasons of examples that lost content."""
SHOWN = 5
"""Maximum number of record numbers printed per reason."""


@dataclass
class DataStats:
    """Reason -> the records it applies to, in reading order."""

    records: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    seen: int = 0

    def add(self, reason: str, example: Example) -> None:
        """Count a record.

        Args:
            reason: a participle phrase, for example "dropped: the assistant turn is empty".
        """
        self.records[reason].append((example.source, example.number))

    @property
    def has_truncated(self) -> bool:
        """Whether a larger ``cutoff_len`` would keep more of the examples."""
        return any(kind_of(reason) == TRUNCATED or "cutoff_len" in reason for reason in self.records)

    def count(self, reason: str) -> int:
        return len(self.records.get(reason, ()))

    def dropped(self, examples: Sequence[Example]) -> list[str]:
        """Return the reasons why ``examples`` were dropped, or an empty list if at least one of them is used."""
        reasons = [reason for reason in self.records if kind_of(reason) == "dropped"]
        places = {(example.source, example.number) for example in examples[: sum(map(self.count, reasons)) + 1]}
        found = [reason for reason in reasons if not places.isdisjoint(self.records[reason])]
        return found if places <= {place for reason in found for place in self.records[reason]} else []

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((reason, len(found)) for reason, found in sorted(self.records.items()))

    def sentences(self) -> list[str]:
        """Return a line per reason: ``dropped: all responses are empty: 2 of 1000 examples (train.json: 17, 204)``."""
        return [f"{reason}: {count} of {self.seen} examples ({self._places(reason)})" for reason, count in self]

    def _places(self, reason: str) -> str:
        by_source: dict[str, list[int]] = defaultdict(list)
        for source, number in sorted(self.records[reason])[:SHOWN]:
            by_source[source].append(number)
        named = "; ".join(f"{source}: {', '.join(map(str, numbers))}" for source, numbers in by_source.items())
        return named + (", ..." if len(self.records[reason]) > SHOWN else "")

    def merge(self, other: DataStats) -> None:
        self.seen += other.seen
        for reason, found in other.records.items():
            self.records[reason].extend(found)

    def to_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "records": {k: [list(p) for p in v] for k, v in self.records.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataStats:
        stats = cls(seen=data["seen"])
        for reason, found in data["records"].items():
            stats.records[reason] = [(source, number) for source, number in found]
        return stats


def kind_of(reason: str) -> str:
    """Return the first word of a reason: ``dropped``, ``truncated`` or ``kept``."""
    return reason.split(maxsplit=1)[0].rstrip(":,")
