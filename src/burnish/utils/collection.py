"""Times at which Python searches for cyclic garbage: not while a run is made ready, and then among new objects alone.

Imports, options and encoding make some million objects, which stay, and next to no cycles. A full search walks all of
them: 0.2 to 0.35 s each time once torch and transformers are there, and it falls into importing a dozen times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Switch the search for cyclic garbage off inside the ``with`` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_from_here() -> None:
    """Switch the search on again, for objects made from now on: those that exist already are not searched. Where the
    search was never off, as in a program that calls burnish, nothing changes."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
