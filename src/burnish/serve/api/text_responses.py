"""Deltas as OpenAI writes them for ``/v1/completions``: plain text, and the older shape of log-probabilities.

Source of the shapes: ``Completion`` and ``Logprobs`` of the openai package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.inference.types import Logprob
from burnish.serve.api.chat_responses import Shared, Shown, finite
from burnish.serve.api.responses import Delta


@dataclass
class Echo:
    """The prompt at the head of a choice, where it was asked for: its text, and its tokens as they were measured."""

    text: str
    ids: Sequence[int]


class TextLog:
    """The older ``logprobs`` object of one choice, grown token by token."""

    def __init__(self, shown: Shown) -> None:
        self.shown, self.offset = shown, 0
        self.start()

    def start(self) -> None:
        self.tokens: list[str] = []
        self.logps: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, token: int, measured: Logprob | None) -> None:
        """``measured`` is None for the first token of all, before which nothing stands."""
        text = self.shown(token)[0]
        self.tokens.append(text)
        self.offsets.append(self.offset)
        self.offset += len(text)
        self.logps.append(None if measured is None else finite(measured.logprob))
        self.top.append(None if measured is None else self._top(measured))

    def _top(self, measured: Logprob) -> dict[str, float]:
        """The likeliest, and what was drawn; two tokens of one text keep the likelier."""
        found: dict[str, float] = {}
        for token, logprob in (*measured.top, (measured.token, measured.logprob)):
            found.setdefault(self.shown(token)[0], finite(logprob))
        return found

    def taken(self) -> dict[str, Any]:
        """Return the parts that are new since the last call."""
        found = {
            "tokens": self.tokens, "token_logprobs": self.logps, "top_logprobs": self.top, "text_offset": self.offsets,
        }  # fmt: skip
        self.start()
        return found


@dataclass(frozen=True)
class TextWire(Shared):
    """One text completion."""

    def choice(
        self, index: int, delta: Delta, log: TextLog, echo: Echo | None = None, measured: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        """One delta as a choice, with the prompt before it where ``echo`` is given.

        Args:
            measured: of the prompt's tokens from the second on.
        """
        if echo is not None and self.has_logprobs:
            for token, one in zip(echo.ids, (None, *measured), strict=False):
                log.add(token, one)
        if self.has_logprobs:
            for one in delta.logprobs:
                log.add(one.token, one)
        text = delta.reasoning + delta.content
        found = {
            "index": index,
            "text": text if echo is None else echo.text + text,
            "logprobs": log.taken() if self.has_logprobs else None,
            "finish_reason": delta.reason,
        }
        return {**found, "token_ids": list(delta.ids)} if self.has_ids else found

    def body(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.name,
            "system_fingerprint": self.fingerprint, "choices": list(choices), "usage": usage,
        }  # fmt: skip

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a chunk of a stream. Only if asked for, ``usage`` is there, and null in all chunks but the last."""
        body = self.body(choices, usage)
        if not self.has_usage:
            del body["usage"]
        return body
