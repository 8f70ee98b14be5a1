"""Parsers of tool calls in generated text. ``tool_formats.py`` assigns a parser to each format.

A parser takes the text of a response (or its part with calls) and the offered tools. It returns the calls, or None if
the text is not a call: invalid JSON, a name without arguments, or text before or after.

    calls = TOOL_FORMATS["qwen"].reader.read(text, offered)

Formats with a tag per argument do not say whether ``5`` is a number or text. The tool's JSON schema decides. Without
one, an argument that is valid JSON and not a string is parsed as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Function name -> JSON schema of its parameters."""
_NOT_JSON = (ValueError, RecursionError)
"""Errors for text that is not JSON, or that is nested too deeply."""


@dataclass(frozen=True)
class Call:
    """A tool call. ``arguments`` is the parsed JSON value, usually an object."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class CallReader:
    """Parser of one format's calls.

    Args:
        read: parses text from the opening of the first call to the end; returns None if it is not a call.
        openings: texts that calls begin with; a stream holds text back from there on.
        closing: text that ends a call, so that a stream need not wait for the end of the response; "" if there is none.
        opens_with_name: a call begins with the name of its function and a line break.
        only_at_start: calls can occur only at the start of a response.
    """

    read: Callable[[str, ToolSchemas], list[Call] | None]
    openings: tuple[str, ...] = ()
    closing: str = ""
    opens_with_name: bool = False
    only_at_start: bool = False

    def openings_for(self, offered: ToolSchemas) -> tuple[str, ...]:
        return (*self.openings, *(f"{name}\n" for name in offered)) if self.opens_with_name else self.openings


def _json_calls(text: str, key: str = "arguments") -> list[Call] | None:
    """Parse one JSON object with a name and arguments, or a list of them."""
    try:
        value = json.loads(text)
    except _NOT_JSON:
        return None
    return _as_calls(value if isinstance(value, list) else [value], key)


def _as_calls(values: Sequence[Any], key: str = "arguments") -> list[Call] | None:
    is_call = (isinstance(v, Mapping) and isinstance(v.get("name"), str) and key in v for v in values)
    return [Call(value["name"], value[key]) for value in values] if values and all(is_call) else None


def _each_between(opening: str, closing: str, one: Callable[[str], list[Call] | None]) -> Callable[..., Any]:
    """Return a parser of calls, each between two words, with only whitespace around them."""
    pattern = re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL)

    def read(text: str, offered: ToolSchemas) -> list[Call] | None:
        if pattern.sub("", text).strip():
            return None
        return _join_calls([one(found.strip()) for found in pattern.findall(text)])

    return read


def _join_calls(parts: Sequence[list[Call] | None]) -> list[Call] | None:
    calls = [call for part in parts for call in part or []]
    return calls if parts and all(parts) else None


def _lines_of_json(text: str) -> list[Call] | None:
    """Parse consecutive JSON objects separated by whitespace."""
    decoder, values, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except _NOT_JSON:
            return None
        values.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return _as_calls(values)


def read_action(text: str, offered: ToolSchemas) -> list[Call] | None:
    """Parse ``Action: name``, ``Action Input: {...}``, any number of times."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    pattern = re.compile(r"\s*Action:[ \t]*([^\n]*?)[ \t]*\nAction Input:\s*")
    while text[at:].strip():
        found = pattern.match(text, at)
        if found is None or not found[1]:
            return None
        try:
            arguments, at = decoder.raw_decode(text, found.end())
        except _NOT_JSON:
            return None
        calls.append(Call(found[1], arguments))
    return calls or None


def read_named_line(text: str, offered: ToolSchemas) -> list[Call] | None:
    """Parse a name, a line break and JSON."""
    name, line_break, arguments = text.strip().partition("\n")
    try:
        return [Call(name.strip(), json.loads(arguments))] if line_break and name.strip() else None
    except _NOT_JSON:
        return None


def json_after(word: str, key: str = "arguments") -> Callable[[str, ToolSchemas], list[Call] | None]:
    """Return a parser of JSON with an optional word before it."""
    return lambda text, offered: _json_calls(text.strip().removeprefix(word), key)


def tagged_call_parser(call: str, argument: str) -> Callable[[str, ToolSchemas], list[Call] | None]:
    """Return a parser of calls with a tag per argument.

    Args:
        call: pattern of one call, with the groups ``name`` and ``inside``.
        argument: pattern of one argument, with the groups ``key`` and ``value``.
    """
    one, each = re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL)

    def read(text: str, offered: ToolSchemas) -> list[Call] | None:
        found = list(one.finditer(text))
        if not found or one.sub("", text).strip() or any(each.sub("", call["inside"]).strip() for call in found):
            return None
        calls = []
        for call in found:
            name = call["name"].strip()
            pairs = [(pair["key"], pair["value"]) for pair in each.finditer(call["inside"])]
            calls.append(Call(name, {key: _value(text, offered.get(name), key) for key, text in pairs}))
        return calls

    return read


def _value(text: str, schema: Mapping[str, Any] | None, key: str) -> Any:
    """Return an argument as text or parsed JSON, depending on its schema."""
    declared = ((schema or {}).get("properties") or {}).get(key) or {}
    kinds = declared.get("type")
    if kinds == "string":
        return text
    try:
        value = json.loads(text)
    except _NOT_JSON:
        return text
    return text if isinstance(value, str) else value


_LFM2_CALL = re.compile(r"\s*([^\s(,]+)\(")
_LFM2_KEY = re.compile(r"\s*(\w+)=")
_LFM2_TEXT = re.compile(r'"(.*?)"(?=\s*(?:,\s*\w+=|\)\s*(?:,\s*[^\s(,]+\(|$)))', re.DOTALL)


def _lfm2(text: str) -> list[Call] | None:
    """Parse ``[f(a=1, b="x"), g()]``.

    Text is not escaped, so it ends at the quote that is followed by the next argument or call.
    """
    if not (text.startswith("[") and text.endswith("]")):
        return None
    text, at, calls = text[1:-1], 0, []
    while text[at:].strip():
        head = _LFM2_CALL.match(text, at)
        if head is None:
            return None
        arguments, end = _lfm2_arguments(text, head.end())
        if end is None:
            return None
        calls.append(Call(head[1], arguments))
        at = end + len(text[end:]) - len(text[end:].lstrip(", "))
    return calls


def _lfm2_arguments(text: str, at: int) -> tuple[dict[str, Any], int | None]:
    """Parse the arguments after an opening bracket. Also return the end of the closing bracket, None if not found."""
    arguments: dict[str, Any] = {}
    while key := _LFM2_KEY.match(text, at):
        quoted = _LFM2_TEXT.match(text, key.end())
        try:
            value, at = (quoted[1], quoted.end()) if quoted else json.JSONDecoder().raw_decode(text, key.end())
        except _NOT_JSON:
            return {}, None
        arguments[key[1]] = value
        at += len(text[at:]) - len(text[at:].lstrip(", "))
    closing = re.compile(r"\s*\)").match(text, at)
    return arguments, closing.end() if closing else None


_QUOTE = '<|"|>'


class _Gemma4:
    """Parser of ``call:name{key:<|"|>text<|"|>,other:[1,true,{a:null}]}``."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def call(self) -> Call:
        self._take("call:")
        name = self._until("{")
        self._take("{")
        call = Call(name.strip(), self._object())
        if self.text[self.at :].strip():
            raise ValueError("text after a tool call")
        return call

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._ends("}"):
            key = self._until(":")
            self._take(":")
            found[key.strip()] = self._value()
        return found

    def _list(self) -> list[Any]:
        found = []
        while not self._ends("]"):
            found.append(self._value())
        return found

    def _ends(self, bracket: str) -> bool:
        """Skip whitespace and commas. If the bracket follows, consume it and return True."""
        self.at += len(self.text[self.at :]) - len(self.text[self.at :].lstrip(" ,\n"))
        if self.text.startswith(bracket, self.at):
            self.at += 1
            return True
        if self.at >= len(self.text):
            raise ValueError("a bracket is not closed")
        return False

    def _value(self) -> Any:
        if self.text.startswith(_QUOTE, self.at):
            self.at += len(_QUOTE)
            text = self._until(_QUOTE)
            self._take(_QUOTE)
            return text
        if self.text.startswith("{", self.at):
            self.at += 1
            return self._object()
        if self.text.startswith("[", self.at):
            self.at += 1
            return self._list()
        value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        return value

    def _until(self, mark: str) -> str:
        end = self.text.index(mark, self.at)
        found, self.at = self.text[self.at : end], end
        return found

    def _take(self, mark: str) -> None:
        if not self.text.startswith(mark, self.at):
            raise ValueError(f"{mark} is missing")
        self.at += len(mark)


def _gemma4(text: str) -> list[Call] | None:
    try:
        return [_Gemma4(text).call()]
    except _NOT_JSON:
        return None


def json_between(opening: str, closing: str) -> Callable[[str, ToolSchemas], list[Call] | None]:
    """Return a parser of calls that are JSON, each between two words."""
    return _each_between(opening, closing, _json_calls)


read_gemma4: Final = _each_between("<|tool_call>", "<tool_call|>", _gemma4)
read_lfm2: Final = _each_between("<|tool_call_start|>", "<|tool_call_end|>", _lfm2)
read_json_lines: Final = _each_between("<tool_calls>", "</tool_calls>", _lines_of_json)
