"""Ctrl-C where nothing is to be saved: while libraries are imported, before anything is written, and at the very end.

Python answers it with KeyboardInterrupt wherever it stands; in an import, or while Python exits, that is a
page of other people's code, or an ImportError that is not true.
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
    """Ctrl-C ends the process in the block with one line, until ``interruptible`` is called; as it was thereafter."""
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
    """Let Ctrl-C raise KeyboardInterrupt from here on, because there is something to clean up."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_quietly(status: int) -> None:
    """Let Ctrl-C end the process with ``status`` from now on: all work is done, and Python only has to shut down."""
    if _is_ours_to_take(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))


def _is_ours_to_take(handler: object) -> bool:
    """Return whether ``handler`` is Python's own. One that somebody set, or an ignored signal, is left alone."""
    return threading.current_thread() is threading.main_thread() and handler is signal.default_int_handler


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nStopped by Ctrl-C.\n")
    os._exit(INTERRUPTED)
