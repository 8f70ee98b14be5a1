"""Handle Ctrl-C while there is nothing to save: during imports, before anything is written, and at exit.

Python raises KeyboardInterrupt at the current position. During an import or at exit, this prints a long foreign
traceback or a misleading ImportError. This file itself imports only what the interpreter has loaded already: until its
handler is set, the traceback is printed.
"""

from __future__ import annotations

import os

# The module ``signal`` imports enum, functools and collections first: 10 ms, a tenth of a second on a busy machine.
from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 128 + int(SIGINT)


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process with one line from now on, until ``interruptible`` is called."""
    if _is_replaceable(getsignal(SIGINT)):
        signal(SIGINT, _stop)


class exiting_on_interrupt:
    """Context in which Ctrl-C ends the process with one line, until ``interruptible`` is called. Restores the
    handler."""

    def __enter__(self) -> None:
        self.before = getsignal(SIGINT)
        exit_on_interrupt()

    def __exit__(self, *error: object) -> None:
        if _is_replaceable(self.before):
            signal(SIGINT, self.before)


def interruptible() -> None:
    """Make Ctrl-C raise KeyboardInterrupt from now on, because there is something to clean up."""
    if getsignal(SIGINT) is _stop and _is_replaceable(_stop):
        signal(SIGINT, default_int_handler)


def exit_quietly(status: int) -> None:
    """Make Ctrl-C end the process with ``status`` from now on: the work is done, and Python only has to shut down."""
    if _is_replaceable(getsignal(SIGINT)):
        signal(SIGINT, lambda number, frame: os._exit(status))


def exit_without_finalization(status: int) -> NoReturn:
    """End the process after its threads and exit functions, without finalizing the interpreter.

    A thread of gloo that releases a tensor during the finalization would end a finished run with SIGABRT and "terminate
    called without an active exception" (https://github.com/pytorch/pytorch/pull/179291).
    """
    import atexit
    import sys
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or its reader is gone
            continue
    os._exit(status)


def _is_replaceable(handler: object) -> bool:
    """Whether ``handler`` is Python's default or the one of this module. Custom handlers and ignored signals are
    kept."""
    import threading

    is_known = handler is default_int_handler or handler is _stop
    return is_known and threading.current_thread() is threading.main_thread()


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nStopped by Ctrl-C.\n")
    os._exit(INTERRUPTED)
