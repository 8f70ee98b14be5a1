"""Call the user's functions (rewards, tools, environments) with a time limit.

Functions run in the calling thread, because some of them (math-verify) set time limits that only work in the main
thread. Coroutines run concurrently.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

from burnish.utils.forks import end_forked_processes

log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""Seconds to wait for a function to return after it was interrupted."""
_THREAD_GRACE_S = 0.5
"""Seconds to wait for coroutines to end at their time limit before one that blocks the event loop is interrupted."""


class TimeLimitReached(BaseException):
    """Raised at a time limit. Not an ``Exception``, so that a function that catches all exceptions does not
    continue."""


def call_function(call: Callable[[], Any], seconds: float, name: str) -> Any:
    """Call a function and return its result.

    Args:
        call: the function.
        seconds: its time limit.
        name: its name, for messages.

    Raises:
        TimeLimitReached: at the time limit.
    """

    def guarded() -> Any:
        with end_forked_processes(name):
            return call()

    with _time_limit(seconds, name), _with_own_settings():
        if threading.current_thread() is threading.main_thread():
            return guarded()
        pool = ThreadPoolExecutor(1)
        future = pool.submit(guarded)
        pool.shutdown(wait=False)
        if not wait([future], seconds).done:
            raise TimeLimitReached
        return future.result()


def run_coroutines(calls: Sequence[Callable[[], Awaitable[Any]]], names: Sequence[str], seconds: float) -> list[Any]:
    """Run coroutines concurrently and return their results in order. The result of one that fails is its exception, of
    one that reaches the time limit ``TimeLimitReached()``.

    Args:
        calls: functions that return a coroutine or another awaitable object.
        names: their names, for messages.
        seconds: time limit of each.
    """
    if not calls:
        return []

    async def one(call: Callable[[], Awaitable[Any]], name: str) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                with end_forked_processes(name):
                    return await call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as SystemExit, which would end the event loop
            return TimeLimitReached() if limit.expired() else error

    async def every() -> list[Any]:
        return await asyncio.gather(*map(one, calls, names))

    with _time_limit(seconds + _THREAD_GRACE_S), _with_own_settings():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(every())
        with ThreadPoolExecutor(1) as pool:  # in a notebook, this thread has a running event loop
            return pool.submit(asyncio.run, every()).result()


@contextmanager
def _with_own_settings() -> Iterator[None]:
    """Restore settings that a function may change for the following training: torch's gradient mode and default dtype,
    and the working directory."""
    with_gradient, dtype, folder = torch.is_grad_enabled(), torch.get_default_dtype(), os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        torch.set_grad_enabled(with_gradient)
        torch.set_default_dtype(dtype)
        os.fchdir(folder)
        os.close(folder)


@contextmanager
def _time_limit(seconds: float, name: str = "A function") -> Iterator[None]:
    """Raise ``TimeLimitReached`` inside the block after ``seconds``, in the main thread of a system with this signal.

    The signal is SIGVTALRM, sent by a timer thread: SIGALRM is left to the functions, and math-verify sets it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
        yield
        return

    def raise_it(*_: Any) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGVTALRM, raise_it)
    main = threading.get_ident()
    is_done = threading.Event()

    def watch() -> None:
        if is_done.wait(seconds):
            return
        signal.pthread_kill(main, signal.SIGVTALRM)
        if not is_done.wait(_PATIENCE_S):
            log.error("%s has not returned for %g s and cannot be interrupted. End the process.", name, seconds)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
        signal.signal(signal.SIGVTALRM, before)
