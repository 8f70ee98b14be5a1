"""Counts of skipped and changed records by category; no behavior depends on the wording of a reason."""

import pickle

from burnish.data.stats import DataStats, RecordReason, drop_reason, keep_reason, truncation_reason
from burnish.loop.types import Example

EXAMPLE = Example(messages=(), source="d.json", number=3)


def stats_of(*reasons):
    stats = DataStats(seen=5)
    for reason in reasons:
        stats.add(reason, EXAMPLE)
    return stats


def test_reason_keeps_its_kind_across_processes_and_files():
    reason = drop_reason("longer than {limit}", is_length=True).format(limit="cutoff_len")
    for copy in (pickle.loads(pickle.dumps(reason)), *DataStats.from_json(stats_of(reason).to_json()).records):
        assert (copy, copy.kind, copy.is_length) == ("dropped: longer than cutoff_len", "dropped", True)


def test_kind_does_not_depend_on_wording():
    stats = stats_of(RecordReason("gone", "dropped"), RecordReason("dropped: cutoff_len", "kept"))
    assert stats.drop_reasons([EXAMPLE]) == ["gone"]
    assert not stats.has_truncated
    assert stats_of(RecordReason("shorter", "truncated", is_length=True)).has_truncated


def test_each_reason_has_one_line():
    reasons = (
        drop_reason("a.png is 9x1."), keep_reason("a response is empty"), truncation_reason("messages shortened")
    )  # fmt: skip
    assert stats_of(*reasons).sentences() == [
        "dropped: a.png is 9x1: 1 of 5 examples (d.json: 3)",
        "kept: a response is empty: 1 of 5 examples (d.json: 3)",
        "truncated: messages shortened: 1 of 5 examples (d.json: 3)",
    ]
