"""Handle Ctrl-C while there is nothing to save: during imports, before anything is written, and at exit.

Python raises KeyboardInterrupt at the current position. During an import or at exit, this prints a long foreign
traceback or a misleading ImportError.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Context in which Ctrl-C ends the process with one line, until ``interruptible`` is called. Restores the
    handler."""
    before = signal.getsignal(signal.SIGINT)
    if not _is_ours_to_take(before):
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruptible() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on, because there is something to clean up."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_quietly(status: int) -> None:
    """Make Ctrl-C end the process with ``status`` from now on: the work is done, and Python only has to shut down."""
    if _is_ours_to_take(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))


def _is_ours_to_take(handler: object) -> bool:
    """Whether ``handler`` is Python's default. Custom handlers and ignored signals are kept."""
    return threading.current_thread() is threading.main_thread() and handler is signal.default_int_handler


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nStopped by Ctrl-C.\n")
    os._exit(INTERRUPTED)
