"""The single thread that renders and tokenizes the prompts of requests.

A chat template may need seconds for one conversation, or loop, and the prompts of other requests wait for it meanwhile.
The first attempt at a prompt is therefore stopped after a fraction of a second. It is repeated, with the time limit of
the server, when no other prompt waits for its first attempt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from burnish.config.bounds import FIRST_RENDERING_S
from burnish.serve.http.errors import APIError

_LEAST_RENDERING_S = 0.02
"""Time in seconds of a first attempt while many slow prompts wait; it is several times that of an ordinary prompt."""


class SlowRendering(APIError):
    """Raised if the chat template exceeds its time limit for a request."""


@dataclass
class _Prompt:
    """A function to call in the thread, and its result.

    Args:
        begun_s: time at which it was submitted.
        patience_s: maximum time in the queue in seconds.
    """

    work: Callable[[], Any]
    patience_s: float
    begun_s: float = field(default_factory=time.monotonic)
    result: Future[Any] = field(default_factory=Future)


class PromptQueue:
    """Calls functions in one thread, in the order of their submission; those with slow renderings after the others."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "burnish-prompts")
        self._new: deque[_Prompt] = deque()
        self._slow: deque[_Prompt] = deque()

    def submit(self, patience_s: float, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in the thread. After ``patience_s`` in the queue, its result is an APIError 429 instead."""
        prompt = _Prompt(partial(function, *arguments), patience_s)
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
        elif prompt.result.set_running_or_notify_cancel():
            prompt.result.set_exception(error) if error is not None else prompt.result.set_result(result)

    def _repeat_later(self, prompt: _Prompt) -> None:
        self._slow.append(prompt)
        try:
            self._thread.submit(self._run_next)
        except RuntimeError:  # shut down meanwhile
            prompt.result.cancel()

    def _attempt(self, prompt: _Prompt, is_first: bool) -> Any:
        if time.monotonic() - prompt.begun_s > prompt.patience_s:
            from burnish.serve.api.responses import queue_full

            raise queue_full(prompt.patience_s)
        if not is_first:
            return prompt.work()
        from burnish.data.chat.rendering import limit_rendering

        with limit_rendering(max(FIRST_RENDERING_S / (1 + len(self._slow)), _LEAST_RENDERING_S)):
            return prompt.work()
