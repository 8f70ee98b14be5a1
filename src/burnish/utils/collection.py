"""Thresholds of Python's garbage collector: high during start-up, the defaults during training and serving."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL_THRESHOLDS = (700, 10, 10)
"""Python's defaults, as arguments of ``gc.set_threshold``."""
_THRESHOLDS_AT_START = (100_000, 50, 100)


def collect_garbage_rarely() -> None:
    """Raise the thresholds of the garbage collector until ``collect_garbage_as_usual`` is called.

    Imports and encoding create about a million objects and few cycles. With Python's defaults, collections took 1.7 s
    of start-up and a third of encoding 20,000 records.
    """
    gc.set_threshold(*_THRESHOLDS_AT_START)


def collect_garbage_as_usual() -> None:
    """Restore Python's default thresholds of the garbage collector, if ``collect_garbage_rarely`` changed them.

    A cycle that holds tensors, in a callback or a reward function for example, would keep their memory otherwise.
    """
    if gc.get_threshold() == _THRESHOLDS_AT_START:
        gc.set_threshold(*_USUAL_THRESHOLDS)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the collector of reference cycles in the ``with`` block.

    It would traverse all examples that were created so far again and again: a quarter of the time for 100,000 records.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
