"""Parameters of tests with many similar cases, of which quick runs take representatives."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: Container[Any] | int, mark: str = "run") -> list[Any]:
    """Return the parameters of a test; cases that are not representative get a mark.

    Args:
        cases: all cases.
        kept: the representative cases, or the number of the first ones that are.
        mark: ``run`` leaves the others out of ``make test-fast``, ``slow`` out of ``make test`` as well.
    """
    listed = list(cases)
    is_kept = (lambda at: at < kept) if isinstance(kept, int) else (lambda at: listed[at] in kept)
    other = getattr(pytest.mark, mark)
    return [case if is_kept(at) else pytest.param(case, marks=other) for at, case in enumerate(listed)]


def few_slow(cases: Iterable[Any], kept: Container[Any] | int) -> list[Any]:
    """``few`` for cases that take long: the others are left to ``make test-slow``."""
    return few(cases, kept, "slow")
