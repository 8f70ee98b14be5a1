"""Share of time in which the thread that trains waits: for other processes in collectives, or for data.

In: clocks of the operating system. Out: seconds waited and seconds passed since the last lap. Waiting is what is left
of the time when the thread neither ran nor stood ready to run: on a CPU, where products run in this thread, that is the
time in which it waits for others. On a GPU the thread runs ahead of the device and tells nothing: none is logged there.

A lap reads one small file of the system, some 20 microseconds (``run_delay`` in
https://docs.kernel.org/scheduler/sched-stats.html); other systems than Linux count time ready to run as waiting.
"""

from __future__ import annotations

import time
from pathlib import Path

_SCHEDULE = Path("/proc/thread-self/schedstat")


class Waiting:
    """A clock of the thread that made it."""

    def __init__(self) -> None:
        self.passed_s, self.busy_s = time.perf_counter(), _busy_s()

    def lap(self) -> tuple[float, float]:
        """Seconds waited and seconds passed since the last lap."""
        passed_s, busy_s = time.perf_counter(), _busy_s()
        passed, busy = passed_s - self.passed_s, busy_s - self.busy_s
        self.passed_s, self.busy_s = passed_s, busy_s
        return max(0.0, passed - busy), passed


def _busy_s() -> float:
    """Seconds in which this thread ran or was ready to."""
    try:
        ready_ns = int(_SCHEDULE.read_text(encoding="ascii").split()[1])
    except OSError:
        ready_ns = 0
    return time.thread_time() + ready_ns / 1e9
