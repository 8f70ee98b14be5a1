"""Inference engine over HTTP: a vLLM or SGLang server, or any server with OpenAI's completions API.

Prompts are sent as token ids, so that the server does not apply a chat template. Responses are parsed from ids if the
server returns them, otherwise from its text, which is tokenized again. Each request is a streamed HTTP request in its
own thread. The key is sent to the configured server only; redirects are not followed.

Developed against a stub with recorded responses. It has not been tested with a vLLM or SGLang server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from burnish.config.errors import Problem, UserError, first_line
from burnish.inference.remote.openai_server import OpenAIServer
from burnish.inference.remote.process import start_server
from burnish.inference.types import (
    BASE,
    Closed,
    EndReason,
    EngineFacts,
    GenerationRequest,
    Logprob,
    OutputCallback,
    PromptProcessed,
    QueueFullError,
    RequestHandle,
    StepOutput,
)

if TYPE_CHECKING:
    from burnish.inference.loaded_model import LoadedModel

_POLL_S = 0.1
"""Interval at which a queued request checks whether it was cancelled."""


class RemoteEngine:
    """``types.InferenceEngine`` over HTTP.

    Args:
        url: URL of the server, without ``/v1``.
        tokenizer: tokenizes the text of a server that returns no ids.
        key: sent as a bearer token; "" for none.
        model: model name on the server; adapters have their own names.
        context: maximum number of tokens of prompt and response together.
        slots: number of concurrent requests.
        waiting: maximum number of queued requests; None for no limit.
        adapters: names of served adapters.
        name: name in messages.
        at_end: called after the engine was closed.
    """

    def __init__(
        self, url: str, tokenizer: Any, *, key: str = "", model: str = "", context: int = 4096, slots: int = 64,
        waiting: int | None = None, adapters: tuple[str, ...] = (), name: str = "remote",
        at_end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._server, self.tokenizer = OpenAIServer(f"{url.rstrip('/')}/v1", key), tokenizer
        self.context, self.slots, self.adapters, self.name = context, slots, adapters, name
        self._limit, self._at_end = waiting, at_end
        self.note = ""
        self._numbers, self._lock = count(1), threading.Lock()
        self._open: dict[int, threading.Event] = {}  # request number -> set when it is cancelled
        self._free_slots = threading.Semaphore(slots)
        self._running = 0
        self._is_closed = False
        self._sums = [0, 0]
        self.model = model or self._server.models()[0]

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        if self._is_closed:
            raise Closed("The engine is closed.")
        self._refuse(request)
        with self._lock:
            waiting = len(self._open) - self._running
            if self._limit is not None and waiting >= self._limit:
                raise QueueFullError(waiting, 1.0)
            handle = RequestHandle(next(self._numbers))
            cancelled = self._open[handle.number] = threading.Event()
        threading.Thread(target=self._run, args=(request, callback, handle, cancelled), daemon=True).start()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        if event := self._open.get(handle.number):
            event.set()

    def close(self, drain_s: float = 0.0) -> None:
        self._is_closed, until = True, time.monotonic() + drain_s
        while self._open and time.monotonic() < until:
            time.sleep(0.01)
        for event in list(self._open.values()):
            event.set()
        until = time.monotonic() + 5
        while self._open and time.monotonic() < until:
            time.sleep(0.01)
        self._server.close()
        if self._at_end is not None:
            self._at_end()

    def facts(self) -> EngineFacts:
        waiting = max(0, len(self._open) - self._running)
        return EngineFacts(
            self.name, self.slots, self._running, waiting, self.context, self.adapters, {}, self._sums[0], 0,
            self._sums[1], is_alive=not self._is_closed,
        )  # fmt: skip

    # --- one request --------------------------------------------------------------------------------------------------

    def _run(
        self, request: GenerationRequest, callback: OutputCallback, handle: RequestHandle, cancelled: threading.Event
    ) -> None:
        reason: EndReason = "cancelled"
        error: Problem | None = None
        if self._wait_for_slot(request, cancelled):
            self._running += 1
            try:
                reason = self._stream(request, callback, cancelled)
            except Exception as failure:  # also of a response without the expected form; the caller must be notified
                if not cancelled.is_set():
                    reason = "failed"
                    error = Problem(f"The engine failed: {first_line(failure)}", code="internal_error")
            self._running -= 1
            self._free_slots.release()
        if reason == "cancelled" and time.monotonic() > request.deadline:
            error = Problem("the request timed out.")
        self._open.pop(handle.number, None)
        callback(StepOutput(reason=reason, error=error))

    def _wait_for_slot(self, request: GenerationRequest, cancelled: threading.Event) -> bool:
        """Take a slot. Returns False if the request is cancelled or expires first."""
        while not self._free_slots.acquire(timeout=_POLL_S):
            if cancelled.is_set() or time.monotonic() > request.deadline:
                return False
        return True

    def _stream(self, request: GenerationRequest, callback: OutputCallback, cancelled: threading.Event) -> EndReason:
        """Pass results on as they arrive, one id or several at a time. Returns why the response ended."""
        with self._lock:
            self._sums[0] += len(request.ids)
        callback(StepOutput(filled=PromptProcessed()))
        reader = _TextReader(self.tokenizer)
        reason: EndReason = "length"
        chunks = self._server.chunks("completions", self._body(request))
        for choice in chain.from_iterable(chunk.get("choices", ()) for chunk in chunks):
            if cancelled.is_set() or time.monotonic() > request.deadline:
                return "cancelled"
            ids = choice["token_ids"] if choice.get("token_ids") is not None else reader.ids(choice.get("text") or "")
            logprobs = _logprobs(choice.get("logprobs"), ids, request)
            if ids:
                self._sums[1] += len(ids)
                callback(StepOutput(tuple(ids), logprobs))
            if choice.get("finish_reason"):
                reason = "length" if choice["finish_reason"] == "length" else "stop"
        rest = reader.rest()
        if rest:
            callback(StepOutput(tuple(rest)))
        return reason

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model if request.adapter == BASE else request.adapter, "prompt": list(request.ids),
            "max_tokens": min(request.max_new_tokens, self.context - len(request.ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty, "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty, "stop_token_ids": sorted(request.stop_ids),
            "min_tokens": request.min_new_tokens, "return_token_ids": True, "skip_special_tokens": False,
        }  # fmt: skip
        if sampling.bias:
            body["logit_bias"] = {str(token): value for token, value in sampling.bias.items()}
        if sampling.seed is not None:
            body["seed"] = (sampling.seed + request.index) % (1 << 63)
        if request.top_logprobs is not None:
            body["logprobs"] = request.top_logprobs
        return body

    def _refuse(self, request: GenerationRequest) -> None:
        """Raise UserError for features that a remote engine does not support, and for invalid requests."""
        lacking = [
            word
            for word, is_requested in (
                ("log-probabilities of the prompt", request.prompt_logprobs_from is not None),
                ("a grammar", request.grammar is not None),
                ("log-probabilities of given tokens", bool(request.also)),
            )
            if is_requested
        ]
        problems = [Problem(f"the engine {self.name} does not support {', '.join(lacking)}.")] if lacking else []
        if not request.ids or request.max_new_tokens < 1:
            problems.append(
                Problem("a request must have at least one prompt token, and max_new_tokens must be at least 1.")
            )
        if len(request.ids) >= self.context:
            problems.append(
                Problem(f"the prompt has {len(request.ids)} tokens; it must have fewer than {self.context}.")
            )
        if request.adapter != BASE and request.adapter not in self.adapters:
            known = ", ".join((BASE, *self.adapters))
            problems.append(Problem(f'unknown adapter "{request.adapter}".', remedy=f"Available: {known}."))
        if problems:
            raise UserError(problems)


def started_engine(loaded: LoadedModel, waiting: int | None = None) -> RemoteEngine:
    """Return the engine for ``infer_url``, with the key INFER_KEY, or for a server that is started for it.

    Raises:
        UserError: if adapters would have to be merged first, or the server cannot be found.
    """
    options = loaded.options
    if options.infer_url is None and options.adapter_name_or_path:
        what = f"infer_backend: {options.infer_backend} cannot merge the adapters of adapter_name_or_path."
        remedy = "Merge them first with burnish export, or serve them with served_adapters."
        raise UserError(what, remedy=remedy, option=("infer_backend", "adapter_name_or_path"))
    settings: dict[str, Any] = {
        "context": loaded.context, "waiting": waiting, "adapters": loaded.adapters,
        "slots": options.max_concurrent_requests or 64, "name": options.infer_url or options.infer_backend,
    }  # fmt: skip
    if options.infer_url is not None:
        return RemoteEngine(options.infer_url, loaded.tokenizer, key=os.environ.get("INFER_KEY", ""), **settings)
    server = start_server(options, str(options.model_name_or_path), dict(options.served_adapters or {}))
    return RemoteEngine(server.url, loaded.tokenizer, key=server.key, at_end=server.close, **settings)


class _TextReader:
    """Tokenizes the text of a server that returns no ids. Text after the last blank is held back, since later text may
    change its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._pending = tokenizer, ""

    def ids(self, text: str) -> list[int]:
        self._pending += text
        place = max(self._pending.rfind(" "), self._pending.rfind("\n"))
        if place <= 0:
            return []
        ready, self._pending = self._pending[:place], self._pending[place:]
        return self._ids(ready)

    def rest(self) -> list[int]:
        ready, self._pending = self._pending, ""
        return self._ids(ready) if ready else []

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _logprobs(returned: Mapping[str, Any] | None, ids: list[int], request: GenerationRequest) -> tuple[Logprob, ...]:
    """Return one log-probability per id, if the server returned as many."""
    values = (returned or {}).get("token_logprobs") or []
    if request.top_logprobs is None or len(values) != len(ids):
        return ()
    return tuple(Logprob(token, float(value)) for token, value in zip(ids, values, strict=True))
