"""Backends of a chat: the engine in this process, or a server with OpenAI's API.

A backend takes messages in OpenAI's format and yields events: pieces of reasoning and content, tool calls, and finally
measurements. Closing the iterator cancels the response.
"""

from __future__ import annotations

import json
import math
import os
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from burnish.config.errors import UserError
from burnish.inference.options import is_server_url

WireMessage: TypeAlias = dict[str, Any]
"""A message with ``role``, ``content``, and optionally ``reasoning_content``, ``tool_calls``, ``tool_call_id``."""


SETTINGS: Mapping[str, type] = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), float
    ),
    "top_k": int, "seed": int, "max_new_tokens": int, "do_sample": bool,
}  # fmt: skip
"""Settings that the user can change, and their types."""
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "top_k": (0, math.inf), "min_p": (0, 1), "repetition_penalty": (0, 100),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "seed": (-(2**63), 2**63 - 1),
    "max_new_tokens": (1, math.inf),
}  # fmt: skip
"""The same ranges as those of the API."""
_POSITIVE = ("top_p", "repetition_penalty")


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of a setting. Raises ValueError if it is out of range."""
    least, most = _RANGES.get(name, (-math.inf, math.inf))
    if least <= value <= most and not (name in _POSITIVE and value == 0):
        return value
    least_shown = "above 0" if name in _POSITIVE else f"at least {least:g}"
    most_shown = "" if most == math.inf else f" and at most {most:g}"
    raise ValueError(f"must be {least_shown}{most_shown}. Received: {value}.")


@dataclass(frozen=True)
class Request:
    """A request to a backend.

    Args:
        messages: the conversation.
        settings: values for ``SETTINGS``; missing ones have the defaults of the model or server.
        tools: offered tools.
        enable_thinking: switch reasoning on or off; None for the template's default.
        adapter: adapter name; "" for the model itself.
    """

    messages: Sequence[WireMessage]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    enable_thinking: bool | None = None
    adapter: str = ""


@dataclass(frozen=True)
class Event:
    """A piece of a response, or its end.

    Args:
        kind: "content", "thought", "call" or "end".
        text: text of content or reasoning.
        call: {"name", "arguments"}, with arguments as JSON text.
        end: measurements, in the last event.
    """

    kind: Literal["content", "thought", "call", "end"]
    text: str = ""
    call: Mapping[str, str] | None = None
    end: AnswerEnded | None = None


@dataclass(frozen=True)
class AnswerEnded:
    """Measurements of a finished response.

    Args:
        reason: why it ended.
        tokens: number of response tokens; None if a server does not report it.
        first_s: seconds until the first token.
        seconds: total duration.
        left: tokens of context left.
        prompt: prompt ids, if the engine is in this process.
        ids: response ids, if the engine is in this process.
        chances: probability of each id.
        error: error message.
    """

    reason: str
    tokens: int | None = None
    first_s: float = 0.0
    seconds: float = 0.0
    left: int | None = None
    prompt: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    error: str = ""


class Backend(Protocol):
    """A backend of a chat."""

    name: str
    adapters: tuple[str, ...]
    has_reasoning: bool | None
    """Whether reasoning can be switched on or off; None if unknown."""

    def answer(self, request: Request) -> Iterator[Event]: ...
    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text of each id, and whether it is a control token."""
        ...

    def num_tokens(self, url: str) -> int | None:
        """Return the number of tokens of an image in a prompt, None if unknown. ``url`` is a data URI."""
        ...

    def defaults(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class LocalBackend:
    """The engine in this process."""

    def __init__(self, loaded: Any, engine: Any) -> None:
        from burnish.serve.api.prompts import Prompter

        self.loaded, self.engine = loaded, engine
        self.name, self.adapters = loaded.name, tuple(loaded.adapters)
        self.prompter = Prompter(loaded.template, loaded.images)
        self.has_reasoning: bool | None = self.prompter.enables_thinking

    def defaults(self) -> dict[str, Any]:
        sampling = self.loaded.defaults
        values = {name: getattr(sampling, name, None) for name in SETTINGS}
        return {**values, "max_new_tokens": self.loaded.max_new_tokens, "do_sample": sampling.temperature > 0}

    def answer(self, request: Request) -> Iterator[Event]:
        from burnish.inference.replies.replies import Reply
        from burnish.inference.replies.reply_forms import opens_thought, schemas_of

        loaded = self.loaded
        row, began = self._prompt(request), time.monotonic()
        ids = list(row["input_ids"])
        form, tokenizer = loaded.form, loaded.tokenizer
        reply = Reply(
            form, tokenizer, offered=schemas_of(request.tools), stop_ids=loaded.stop_ids,
            in_thought=opens_thought(ids, form, tokenizer),
        )  # fmt: skip
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        handle = self.engine.submit(self._ask(row, request), made.put)
        found: list[int] = []
        chances: list[float] = []
        first, reason, error = 0.0, "", ""
        try:
            while not reason:
                step = made.get()
                first = first or (time.monotonic() if step.ids else 0.0)
                found += step.ids
                chances += (math.exp(found_.logprob) for found_ in step.logprobs)
                for piece in reply.feed(step.ids):
                    yield _event(piece)
                reason, error = step.reason or "", str(step.error or "")
        finally:
            if not reason:
                self.engine.cancel(handle)
        for piece in reply.end():
            yield _event(piece)
        now = time.monotonic()
        yield Event(
            "end",
            end=AnswerEnded(
                reason, len(found), max(first - began, 0.0), now - began, loaded.context - len(ids) - len(found),
                tuple(ids), tuple(found), tuple(chances), error,
            ),
        )  # fmt: skip

    def _prompt(self, request: Request) -> Mapping[str, Any]:
        from burnish.serve.api.body import read
        from burnish.serve.api.requests import ChatRequest
        from burnish.serve.http.bodies import refuse_surrogates
        from burnish.serve.http.errors import APIError

        arguments = {} if request.enable_thinking is None else {"enable_thinking": request.enable_thinking}
        body = {
            "model": self.name, "messages": list(request.messages), "tools": list(request.tools),
            "chat_template_kwargs": arguments,
        }  # fmt: skip
        try:
            refuse_surrogates(body)
            return self.prompter.row(read(ChatRequest, body))
        except APIError as refusal:
            raise UserError(str(refusal)) from refusal

    def num_tokens(self, url: str) -> int | None:
        """Return the number of tokens of an image. Raises UserError for text-only models and invalid images."""
        reader = self.loaded.images
        if reader is None:
            raise UserError(
                f"{self.name} is a text-only model and does not accept images.",
                remedy="Chat with a model that has a vision tower.",
            )
        try:
            return int(reader.num_tokens(reader.image(url, "the file")))
        except ValueError as error:
            raise UserError(str(error)) from None

    def _ask(self, row: Mapping[str, Any], request: Request) -> Any:
        from burnish.inference.types import BASE, GenerationRequest

        settings = dict(request.settings)
        most = settings.pop("max_new_tokens", self.loaded.max_new_tokens)
        sampling = self.loaded.defaults.with_settings(settings)
        images = {} if self.loaded.images is None else self.loaded.images.of(dict(row))
        return GenerationRequest(
            list(row["input_ids"]), most, adapter=request.adapter or BASE, sampling=sampling,
            stop_ids=frozenset(self.loaded.stop_ids),
            top_logprobs=0, **images,
        )  # fmt: skip

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        tokenizer = self.loaded.tokenizer
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        return [(tokenizer.decode([i], skip_special_tokens=False), i in special) for i in ids]

    def close(self) -> None:
        self.engine.close()


def _event(piece: Any) -> Event:
    if piece.call is not None:
        arguments = json.dumps(piece.call.arguments, ensure_ascii=False)
        return Event("call", call={"name": piece.call.name, "arguments": arguments})
    return Event(piece.kind, piece.text)


_NAMES = {"max_new_tokens": "max_completion_tokens"}
"""Settings that have another name in OpenAI's API."""


class ServerBackend:
    """A server with OpenAI's API. The key is read from OPENAI_API_KEY.

    Args:
        url: URL that ends in ``/v1``.
        model: model name; "" for the first one that the server lists.
    """

    has_reasoning: bool | None = None

    def __init__(self, url: str, model: str = "") -> None:
        if not is_server_url(url):
            raise UserError(f"--url must be a URL with http:// or https://. Received: {url}.")
        from burnish.inference.remote.openai_server import OpenAIServer

        self.server = OpenAIServer(url, os.environ.get("OPENAI_API_KEY", ""), uses_proxy=True)
        self.url = self.server.url
        self.adapters: tuple[str, ...] = ()
        listed = self.server.models()
        if model and model not in listed:
            raise UserError(f'the server has no model "{model}".', remedy=f"Available: {', '.join(listed)}.")
        self.name = model or listed[0]

    def defaults(self) -> dict[str, Any]:
        return {}

    def answer(self, request: Request) -> Iterator[Event]:
        settings = {_NAMES.get(name, name): value for name, value in request.settings.items()}
        body: dict[str, Any] = {
            "model": request.adapter or self.name, "messages": list(request.messages),
            "stream_options": {"include_usage": True}, **settings,
        }  # fmt: skip
        if request.tools:
            body["tools"] = list(request.tools)
        if request.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": request.enable_thinking}
        began, first, reason, tokens = time.monotonic(), 0.0, "", None
        calls: dict[int, dict[str, str]] = {}
        with closing(self.server.chunks("chat/completions", body)) as chunks:
            for chunk in chunks:
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", []):
                    delta = choice.get("delta") or {}
                    first = first or time.monotonic()
                    reason = choice.get("finish_reason") or reason
                    for name, kind in (("reasoning_content", "thought"), ("content", "content")):
                        if delta.get(name):
                            yield Event(kind, delta[name])  # type: ignore[arg-type]
                    for call in delta.get("tool_calls") or []:
                        partial = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                        for key in partial:
                            partial[key] += (call.get("function") or {}).get(key) or ""
        for call in calls.values():
            yield Event("call", call=call)
        yield Event("end", end=AnswerEnded(reason, tokens, first - began if first else 0.0, time.monotonic() - began))

    def num_tokens(self, url: str) -> int | None:
        return None

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        return []

    def close(self) -> None:
        self.server.close()
