"""A byte-level model with scripted responses, behind an engine that follows the protocol."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from burnish.config.errors import Problem, UserError
from burnish.inference.types import (
    BASE,
    Closed,
    EngineFacts,
    GenerationRequest,
    Logprob,
    PromptProcessed,
    QueueFullError,
    RequestHandle,
    Sampling,
    StepOutput,
)
from burnish.serve.api.requests import BaseRequest, ChatRequest, unknown_model_error
from burnish.serve.api.responses import AnswerCall, Delta

END = 256
"""The end token; the tokens below it are bytes."""


class ScriptedEngine:
    """Responds to each request with the ids from ``script``, one every ``pause_s`` seconds, in a thread."""

    def __init__(
        self,
        script: Callable[[GenerationRequest], Sequence[int]],
        slots: int = 4,
        waiting: int = 8,
        pause_s: float = 0.0,
    ):
        self.script, self.slots, self.limit, self.pause_s = script, slots, waiting, pause_s
        self.asks: list[GenerationRequest] = []
        self.cancelled: list[GenerationRequest] = []
        self.error: Problem | None = None
        self._open: dict[int, tuple[GenerationRequest, Callable[[StepOutput], None], list[int]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._work = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, ask: GenerationRequest, callback: Callable[[StepOutput], None]) -> RequestHandle:
        if self._is_closed:
            raise Closed("closed")
        if not ask.ids:
            raise UserError("the prompt must have at least one token.")
        with self._lock:
            if len(self._open) >= self.slots + self.limit:
                raise QueueFullError(self.limit, 7.0)
            number = next(self._numbers)
            self.asks.append(ask)
            self._open[number] = (ask, callback, [-1, *self.script(ask)][: ask.max_new_tokens + 1])
        self._work.set()
        return RequestHandle(number)

    def cancel(self, handle: RequestHandle) -> None:
        with self._lock:
            result = self._open.pop(handle.number, None)
        if result is not None:
            self.cancelled.append(result[0])
            result[1](StepOutput(reason="cancelled"))

    def close(self, drain_s: float = 0.0) -> None:
        until = time.monotonic() + drain_s
        self._is_closed = True
        while self._open and time.monotonic() < until:
            time.sleep(0.01)
        for number in list(self._open):
            self.cancel(RequestHandle(number))

    def facts(self) -> EngineFacts:
        running = min(self.slots, len(self._open))
        return EngineFacts("slots", self.slots, running, len(self._open) - running, 512, memory_bytes={"cache": 1})

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _run(self) -> None:
        while True:
            if not self._open:
                self._work.wait()  # without a time limit: the threads of all tests stay until the end
                self._work.clear()
            for number in list(self._open)[: self.slots]:
                self._step(number)
            if self.pause_s:
                time.sleep(self.pause_s)

    def _step(self, number: int) -> None:
        with self._lock:
            if number not in self._open:
                return
            ask, callback, ids = self._open[number]
            token = ids.pop(0)
            if token == -1:
                measured = ask.ids[ask.prompt_logprobs_from :] if ask.prompt_logprobs_from else []
                output = StepOutput(filled=PromptProcessed(2, tuple(_logprob(one, ask) for one in measured)))
                if ask.max_new_tokens == 0:
                    del self._open[number]
                    output = StepOutput(filled=output.filled, reason="length")
            else:
                reason = "stop" if token in ask.stop_ids else None if ids else "length"
                if self.error is not None:
                    output = StepOutput(reason="failed", error=self.error)
                else:
                    measured = (_logprob(token, ask),) if ask.top_logprobs is not None else ()
                    output = StepOutput((token,), measured, reason=reason)
                if output.reason is not None:
                    del self._open[number]
        callback(output)


def _logprob(token: int, ask: GenerationRequest) -> Logprob:
    return Logprob(token, -0.5, tuple((token + rank, -0.5 - rank) for rank in range(ask.top_logprobs or 0)))


class ByteReader:
    """Parses responses: reasoning between < and >, tool calls as {"name", "arguments"} between [ and ]."""

    def __init__(self, stops: Sequence[str] = (), reads_parts: bool = True) -> None:
        self.stops, self.reads_parts = stops, reads_parts
        self.held, self.is_thinking, self.numbers, self.call = b"", False, itertools.count(), ""
        self.num_thought_tokens = 0

    def take(self, token: int, delta: Delta) -> bool:
        self.num_thought_tokens += self.is_thinking
        self.held += bytes([token])
        try:
            text = self.held.decode("utf-8")
        except UnicodeDecodeError:
            return False
        for stop in self.stops:
            if stop in text:
                delta.content += text.partition(stop)[0]
                return True
        if any(stop.startswith(text[-n:]) for stop in self.stops for n in range(1, len(text) + 1)):
            return False
        self.held = b""
        self._part(text, delta)
        return False

    def _part(self, text: str, delta: Delta) -> None:
        if self.reads_parts and text in "<>":
            self.is_thinking = text == "<"
        elif self.reads_parts and (self.call or text == "["):
            self.call += text
            if text == "]":
                read = json.loads(self.call[1:-1])
                call = AnswerCall(f"call_{next(self.numbers)}", read["name"], json.dumps(read["arguments"]))
                delta.calls.append(call)
                self.call = ""
        elif self.is_thinking:
            delta.reasoning += text
        else:
            delta.content += text

    def end(self, delta: Delta) -> None:
        if self.held:
            self._part(self.held.decode("utf-8", "replace"), delta)
        self.held = b""


class FakeServed:
    """A ``ServedModel`` over bytes."""

    fingerprint, vocab_size, context, scorer = "fp_0123456789", 257, 512, None
    loaded = SimpleNamespace(defaults=Sampling(temperature=0.0))

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    def adapter_of(self, model: str) -> str:
        if model not in {"first", "first:poet", "poet"}:
            raise unknown_model_error(model, ["first", "poet"])
        return BASE if model == "first" else "poet"

    def counted_prompt(self, request: ChatRequest) -> tuple[list[int], list[dict[str, int]]]:
        return self.chat_prompt(request), []

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        return list("".join(f"{message.role}:{message.text}\n" for message in request.messages).encode())

    def prompt_row(self, request: ChatRequest) -> dict[str, object]:
        return {"input_ids": self.chat_prompt(request)}

    def image_fields(self, row: Mapping[str, object]) -> dict[str, object]:
        return {}

    def chat_reader(self, request: ChatRequest, prompt: Sequence[int]) -> ByteReader:
        return ByteReader(request.stop)

    def text_prompt(self, prompt: str | tuple[int, ...]) -> list[int]:
        return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)

    def text_reader(self, request: BaseRequest) -> ByteReader:
        return ByteReader(request.stop, reads_parts=False)

    def text_of(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < END).decode("utf-8", "replace")

    def grammar(self, request: object, prompt: Sequence[int]) -> None:
        return None

    def stop_ids(self, request: BaseRequest) -> frozenset[int]:
        return frozenset({END})

    def shown(self, token: int) -> tuple[str, bytes]:
        return (chr(token), bytes([token])) if token < END else ("<end>", b"")


def saying(text: str) -> Callable[[GenerationRequest], list[int]]:
    """Return a script that always responds with ``text``."""
    return lambda ask: [*text.encode(), END]
