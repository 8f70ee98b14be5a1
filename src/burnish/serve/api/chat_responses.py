"""Convert deltas to OpenAI's chat format: chunks of a stream, or one chat completion.

A complete response is the sum of its deltas: ``whole`` uses the result of ``Delta.add`` only.

Format: ``ChatCompletion`` and ``ChatCompletionChunk`` of the openai package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.inference.types import Logprob
from burnish.serve.api.responses import AnswerCall, Choice, Delta

TokenText = Callable[[int], tuple[str, bytes]]
"""Token id -> its text and bytes."""


@dataclass(frozen=True)
class ResponseFields:
    """Values that all chunks of a completion share.

    Args:
        id: id of the completion.
        created: Unix time.
        name: model name in the request.
        fingerprint: fingerprint of model and versions.
        shown: converts a token id to text and bytes.
        has_logprobs: include log-probabilities.
        has_ids: include token ids.
        has_usage: end the stream with a chunk of usage; all other chunks have ``usage: null``.
    """

    id: str
    created: int
    name: str
    fingerprint: str
    shown: TokenText
    has_logprobs: bool = False
    has_ids: bool = False
    has_usage: bool = False


@dataclass(frozen=True)
class ChatResponseWriter(ResponseFields):
    """Writes one chat completion. ``prompt_ids`` are included if token ids are requested."""

    prompt_ids: Sequence[int] = ()

    def chunks(self, index: int, delta: Delta, first_call: int) -> list[dict[str, Any]]:
        """Convert one delta to chunks: role, reasoning, content, tool calls, finish reason.

        Args:
            index: index of the choice.
            delta: new parts of the choice.
            first_call: number of tool calls of this choice that were already sent.
        """
        found = [self._chunk(index, {"role": "assistant", "content": ""})] if delta.is_first else []
        if delta.is_first and self.has_ids:
            found[0]["prompt_token_ids"] = list(self.prompt_ids)
        bodies: list[dict[str, Any]] = []
        if delta.reasoning:
            bodies.append({"reasoning_content": delta.reasoning})
        if delta.content:
            bodies.append({"content": delta.content})
        for place, call in enumerate(delta.calls, first_call):
            opened = {"index": place, "id": call.id, "type": "function"}
            bodies.append({"tool_calls": [{**opened, "function": {"name": call.name, "arguments": ""}}]})
            bodies.append({"tool_calls": [{"index": place, "function": {"arguments": call.arguments}}]})
        if not bodies and (delta.logprobs or (delta.ids and self.has_ids)):
            bodies.append({"content": ""})  # tokens without text, or whose text is held back
        made = [self._chunk(index, body) for body in bodies]
        if made:
            made[0]["choices"][0] |= self._beside(delta)
        found += made
        if delta.reason is not None:
            found.append(self._chunk(index, {}, delta.reason))
        return found

    def _chunk(self, index: int, body: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": body, "logprobs": None, "finish_reason": reason}
        return {
            **self._head("chat.completion.chunk"),
            "choices": [choice],
            **({"usage": None} if self.has_usage else {}),
        }

    def _beside(self, delta: Delta) -> dict[str, Any]:
        found: dict[str, Any] = {"token_ids": list(delta.ids)} if self.has_ids else {}
        return {**found, "logprobs": self._logprobs(delta.logprobs)} if self.has_logprobs else found

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def whole(self, folded: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete response."""
        extra = {"prompt_token_ids": list(self.prompt_ids)} if self.has_ids else {}
        choices = [self._choice(index, delta) for index, delta in enumerate(folded)]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage, **extra}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.calls and not delta.content:
            message["content"] = None
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": delta.reason}
        if self.has_logprobs:
            choice["logprobs"] = self._logprobs(delta.logprobs)
        return {**choice, "token_ids": list(delta.ids)} if self.has_ids else choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.name,
            "system_fingerprint": self.fingerprint,
        }  # fmt: skip

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        return {"content": [self._logprob(one) for one in logprobs], "refusal": None}

    def _logprob(self, one: Logprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, octets = self.shown(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(octets)}


LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent, as in OpenAI's API."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB


def _call(call: AnswerCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(num_prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return token counts. The prompt counts once, regardless of the number of choices."""
    made = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": made,
        "total_tokens": num_prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": choices[0].cached_tokens if choices else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.num_thought_tokens for choice in choices)},
    }
