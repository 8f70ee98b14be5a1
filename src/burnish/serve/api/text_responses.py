"""Convert deltas to OpenAI's format of ``/v1/completions``: plain text, and the legacy format of log-probabilities.

Format: ``Completion`` and ``Logprobs`` of the openai package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.inference.types import Logprob
from burnish.serve.api.chat_responses import ResponseFields, TokenText, finite
from burnish.serve.api.responses import Delta


@dataclass
class EchoedPrompt:
    """The prompt at the beginning of a choice (``echo``): its text and tokens."""

    text: str
    ids: Sequence[int]


class TextLogprobs:
    """The legacy ``logprobs`` object of one choice, built token by token."""

    def __init__(self, shown: TokenText) -> None:
        self.shown, self.offset = shown, 0
        self.start()

    def start(self) -> None:
        self.tokens: list[str] = []
        self.logps: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, token: int, measured: Logprob | None) -> None:
        """Add a token. ``measured`` is None for the first token of the prompt, which nothing precedes."""
        text = self.shown(token)[0]
        self.tokens.append(text)
        self.offsets.append(self.offset)
        self.offset += len(text)
        self.logps.append(None if measured is None else finite(measured.logprob))
        self.top.append(None if measured is None else self._top(measured))

    def _top(self, measured: Logprob) -> dict[str, float]:
        """Return the most likely tokens and the drawn one. Of tokens with the same text, the most likely is kept."""
        found: dict[str, float] = {}
        for token, logprob in (*measured.top, (measured.token, measured.logprob)):
            found.setdefault(self.shown(token)[0], finite(logprob))
        return found

    def pop_new(self) -> dict[str, Any]:
        """Return and reset the parts that are new since the last call."""
        found = {
            "tokens": self.tokens, "token_logprobs": self.logps, "top_logprobs": self.top, "text_offset": self.offsets,
        }  # fmt: skip
        self.start()
        return found


@dataclass(frozen=True)
class TextResponseWriter(ResponseFields):
    """Writes one text completion."""

    def choice(
        self,
        index: int,
        delta: Delta,
        log: TextLogprobs,
        echo: EchoedPrompt | None = None,
        measured: Sequence[Logprob] = (),
    ) -> dict[str, Any]:
        """Convert one delta to a choice, preceded by the prompt if ``echo`` is given.

        Args:
            index: index of the choice.
            delta: new parts of the choice.
            log: log-probabilities of the choice so far.
            echo: the prompt, or None.
            measured: log-probabilities of the prompt's tokens, from the second on.
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
            "logprobs": log.pop_new() if self.has_logprobs else None,
            "finish_reason": delta.reason,
        }
        return {**found, "token_ids": list(delta.ids)} if self.has_ids else found

    def body(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.name,
            "system_fingerprint": self.fingerprint, "choices": list(choices), "usage": usage,
        }  # fmt: skip

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a chunk of a stream. ``usage`` is included only if requested, and null in all chunks but the last."""
        body = self.body(choices, usage)
        if not self.has_usage:
            del body["usage"]
        return body
