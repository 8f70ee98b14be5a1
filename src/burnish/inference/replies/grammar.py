"""Grammars, which allow only some next tokens: answers that are JSON, fit a JSON schema, or call a tool.

In:  a tokenizer; a JSON schema, or tools with the template's way of writing calls. Out: a ``Grammar`` for one answer.
The library llguidance (extra ``serve``) compiles and follows it. Refuses, with its words: keywords of a schema that it
does not know; and a required call where the tool format has no grammar.

Between tokens of JSON only one space after ``:`` and ``,`` is allowed; otherwise a model might write blank lines
endlessly.
"""

# V vocabulary

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import MissingExtraError, Problem, UserError

EXTRA = "serve"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_CALLS = {
    "qwen": ('"<tool_call>\\n"', '"\\n</tool_call>"', "arguments"),
    "ling": ('"<tool_call>\\n"', '"\\n</tool_call>"', "arguments"),
    "llama3": ("", "", "parameters"),
    "mistral": ('"[TOOL_CALLS] ["', '"]"', "arguments"),
    "minimax1": ('"<tool_calls>\\n"', '"\\n</tool_calls>"', "arguments"),
}
"""Tool format -> what opens and closes a call around its JSON, as llguidance writes them, and the key of arguments."""


class Grammars:
    """Grammars over one tokenizer.

    Args:
        stop_ids: tokens that may end an answer which is whole.
        vocabulary: V, the logits of the model; more than tokens where its head was padded.
    Raises:
        UserError: where the library is missing, or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], vocabulary: int) -> None:
        try:
            import llguidance.hf as hf
        except ImportError:
            raise MissingExtraError("llguidance", "An answer that is held to a grammar", EXTRA) from None
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._ends = list(stop_ids)
        try:
            self._inner = hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=self._ends)
        except ValueError as error:
            what = f"llguidance does not know this kind of tokenizer ({error})."
            raise UserError(what, remedy="Ask for the format in words.") from error

    def json_object(self, waits_for: str = "") -> Matched:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, waits_for)

    def json_schema(self, schema: Mapping[str, Any], waits_for: str = "") -> Matched:
        """JSON that fits a schema.

        Args:
            waits_for: the word behind which it begins: what closes a thought that is open.
        Raises:
            UserError: where the schema says what cannot be held to.
        """
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": _COMPACT}))
        except ValueError as error:
            raise UserError(_refused(error)) from error
        return self._matched(grammar, waits_for)

    def calls(
        self, tool_format: str, offered: Mapping[str, Mapping[str, Any]], *, only_one: bool = False, waits_for: str = ""
    ) -> Matched:  # fmt: skip
        """Calls of the functions offered, and nothing else.

        Raises:
            UserError: where there is no grammar for the tool format.
        """
        if tool_format not in _CALLS:
            known = ", ".join(_CALLS)
            written = f'of tool format "{tool_format}"' if tool_format else "where the form of the calls is not known"
            what = f"a call cannot be required {written}."
            raise UserError(
                what, remedy=f"Leave the choice to the model. Formats with a grammar: {known}.", option="tool_format"
            )
        opens, closes, key = _CALLS[tool_format]
        opens, closes = (self._with_tokens(text) for text in (opens, closes))
        each = {"anyOf": [_call_schema(name, schema, key) for name, schema in offered.items()]}
        one = f"{opens} call {closes}".strip()
        is_single = only_one or tool_format in ("llama3", "mistral", "minimax1")
        start = one if is_single else f'{one} ("\\n" {one})*'
        text = f"start: {start}\ncall: %json {json.dumps({**each, 'x-guidance': _COMPACT})}\n"
        return self._matched(text, waits_for)

    def _with_tokens(self, text: str) -> str:
        """``text`` with the words that are control tokens written as such: text alone would never match them."""
        from re import escape, split

        words = [word for word in self.tokenizer.get_added_vocab() if word in text]
        if not words:
            return text
        inside = text.strip('"')
        parts = split("(" + "|".join(escape(word) for word in sorted(words, key=len, reverse=True)) + ")", inside)
        ids = {word: self.tokenizer.convert_tokens_to_ids(word) for word in words}
        return " ".join(f"<[{ids[part]}]>" if part in ids else f'"{part}"' for part in parts if part)

    def _matched(self, grammar: str, waits_for: str) -> Matched:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._inner, grammar)
        if matcher.is_error():
            raise UserError(_refused(matcher.get_error()))
        return Matched(matcher, self.vocabulary, self.tokenizer if waits_for else None, waits_for)


def _call_schema(name: str, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: dict(schema) or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _refused(error: Any) -> Problem:
    said = str(error).strip().split("\n")[0]
    return Problem(f"the grammar cannot be held to: {said}", remedy="Leave that keyword out of the schema.")


class Matched:
    """A grammar being followed, for one answer.

    Args:
        tokenizer: needed where something is waited for.
        waits_for: until this text has come, every token may.
    """

    def __init__(self, matcher: Any, vocabulary: int, tokenizer: Any, waits_for: str) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._tokenizer, self._waits_for = tokenizer, waits_for
        self._before: list[int] = []

    def mask(self, logits: Tensor) -> None:
        """Put -inf into the (V,) logits of tokens that may not come next."""
        if self._waits_for:
            return
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()
        logits[~_as_long(allowed, len(logits))] = -torch.inf

    def take(self, token: int) -> None:
        if self._waits_for:
            self._before.append(token)
            tail = self._tokenizer.decode(self._before[-32:], skip_special_tokens=False)
            if self._waits_for in tail:
                self._waits_for = ""
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def _as_long(allowed: Tensor, length: int) -> Tensor:
    """(V,) with nothing allowed beyond the tokenizer's tokens."""
    if len(allowed) >= length:
        return allowed[:length]
    return torch.cat([allowed, allowed.new_zeros(length - len(allowed))])
