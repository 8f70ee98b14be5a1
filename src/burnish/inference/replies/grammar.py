"""Grammars that constrain the next tokens: JSON, JSON that matches a schema, or a tool call.

The library llguidance (extra ``serve``) compiles and applies them. Errors: schema keywords that it does not support,
and a required tool call if the tool format has no grammar.

Whitespace between JSON tokens is limited to one space after ``:`` and ``,``. Otherwise a model might generate blank
lines endlessly.
"""

# V vocabulary size

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import MissingExtraError, Problem, UserError
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS
from burnish.utils.json_files import shorten_value

EXTRA = "serve"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Creates grammars for one tokenizer.

    Args:
        stop_ids: tokens that may end a complete response.
        vocabulary: V, the number of logits; larger than the tokenizer's vocabulary if the output layer is padded.
    Raises:
        UserError: if the library is missing or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], vocabulary: int) -> None:
        try:
            import llguidance.hf as hf
        except ImportError:
            raise MissingExtraError("llguidance", "Constrained decoding", EXTRA) from None
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._ends = list(stop_ids)
        try:
            self._inner = hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=self._ends)
        except ValueError as error:
            what = f"llguidance does not support this tokenizer ({error})."
            raise UserError(what, remedy="Describe the format in the prompt instead.") from error

    def json_object(self, waits_for: str = "") -> GrammarState:
        """Return a grammar for any JSON object."""
        return self.json_schema({"type": "object"}, waits_for)

    def json_schema(self, schema: Mapping[str, Any], waits_for: str = "") -> GrammarState:
        """Return a grammar for JSON that matches a schema.

        Args:
            schema: JSON schema.
            waits_for: text after which the grammar applies: the end of an open reasoning block.
        Raises:
            UserError: if the schema is not supported.
        """
        from llguidance import LLMatcher

        _check_size(schema)
        try:
            exact = _with_exact_numbers(schema)
            grammar = LLMatcher.grammar_from_json_schema(json.dumps({**exact, "x-guidance": _COMPACT}))
        except ValueError as error:
            raise UserError(_grammar_problem(error)) from error
        return self._match(grammar, waits_for)

    def calls(
        self, tool_format: str, offered: Mapping[str, Mapping[str, Any]], *, only_one: bool = False, waits_for: str = ""
    ) -> GrammarState:  # fmt: skip
        """Return a grammar for calls of the offered functions, and nothing else.

        Raises:
            UserError: if the tool format has no grammar.
        """
        remedy = 'Use tool_choice: "auto".'
        start, call = self._call_rules(tool_format, offered, only_one, "a tool call cannot be required", remedy)
        return self._match(f"start: {start}\n{call}", waits_for)

    def calls_or_json(
        self, tool_format: str, offered: Mapping[str, Mapping[str, Any]], schema: Mapping[str, Any], *,
        only_one: bool = False, waits_for: str = "",
    ) -> GrammarState:  # fmt: skip
        """Return a grammar for either calls of the offered functions or JSON that matches a schema.

        Raises:
            UserError: if the tool format has no grammar, or the schema is not supported.
        """
        what, remedy = "tools cannot be combined with a JSON response", 'Use tool_choice: "none" or "required".'
        start, call = self._call_rules(tool_format, offered, only_one, what, remedy)
        _check_size(schema)
        text = json.dumps({**_with_exact_numbers(schema), "x-guidance": _COMPACT})
        return self._match(f"start: {start} | answer\n{call}answer: %json {text}\n", waits_for)

    def _call_rules(
        self, tool_format: str, offered: Mapping[str, Mapping[str, Any]], only_one: bool, refusal: str, remedy: str
    ) -> tuple[str, str]:
        """Return the expression of one or several calls, and the rule of the JSON of a call.

        Raises:
            UserError: with ``refusal`` and ``remedy`` if the tool format has no grammar.
        """
        row = TOOL_FORMATS[tool_format].grammar if tool_format else None
        if row is None:
            known = ", ".join(member.name for member in TOOL_FORMATS if member.value.grammar)
            written = (
                f'with tool format "{tool_format}"'
                if tool_format
                else "because the format of the model's tool calls is unknown"
            )
            what = f"{refusal} {written}."
            raise UserError(what, remedy=f"{remedy} Supported formats: {known}.", option="tool_format")
        _check_size(offered)
        each = {"anyOf": [_call_schema(name, schema, row.arguments) for name, schema in offered.items()]}
        one = f"{self._literal(row.opens)} call {self._literal(row.closes)}".strip()
        is_single = only_one or row.between is None
        start = one if is_single else f"{one} ({self._literal(row.between or '')} {one})*"
        return start, f"call: %json {json.dumps({**each, 'x-guidance': _COMPACT})}\n"

    def _literal(self, text: str) -> str:
        """Return ``text`` in llguidance's notation, with control tokens as tokens, since text would not match them."""
        tokens = sorted((word for word in self.tokenizer.get_added_vocab() if word in text), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
        ids = {word: self.tokenizer.convert_tokens_to_ids(word) for word in tokens}
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

    def _match(self, grammar: str, waits_for: str) -> GrammarState:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._inner, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a circular definition fails here
        if matcher.is_error():
            raise UserError(_grammar_problem(matcher.get_error()))
        return GrammarState(matcher, self.vocabulary, self._ends, self.tokenizer, waits_for)


_MAX_CHARACTERS = 500_000
"""Maximum size of a schema as JSON. A grammar of this size is made within a second."""


def _check_size(schema: Mapping[str, Any]) -> None:
    size = len(json.dumps(schema))
    if size > _MAX_CHARACTERS:
        raise UserError(f"the schema has {size:,} characters as JSON; the maximum is {_MAX_CHARACTERS:,}.")


def _call_schema(name: str, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: _with_exact_numbers(schema) or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


_INT64 = 2**63
_DATA = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are data, not schemas."""


def _with_exact_numbers(schema: Any) -> Any:
    """A schema whose numbers llguidance 1.9 reads correctly.

    It replaces integers beyond 64 bits by the nearest one within, and accepts 0 for ``exclusiveMinimum: 0`` if the
    maximum is below 1. Such an exclusive bound is replaced by one inside of the interval.

    Raises:
        UserError: for a number beyond 64 bits that decides which responses are valid.
    """
    if isinstance(schema, list):
        return [_with_exact_numbers(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    low, high = (_bound(schema, *names) for names in _BOUNDS)
    data = [number for key in ("const", "enum") for number in _integers(schema.get(key))]
    beyond = [number for number in data if not -_INT64 <= number < _INT64]
    beyond += [low] if low is not None and low >= _INT64 else []
    beyond += [high] if high is not None and high < -_INT64 else []
    if beyond:
        raise UserError(_grammar_problem(f"{shorten_value(beyond[0], 40)} does not fit into 64 bits."))
    found = {key: value if key in _DATA else _with_exact_numbers(value) for key, value in schema.items()}
    if low is not None and high is not None and low < high < low + 1:
        width = (high - low) * _SHARE
        if found.get("exclusiveMinimum") == low and low == low // 1:
            del found["exclusiveMinimum"]
            found["minimum"] = low + width
        if found.get("exclusiveMaximum") == high and high == high // 1:
            del found["exclusiveMaximum"]
            found["maximum"] = high - width
    return found


_BOUNDS = (("minimum", "exclusiveMinimum", max), ("maximum", "exclusiveMaximum", min))
_SHARE = 1e-6
"""Share of an interval that is left out beside an exclusive bound."""


def _bound(schema: Mapping[str, Any], name: str, exclusive: str, choose: Any) -> float | None:
    found = [value for value in (schema.get(name), schema.get(exclusive)) if _is_number(value)]
    return choose(found) if found else None


def _integers(value: Any) -> list[float]:
    """The whole numbers among the values of ``const`` or ``enum``."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if _is_number(item) and item == item // 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _grammar_problem(error: Any) -> Problem:
    what = f"the grammar is not supported: {_first_line(error)}"
    return Problem(what, remedy="Remove the unsupported part of the schema.")


def _first_line(error: Any) -> str:
    return str(error).strip().split("\n")[0]


class GrammarError(Exception):
    """Raised if the library fails in the middle of a response."""


class GrammarState:
    """The state of a grammar for one response.

    Args:
        matcher: llguidance's matcher.
        vocabulary: V.
        ends: stop tokens, which are not allowed before ``waits_for``.
        waits_for: text until which all other tokens are allowed.
    """

    def __init__(self, matcher: Any, vocabulary: int, ends: Sequence[int], tokenizer: Any, waits_for: str) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self.ends: Sequence[int] = list(ends)
        self._tokenizer, self._waits_for = tokenizer, waits_for
        self._before: list[int] = []

    def mask(self, logits: Tensor) -> None:
        """Set the (V,) logits of tokens that are not allowed next to -inf.

        Raises:
            GrammarError: if the grammar exceeds the library's limits, or allows no token.
        """
        if self._waits_for:
            logits[list(self.ends)] = -torch.inf
            return
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._raise_if_failed()
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()
        if not allowed.any():
            raise GrammarError("no token is allowed next")
        logits[~_pad_to_vocabulary(allowed, len(logits))] = -torch.inf

    def take(self, token: int) -> None:
        """Advance by a token of the response. Raises GrammarError if the grammar does not allow it."""
        if self._waits_for:
            self._before.append(token)
            tail = self._tokenizer.decode(self._before[-32:], skip_special_tokens=False)
            if self._waits_for in tail:
                self._waits_for = ""
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


def _pad_to_vocabulary(allowed: Tensor, length: int) -> Tensor:
    """Return (V,) with tokens beyond the tokenizer's vocabulary not allowed."""
    if len(allowed) >= length:
        return allowed[:length]
    return torch.cat([allowed, allowed.new_zeros(length - len(allowed))])
