"""Many cases of a test, of which ``make test-fast`` takes a few that stand for the others."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: Container[Any] | int) -> list[Any]:
    """The parameters of a test. Args: kept: the cases that are quick to go through, or how many of the first."""
    listed = list(cases)
    is_kept = (lambda at: at < kept) if isinstance(kept, int) else (lambda at: listed[at] in kept)
    return [case if is_kept(at) else pytest.param(case, marks=pytest.mark.run) for at, case in enumerate(listed)]
