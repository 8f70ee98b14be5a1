"""Parametrization of tests with many similar cases, of which fast runs use representative ones."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def representative(cases: Iterable[Any], fast: Container[Any] | int, mark: str = "run") -> list[Any]:
    """Return the parameters of a test; cases that are not representative get a mark.

    Args:
        cases: all cases.
        fast: the representative cases, or the number of the first ones that are.
        mark: ``run`` leaves the others out of ``make test-fast``, ``slow`` out of ``make test`` as well.
    """
    all_cases = list(cases)
    is_fast = (lambda index: index < fast) if isinstance(fast, int) else (lambda index: all_cases[index] in fast)
    other_mark = getattr(pytest.mark, mark)
    return [case if is_fast(index) else pytest.param(case, marks=other_mark) for index, case in enumerate(all_cases)]


def representative_slow(cases: Iterable[Any], fast: Container[Any] | int) -> list[Any]:
    """``representative`` for long cases: the others are part of ``make test-slow``."""
    return representative(cases, fast, "slow")


def mark_unsampled(items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests with ``@pytest.mark.sample(n)`` as slow, except n evenly spaced ones."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test_items in cases.values():
        (count,) = test_items[0].get_closest_marker("sample").args
        sampled = {index * len(test_items) // count for index in range(count)}
        for index, item in enumerate(test_items):
            if index not in sampled:
                item.add_marker(pytest.mark.slow)


def collected_values(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Return the values of a parameter in the collected tests of the module, so that a fixture prepares only those."""
    calls = (item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return {call.params[name] for call in calls if name in call.params}
