"""When Python searches for cyclic garbage: not while a run is made ready, and then among new objects alone.

Imports, options and encoding make some million objects, which stay, and next to no cycles. A full search walks all of
them: 0.2 to 0.35 s each time once torch and transformers are there, and it falls into importing a dozen times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No search meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_from_here() -> None:
    """Search again where nobody did, and never again among what stands now. Where the search was on, in a program that
    calls burnish, it is left alone."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
