"""Inference engine in this process: one thread owns the model, other threads submit requests.

Results are passed to the callbacks, which are called in the engine's thread. With ``deliver``, one call per turn gets
all results, for example to hand them to a server's event loop. The thread ends with ``close``, or with an error that
does not belong to a single request; then all requests fail and no new ones are accepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from burnish.config.errors import Problem, first_line
from burnish.inference.forward import Precision
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import AdapterContext, Deliver, SlotLimits
from burnish.inference.types import Closed, EngineFacts, GenerationRequest, OutputCallback, RequestHandle
from burnish.models.patches.packed import pack

_IDLE_S = 0.5
"""Interval at which an idle thread checks for deadlines."""


class LocalEngine:
    """``types.InferenceEngine`` for a model in memory, whose weights do not change. The arguments are those of
    ``Scheduler``.

    ``failure`` is the error that ended the thread, if any.
    """

    def __init__(
        self, model: nn.Module, limits: SlotLimits, *, precision: Precision = nullcontext,
        adapters: Sequence[str] = (), adapter_context: AdapterContext | None = None, deliver: Deliver | None = None,
    ) -> None:  # fmt: skip
        with precision():
            pack(model)
        self.loop = Scheduler(
            model, limits, precision=precision, adapters=adapters, adapter_context=adapter_context, deliver=deliver
        )  # fmt: skip
        self.note = self.loop.note
        self.failure: BaseException | None = None
        self._work = threading.Event()
        self._is_closed = False
        self._accepting = threading.RLock()  # a request is not queued while the thread fails, or after ``close``
        self._thread = threading.Thread(target=self._run, name="burnish-answers", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        with self._accepting:
            if self.failure is not None:
                raise Closed(f"The engine has stopped: {first_line(self.failure)}")
            if self._is_closed or not self._thread.is_alive():
                raise Closed("The engine is closed.")
            handle = self.loop.submit(request, callback)
        self._work.set()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        self.loop.cancel(handle)
        self._work.set()

    def close(self, drain_s: float = 0.0) -> None:
        until = time.monotonic() + drain_s
        with self._accepting:
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
        except BaseException as error:  # the outermost frame of the thread: waiting callers must be notified
            with self._accepting:
                self.failure = error
                self.loop.fail_all(Problem(f"The engine has stopped: {first_line(error)}", code="internal_error"))
