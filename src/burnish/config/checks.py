"""Checks and notes on the options of a run, contributed by the components that declare the options.

A component registers a function of the options, under any name, next to the options that it reads:

    @check
    def check_parallel(options: ParallelOptions) -> list[Problem]: ...

    @notes
    def parallel_notes(options: ParallelOptions) -> list[str]: ...

``run/plan/plan.py`` calls every registered function for every run, before data or weights are read. A check returns
problems. A note is a sentence about an option without effect, or about an automatic choice. Functions are registered
when their module is imported, so a third-party package registers its own in the module of its entry point.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from burnish.config.errors import Problem

Check = Callable[[Any], Iterable[Problem]]
Notes = Callable[[Any], Iterable[str]]
C = TypeVar("C", bound=Check)
N = TypeVar("N", bound=Notes)

CHECKS: list[Check] = []
"""Every registered check, in the order of registration."""
NOTES: list[Notes] = []
"""Every registered function that returns notes, in the order of registration."""


def check(function: C) -> C:
    """Decorator: call ``function(options)`` in every run to find problems."""
    CHECKS.append(function)
    return function


def notes(function: N) -> N:
    """Decorator: call ``function(options)`` in every run to collect notes."""
    NOTES.append(function)
    return function
