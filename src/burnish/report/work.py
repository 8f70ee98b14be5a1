"""Progress of long operations outside of training.

A terminal shows a bar with count, rate and remaining time. Elsewhere a line is printed every half minute, so that a
slow operation is not mistaken for a hang. The operations call ``utils.work``. Those shorter than ``PATIENCE_S`` are not
shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from burnish.report import console
from burnish.report.console import GAP, bar
from burnish.report.pace import short_number, short_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

PATIENCE_S = 1.0
HEARTBEAT_S = 30.0


class WorkLine:
    """Shows the progress of one operation at a time, drawn by a separate thread.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread: threading.Thread | None = None

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self._start_s, self._is_over = self._clock(), threading.Event()
        if console.is_main_process() and not console.is_live():  # training shows evaluations in its own live line
            self._thread = threading.Thread(target=self._show, name="burnish-work", daemon=True)
            self._thread.start()

    def advance(self, count: int) -> None:
        self.done += count

    def end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        if self._is_over.wait(PATIENCE_S):
            return
        if console.is_terminal():
            console.begin_live(self)
            self._is_over.wait()
            console.end_live()
            return
        while not self._is_over.wait(HEARTBEAT_S):
            console.note(self.sentence())

    def sentence(self) -> str:
        """Return ``Encoding: 12,000 of 100,000 rows, 3.1k a second, 0:28 left``."""
        return f"{self.what}: {', '.join(self.words())}"

    def words(self) -> Iterator[str]:
        elapsed_s = self._clock() - self._start_s
        if self.total is None:
            yield f"{short_time(elapsed_s)} so far"
            return
        yield f"{self.done:,} of {self.total:,} {self.unit}"
        if self.done and elapsed_s > 0:
            yield f"{short_number(self.done / elapsed_s)} per second"
            yield f"{short_time((self.total - self.done) * elapsed_s / self.done)} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        text = self.sentence()
        share = self.done / self.total if self.total else 0.0
        drawn = bar(options.max_width - len(text) - len(GAP), share, options.ascii_only) if self.total else []
        yield Text(GAP, no_wrap=True, overflow="crop", end="").join([*drawn, Text(text)])
