"""Progress reporting for long operations: encoding, loading, evaluating, generating, saving.

In: an operation reports its name, its size, and each completed part. Out: calls of the watcher that was set with
``set_watcher`` (``report/work.py``: a progress bar in a terminal, occasional lines elsewhere). Without a watcher,
nothing is shown. Only the outermost of nested operations is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")


class Watcher(Protocol):
    """Shows the progress of one operation at a time."""

    def begin(self, what: str, total: int | None, unit: str) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


_watcher: Watcher | None = None
_depth = 0


def set_watcher(watcher: Watcher | None) -> None:
    """Set the watcher that shows progress; None: progress is not shown."""
    global _watcher
    _watcher = watcher


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Report the operation inside the ``with`` block.

    Args:
        what: name of the operation for the user: "Tokenizing".
        total: number of units; None if it is not known in advance.
        unit: what is counted, in the plural.

    Yields:
        A function to call with the number of completed units.
    """
    global _depth
    watcher = _watcher if _depth == 0 else None
    _depth += 1
    if watcher is not None:
        watcher.begin(what, total, unit)
    try:
        yield watcher.advance if watcher is not None else lambda count: None
    finally:
        _depth -= 1
        if watcher is not None:
            watcher.end()


def track(items: Iterable[Item], what: str, unit: str, of: Any = None) -> Iterator[Item]:
    """Iterate over ``items`` and report each as a completed unit. ``of`` is the sequence that ``items`` are made
    from."""
    counted = items if of is None else of
    with progress(what, len(counted) if isinstance(counted, Sized) else None, unit) as advance:
        for item in items:
            yield item
            advance(1)
