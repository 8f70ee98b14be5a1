"""Statistics of records that were dropped, truncated or changed during encoding, with reasons and record numbers.

No record is dropped, truncated or left without labels silently: the code that does it adds a reason here. ``explain``,
the log and the model card print the statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from burnish.loop.types import Example

Kind: TypeAlias = Literal["dropped", "truncated", "kept"]
"""What happened to a record: not trained on, trained on with less content, or trained on with a remark."""
SHOWN = 5
"""Maximum number of record numbers printed per reason."""


class RecordReason(str):
    """A message about what happened to a record and why, such as "dropped: no text", with its kind as data.

    Args:
        kind: what happened to the record.
        is_length: whether a larger ``cutoff_len`` would keep more of the record.
        remedy: what to do, if the data need no correction.
    """

    kind: Kind
    is_length: bool
    remedy: str

    def __new__(cls, message: str, kind: Kind, is_length: bool = False, remedy: str = "") -> Self:
        reason = super().__new__(cls, message)
        reason.kind, reason.is_length, reason.remedy = kind, is_length, remedy
        return reason

    def format(self, *args: object, **names: object) -> RecordReason:
        """Like ``str.format``, with the same kind."""
        return RecordReason(super().format(*args, **names), self.kind, self.is_length, self.remedy)

    def __reduce__(
        self,
    ) -> tuple[type[RecordReason], tuple[str, Kind, bool, str]]:  # to pass reasons between tokenization processes
        return RecordReason, (str(self), self.kind, self.is_length, self.remedy)


def drop_reason(why: str, is_length: bool = False, remedy: str = "") -> RecordReason:
    """Return a reason for records that are not trained on."""
    return RecordReason(f"dropped: {why}", "dropped", is_length, remedy)


def truncation_reason(what: str, is_length: bool = True) -> RecordReason:
    """Return a reason for records that lost content."""
    return RecordReason(f"truncated: {what}", "truncated", is_length)


def keep_reason(what: str) -> RecordReason:
    """Return a reason for records that are trained on, but may contain a mistake."""
    return RecordReason(f"kept: {what}", "kept")


@dataclass
class DataStats:
    """Reason -> the records it applies to, in reading order."""

    records: dict[RecordReason, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    seen: int = 0

    def add(self, reason: RecordReason, example: Example) -> None:
        """Count a record."""
        self.records[reason].append((example.source, example.number))

    @property
    def has_truncated(self) -> bool:
        """Whether a larger ``cutoff_len`` would keep more of the examples."""
        return any(reason.is_length for reason in self.records)

    @property
    def remedies(self) -> list[str]:
        """What to do about the dropped records, without duplicates."""
        return list(dict.fromkeys(reason.remedy for reason in self.records if reason.remedy))

    def count(self, reason: str) -> int:
        return sum(len(found) for each, found in self.records.items() if each == reason)

    def drop_reasons(self, examples: Sequence[Example]) -> Sequence[str]:
        """Return the reasons why ``examples`` were dropped, or an empty list if at least one of them is used."""
        reasons = [reason for reason in self.records if reason.kind == "dropped"]
        places = {(example.source, example.number) for example in examples[: sum(map(self.count, reasons)) + 1]}
        found = [reason for reason in reasons if not places.isdisjoint(self.records[reason])]
        return found if places <= {place for reason in found for place in self.records[reason]} else []

    def __iter__(self) -> Iterator[tuple[RecordReason, int]]:
        return ((reason, len(found)) for reason, found in sorted(self.records.items()))

    def sentences(self) -> list[str]:
        """Return a line per reason: ``dropped: all responses are empty: 2 of 1000 examples (train.json: 17, 204)``."""
        return [
            f"{reason.rstrip('.')}: {count} of {self.seen} examples ({self._places(reason)})" for reason, count in self
        ]

    def problems(self) -> list[str]:
        """Return a line per reason, for an error: ``2 of 1000 examples dropped: all responses are empty (train.json,
        records 17, 204)``."""
        return [
            f"{count} of {self.seen} examples {reason.kind}: "
            f"{reason.removeprefix(f'{reason.kind}: ').rstrip('.')} ({self._places(reason, 'record')})"
            for reason, count in self
        ]

    def _places(self, reason: RecordReason, noun: str = "") -> str:
        by_source: dict[str, list[int]] = defaultdict(list)
        for source, number in sorted(self.records[reason])[:SHOWN]:
            by_source[source].append(number)
        named = "; ".join(
            f"{source}{f', {noun}' + 's' * (len(numbers) > 1) if noun else ':'} {', '.join(map(str, numbers))}"
            for source, numbers in by_source.items()
        )
        return named + (", ..." if len(self.records[reason]) > SHOWN else "")

    def merge(self, other: DataStats) -> None:
        self.seen += other.seen
        for reason, found in other.records.items():
            self.records[reason].extend(found)

    def merge_sides(self, chosen: DataStats, rejected: DataStats) -> None:
        """Add the statistics of both responses of pairs. What applies to both is counted once."""
        self.merge(chosen)
        for reason, found in rejected.records.items():
            known = set(chosen.records.get(reason, ()))
            self.records[reason].extend(place for place in found if place not in known)

    def to_json(self) -> dict[str, Any]:
        found = [
            [str(why), why.kind, why.is_length, [list(p) for p in v], why.remedy] for why, v in self.records.items()
        ]
        return {"seen": self.seen, "records": found}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataStats:
        stats = cls(seen=data["seen"])
        for message, kind, is_length, found, *more in data["records"]:  # files of earlier versions have no remedy
            reason = RecordReason(message, kind, is_length, *more)
            stats.records[reason] = [(source, number) for source, number in found]
        return stats
