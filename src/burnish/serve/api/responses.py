"""Running responses: the engine's outputs become deltas, and deltas become a stream or a complete response.

    answer = RequestAnswer(outputs, [Choice(ask, reader), ...])
    answer.begin(engine)
    async for index, delta in answer.deltas(): ...

The engine calls from its own thread. An ``OutputQueue`` transfers its outputs to the event loop, with one wake-up for a
whole turn of the engine. Each choice keeps a single delta that grows until it is taken. A slow client therefore gets
fewer, longer deltas and blocks nobody. A complete response is the sum of the same deltas.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from burnish.config.errors import UserError
from burnish.inference.types import (
    Closed,
    GenerationRequest,
    InferenceEngine,
    Logprob,
    OutputCallback,
    QueueFullError,
    RequestHandle,
    StepOutput,
)
from burnish.serve.http.errors import APIError

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class AnswerCall:
    """A complete tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class Delta:
    """The parts of a choice that are new since it was last taken."""

    is_first: bool = False
    reasoning: str = ""
    content: str = ""
    calls: list[AnswerCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        return not (
            self.is_first or self.reasoning or self.content or self.calls or self.logprobs or self.ids or self.reason
        )

    def add(self, other: Delta) -> None:
        """Append another delta to this one."""
        self.is_first |= other.is_first
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls
        self.logprobs += other.logprobs
        self.ids += other.ids
        self.reason = self.reason or other.reason


class DeltaReader(Protocol):
    """Decodes ids into a delta. ``inference/replies`` parses them; ``served.py`` converts them to these types."""

    def take(self, token: int, delta: Delta) -> bool:
        """Read one id. Returns true if the response ends here because of a stop string."""
        ...

    def end(self, delta: Delta) -> None:
        """Finish: text that was held back is added to the delta."""
        ...

    @property
    def num_thought_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        ...


class OutputQueue:
    """Transfers outputs from the engine's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: deque[tuple[Callable[[StepOutput], None], StepOutput]] = deque()
        self._is_called = threading.Event()

    def to(self, take: Callable[[StepOutput], None]) -> OutputCallback:
        """Return a callback for the engine that passes each ``StepOutput`` to ``take`` in the event loop."""
        return _QueuedCallback(self, take)

    def deliver(self, made: Sequence[tuple[OutputCallback, StepOutput]]) -> None:
        """Queue all outputs of one engine turn and wake the event loop once.

        Waking it for each output would repeatedly compete with the engine for the GIL.
        """
        for callback, each in made:
            if isinstance(callback, _QueuedCallback):
                self._outputs.append((callback.take, each))
            else:
                callback(each)
        self._call()

    def put(self, take: Callable[[StepOutput], None], made: StepOutput) -> None:
        self._outputs.append((take, made))
        self._call()

    def _call(self) -> None:
        if self._outputs and not self._is_called.is_set():
            self._is_called.set()
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop has ended, and all clients with it
                self._outputs.clear()

    def _empty(self) -> None:
        self._is_called.clear()  # first, so that later outputs wake the loop again
        while self._outputs:
            take, made = self._outputs.popleft()
            take(made)


@dataclass(frozen=True)
class _QueuedCallback:
    """A callback that puts outputs into a queue."""

    outputs: OutputQueue
    take: Callable[[StepOutput], None]

    def __call__(self, made: StepOutput) -> None:
        self.outputs.put(self.take, made)


class Choice:
    """One response of a request.

    Args:
        ask: request to the engine.
        reader: decodes its ids.
        ends_with_first_call: end the response after its first tool call.
    """

    def __init__(self, ask: GenerationRequest, reader: DeltaReader, ends_with_first_call: bool = False) -> None:
        self.ask, self.reader, self.ends_with_first_call = ask, reader, ends_with_first_call
        self.handle: RequestHandle | None = None
        self.delta = Delta()
        self.error: APIError | None = None
        self.reason: FinishReason | None = None
        self.prompt_logprobs: tuple[Logprob, ...] = ()
        self.num_tokens = self.cached_tokens = 0
        self._has_calls = False

    @property
    def num_thought_tokens(self) -> int:
        return self.reader.num_thought_tokens

    @property
    def is_over(self) -> bool:
        return self.reason is not None or self.error is not None

    def take(self, made: StepOutput) -> None:
        """Process the result of one step."""
        if self.is_over:
            return
        if made.filled is not None:
            self.delta.is_first = True
            self.cached_tokens, self.prompt_logprobs = made.filled.cached_tokens, made.filled.logprobs
        for place, token in enumerate(made.ids):
            if self._take(token, made.logprobs[place] if made.logprobs else None):
                return
        if made.reason in ("stop", "length"):
            self.reader.end(self.delta)
            self._finish("stop" if made.reason == "stop" and not self._is_cut(made.ids) else "length")
        elif made.reason is not None:
            self.error = api_error_of(made)

    def _is_cut(self, ids: Sequence[int]) -> bool:
        """Return whether a response that must follow a grammar was ended by a stop token of the request."""
        grammar = self.ask.grammar
        return grammar is not None and bool(ids) and ids[-1] not in grammar.ends

    def _take(self, token: int, logprob: Logprob | None) -> bool:
        """Read one id. Returns true if the response is complete."""
        self.num_tokens += 1
        if token in self.ask.stop_ids:
            return False  # it ends the response and is not part of its text
        self.delta.ids.append(token)
        if logprob is not None:
            self.delta.logprobs.append(logprob)
        has_ended = self.reader.take(token, self.delta)
        if self.ends_with_first_call and self.delta.calls:
            del self.delta.calls[1:]
            self._finish("stop")
            return True
        if has_ended:  # a response that must follow a grammar is cut short: its JSON or its call is incomplete
            self._finish("stop" if self.ask.grammar is None else "length")
        return has_ended

    def _finish(self, reason: FinishReason) -> None:
        self._has_calls |= bool(self.delta.calls)
        self.reason = self.delta.reason = "tool_calls" if self._has_calls and reason == "stop" else reason

    def pop_new(self) -> Delta:
        """Return and reset the parts that are new since the last call."""
        found, self.delta = self.delta, Delta()
        self._has_calls |= bool(found.calls)
        return found


_RETRY_S = 0.2
"""Delay in seconds before a choice is submitted again after the queue was full."""


class RequestAnswer:
    """All choices of a request."""

    def __init__(self, outputs: OutputQueue, choices: Sequence[Choice]) -> None:
        self.outputs, self.choices = outputs, choices
        self._changed = asyncio.Event()
        self._pending = deque(choices)
        self._max_in_progress = 1
        self._engine: InferenceEngine | None = None
        self.begun_s = time.monotonic()
        self.first_token_s: float | None = None

    def begin(self, engine: InferenceEngine) -> None:
        """Submit as many choices as the engine has slots. The others follow one by one when a choice ends.

        They go to the end of the queue, so that a request with many choices does not block other requests. One slot is
        left to other requests if the choices could take all of them.

        Raises:
            APIError: 429 if too many requests are queued, 503 if the engine is closed, 400 for an invalid request.
        """
        slots = engine.facts().slots
        self._engine, self._max_in_progress = engine, max(1, slots if len(self.choices) < slots else slots - 1)
        try:
            self._submit_more(engine)
        except QueueFullError as error:
            self.cancel()
            raise queue_full(error.retry_after_s) from error
        except APIError:
            self.cancel()
            raise

    def _submit_more(self, engine: InferenceEngine) -> None:
        """Submit pending choices. Raises QueueFullError or APIError."""
        in_progress = sum(choice.handle is not None and not choice.is_over for choice in self.choices)
        while self._pending and in_progress < self._max_in_progress:
            choice = self._pending[0]
            try:
                choice.handle = engine.submit(choice.ask, self.outputs.to(self._receiver(choice)))
            except Closed as error:
                raise SHUTDOWN_ERROR from error
            except UserError as error:
                raise APIError(400, "invalid_value", str(error)) from error
            self._pending.popleft()
            in_progress += 1

    def _submit_or_retry(self) -> None:
        """Submit the next choices. If the queue is full, try again later."""
        assert self._engine is not None
        try:
            self._submit_more(self._engine)
        except QueueFullError:
            asyncio.get_running_loop().call_later(_RETRY_S, self._submit_or_retry)
        except APIError as refusal:
            self.fail(refusal)

    def _receiver(self, choice: Choice) -> Callable[[StepOutput], None]:
        def take(made: StepOutput) -> None:
            was_over = choice.is_over
            choice.take(made)
            if made.ids and self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.begun_s
            if choice.is_over and not was_over and made.reason is None:
                self._cancel(choice)  # after a stop string or a first call, the engine need not continue
            if choice.is_over and self._pending:
                self._submit_or_retry()
            self._changed.set()

        return take

    def fail(self, refusal: APIError) -> None:
        """End all unfinished choices with an error."""
        self._pending.clear()
        for choice in self.choices:
            if not choice.is_over:
                choice.error = refusal
                self._cancel(choice)
        self._changed.set()

    def cancel(self) -> None:
        """Cancel all unfinished choices."""
        self._pending.clear()
        for choice in self.choices:
            if not choice.is_over:
                self._cancel(choice)

    def _cancel(self, choice: Choice) -> None:
        if choice.handle is not None and self._engine is not None:
            self._engine.cancel(choice.handle)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (index of the choice, delta) until all choices are finished.

        Raises:
            APIError: if one failed.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            for index, choice in enumerate(self.choices):
                delta = choice.pop_new()
                if not delta.is_empty:
                    yield index, delta
                if choice.error is not None:
                    raise choice.error
            if all(choice.is_over and choice.delta.is_empty for choice in self.choices):
                return

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


_STATUS = {"grammar_failed": 400, "non_finite_logits": 503, "out_of_memory": 503, "internal_error": 500}


def api_error_of(made: StepOutput) -> APIError:
    """Return the error for a request that the engine ended prematurely."""
    if made.error is None:
        return SHUTDOWN_ERROR
    if made.reason == "cancelled":
        return APIError(504, "timeout", "The request timed out (api_timeout).")
    code = made.error.code if made.error.code in _STATUS else "internal_error"
    return APIError(_STATUS[code], code, made.error.what)


SHUTDOWN_ERROR = APIError(503, "draining", "The server is shutting down; the response is incomplete.")


def queue_full(retry_after_s: float) -> APIError:
    """Return a 429 error with Retry-After, 1 to 60 seconds. The openai client waits that long."""
    seconds = min(60, max(1, round(retry_after_s)))
    message = f"Too many queued requests. Retry in {seconds} s."
    return APIError(429, "queue_full", message, headers={"Retry-After": str(seconds)})
