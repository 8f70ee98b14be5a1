"""Long work, told while it goes on: encoding, loading, evaluating, answering, saving.

In: whoever does the work says what it is, how much there is of it, and when a part is done. Out: calls of the one
watcher that ``watch_with`` was given (``report/work.py``: a bar in a terminal, a line now and then elsewhere). Without
a watcher nothing is shown. Of work within work the outermost is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")


class Watcher(Protocol):
    """Shows one piece of work at a time."""

    def begin(self, what: str, total: int | None, unit: str) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


_watcher: Watcher | None = None
_depth = 0


def watch_with(watcher: Watcher | None) -> None:
    """Show work through ``watcher`` from now on; None shows none."""
    global _watcher
    _watcher = watcher


@contextmanager
def work(what: str, total: int | None = None, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Tell of the work inside the ``with`` block.

    Args:
        what: the work as a user knows it: "Tokenizing".
        total: how much there is of it; None where nobody knows before its end.
        unit: what is counted, in the plural.
    Yields:
        a function that takes how much more is done.
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


def watched(items: Iterable[Item], what: str, unit: str, of: Any = None) -> Iterator[Item]:
    """``items``, one by one, told as work of which each is a part. Args: of: what they are made of, one by one."""
    counted = items if of is None else of
    with work(what, len(counted) if isinstance(counted, Sized) else None, unit) as advance:
        for item in items:
            yield item
            advance(1)
