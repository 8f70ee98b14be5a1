"""The engine in this process: one thread owns the model, everyone else hands requests over.

In:  requests from any thread. Out: what each turn made, to the callbacks, called in the engine's thread; or, where
     ``deliver`` is given, one call per turn for all of them, which a server hands to its event loop. The thread ends
     with ``close`` or with a fault that is not a request's; then every request is told, and none is taken any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from burnish.config.errors import Problem
from burnish.inference.forward import Precision
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import Deliver, SlotLimits, Through
from burnish.inference.types import Closed, EngineFacts, GenerationRequest, OutputCallback, RequestHandle

_IDLE_S = 0.5
"""Without work the thread looks around so often, for deadlines."""


class LocalEngine:
    """``types.InferenceEngine`` over a model in memory. Arguments are those of ``Scheduler``.

    ``failure`` is what ended the thread, if anything did.
    """

    def __init__(
        self, model: nn.Module, limits: SlotLimits, *, precision: Precision = nullcontext,
        adapters: Sequence[str] = (), through: Through | None = None, deliver: Deliver | None = None,
    ) -> None:  # fmt: skip
        self.loop = Scheduler(
            model, limits, precision=precision, adapters=adapters, through=through, deliver=deliver
        )  # fmt: skip
        self.note = self.loop.note
        self.failure: BaseException | None = None
        self._work = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="burnish-answers", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        if self._is_closed or not self._thread.is_alive():
            raise Closed("The engine is closed." if self.failure is None else f"The engine has stopped: {self.failure}")
        handle = self.loop.submit(request, callback)
        self._work.set()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        self.loop.cancel(handle)
        self._work.set()

    def close(self, drain_s: float = 0.0) -> None:
        until = time.monotonic() + drain_s
        self._is_closed = True
        while self.loop.is_busy and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        self.loop.cancel_all()
        self._work.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def facts(self) -> EngineFacts:
        return replace(self.loop.facts(), is_alive=self._thread.is_alive() and not self._is_closed)

    def _run(self) -> None:
        try:
            while not (self._is_closed and not self.loop.is_busy):
                if not self.loop.turn():
                    self._work.wait(_IDLE_S)
                    self._work.clear()
        except BaseException as error:  # the outermost frame of the thread: whoever waits must hear of it
            self.failure = error
            self.loop.fail_all(Problem(f"The engine has stopped: {error}", code="internal_error"))
