"""The thread that renders and tokenizes the prompts of requests, and the thread that decodes their images.

A chat template may need seconds for one conversation, or loop, and the prompts of other requests wait for it meanwhile.
The first attempt at a prompt is therefore stopped after a fraction of a second. It is repeated, with the time limit of
the server, when no other prompt waits for its first attempt. Images may take seconds to decode; those of requests with
few pixels are decoded first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any

from burnish.config.bounds import FIRST_RENDERING_S
from burnish.serve.http.errors import APIError

PROMPT_WAIT_S = 10.0
"""Maximum time of a request in a queue, which chat templates that loop and large images can block."""
_LEAST_RENDERING_S = 0.02
"""Time in seconds of a first attempt while many slow prompts wait; it is several times that of an ordinary prompt."""


class SlowRendering(APIError):
    """Raised if the chat template exceeds its time limit for a request."""


@dataclass
class _Job:
    """A function to call in a thread, and its result.

    Args:
        begun_s: time at which it was submitted.
        patience_s: maximum time in the queue in seconds.
    """

    work: Callable[[], Any]
    patience_s: float
    begun_s: float = field(default_factory=time.monotonic)
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> Any:
        """Call the function. Raises APIError 429 if it has waited for more than ``patience_s``."""
        if time.monotonic() - self.begun_s > self.patience_s:
            from burnish.serve.api.responses import queue_full

            raise queue_full(self.patience_s)
        return self.work()

    def end(self, result: Any, error: BaseException | None) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error) if error is not None else self.result.set_result(result)


class PromptQueue:
    """Calls functions in one thread, in the order of their submission; those with slow renderings after the others."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "burnish-prompts")
        self._new: deque[_Job] = deque()
        self._slow: deque[_Job] = deque()

    def submit(self, patience_s: float, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in the thread. After ``patience_s`` in the queue, its result is an APIError 429 instead."""
        prompt = _Job(partial(function, *arguments), patience_s)
        self._new.append(prompt)
        self._thread.submit(self._run_next)
        return prompt.result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down like a ``ThreadPoolExecutor``."""
        self._thread.shutdown(wait=wait, cancel_futures=cancel_futures)
        if cancel_futures:
            for prompt in (*self._new, *self._slow):
                prompt.result.cancel()

    def _run_next(self) -> None:
        """Run one prompt, in the thread."""
        is_first_attempt = bool(self._new)
        prompt = (self._new or self._slow).popleft()
        if prompt.result.cancelled():
            return
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._attempt(prompt, is_first_attempt)
        except BaseException as raised:  # every exception must reach the caller
            error = raised
        if is_first_attempt and isinstance(error, SlowRendering):
            self._repeat_later(prompt)
        else:
            prompt.end(result, error)

    def _repeat_later(self, prompt: _Job) -> None:
        self._slow.append(prompt)
        try:
            self._thread.submit(self._run_next)
        except RuntimeError:  # shut down meanwhile
            prompt.result.cancel()

    def _attempt(self, prompt: _Job, is_first: bool) -> Any:
        if not is_first:
            return prompt.run()
        from burnish.data.chat.rendering import limit_rendering

        with limit_rendering(max(FIRST_RENDERING_S / (1 + len(self._slow)), _LEAST_RENDERING_S)):
            return prompt.run()


class DecodingQueue:
    """Calls functions that decode images in one thread, those with the fewest pixels first."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "burnish-decoding")
        self._jobs: PriorityQueue[tuple[int, int, _Job]] = PriorityQueue()
        self._numbers = count()

    def submit(self, patience_s: float, num_pixels: int, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in the thread. After ``patience_s`` in the queue, its result is an APIError 429 instead."""
        job = _Job(partial(function, *arguments), patience_s)
        self._jobs.put((num_pixels, next(self._numbers), job))
        self._thread.submit(self._run_next)
        return job.result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down like a ``ThreadPoolExecutor``."""
        self._thread.shutdown(wait=wait, cancel_futures=cancel_futures)
        while cancel_futures and not self._jobs.empty():
            self._jobs.get()[-1].result.cancel()

    def _run_next(self) -> None:
        """Run one job, in the thread."""
        _, _, job = self._jobs.get()
        if job.result.cancelled():
            return
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.run()
        except BaseException as raised:  # every exception must reach the caller
            error = raised
        job.end(result, error)
