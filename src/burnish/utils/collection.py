"""Pause the garbage collector while many objects are created that all stay alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
