"""The named chat templates, as data: the text around each kind of message.

Templates are in ``templates.json`` in this folder. A user's own template is a YAML or JSON file with the same keys.
Unknown keys and invalid slots raise UserError.

A list of slots defines how a message is written. Each slot is one of:
- text with ``{{content}}`` in place of the message, or constant text;
- ``{bos}`` or ``{eos}``: the tokenizer's own token, or nothing if it has none;
- ``{"token": "<|user|>"}``: a token by name; ``{"token_if_known": ...}``: nothing if the tokenizer lacks it.
Slots are tokenized separately, so that no token spans two of them. A list of one slot may be written without brackets.

Texts and flags are those of LLaMA-Factory as of August 2026 (src/llamafactory/data/template.py), except for the two
errors described in docs/decisions/0010-chat-templates-as-data.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.options import raise_if
from burnish.config.registry import Registry
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS

CONTENT = "{{content}}"
_MARKER = re.compile(r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<｜[^<>\s]+｜>")

_UNKNOWN_PLACEHOLDER = re.compile(
    r".*\{\{\s*\w+\s*\}\}.*|\{\w+\}", re.DOTALL
)  # {{query}}, {{ content }}; {sep} by itself
_TAGS = re.compile(rf"(?P<opens><(?P<tag>\w+)>\s*){re.escape(CONTENT)}(?P<closes>\s*</(?P=tag)>)")


@dataclass(frozen=True)
class Token:
    """A token of the vocabulary, identified by name or by role (bos, eos)."""

    name: str
    kind: Literal["bos", "eos", "named", "if_known"] = "named"


Slots: TypeAlias = tuple[str | Token, ...]


@dataclass(frozen=True)
class TemplateSpec:
    """One named template.

    Args:
        name: name of the template.
        prefix: slots that open every conversation, before the system message.
        system, user, assistant, observation, function: slots of each role; ``function`` is a tool call.
        default_system: system message of records without one.
        text_end: text that ends a plain text, if it is not EOS.
        stop_words: texts that end generation besides EOS; with ``replace_eos`` the first of them becomes EOS.
        replace_eos: replace the tokenizer's EOS token.
        efficient_eos: responses have no end token; one EOS closes the row.
        reasoning: add an empty reasoning block to responses without reasoning.
        thought_words: texts that open and close a reasoning block.
        empty_thought: text of an empty reasoning block. Default: the two thought words.
        tool_format: format of tools and calls (``data/chat/tools/tool_formats.py``).
        tool_list_format: format of the list of tools. Default: ``tool_format``.
        tool_call_words: texts around the JSON of a call, for records with text before or after it.
        system_in_user: put the system message into the first user message.
        tools_open_system: without a system message, remove blank lines before the list of tools.
        markers: control strings that the model's own tokenizer has as single tokens, besides <|...|> and <｜...｜>.
        markers_are_text: the model's own tokenizer has no such tokens; <|...|> is ordinary text.
    """

    name: str
    prefix: Slots = ()
    system: Slots = (CONTENT,)
    user: Slots = (CONTENT,)
    assistant: Slots = (CONTENT, Token("eos_token", "eos"))
    observation: Slots = (CONTENT,)
    function: Slots = (CONTENT, Token("eos_token", "eos"))
    default_system: str = ""
    text_end: str = ""
    stop_words: tuple[str, ...] = ()
    replace_eos: bool = False
    efficient_eos: bool = False
    reasoning: bool = False
    thought_words: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    empty_thought: str = ""
    tool_format: str = "default"
    tool_list_format: str = ""
    tool_call_words: tuple[str, str] = ("<tool_call>", "</tool_call>")
    system_in_user: bool = False
    tools_open_system: bool = False
    markers: tuple[str, ...] = ()
    markers_are_text: bool = False

    @property
    def control_tokens(self) -> list[str]:
        """Texts that must be single tokens of the tokenizer. Split into several, they mean nothing to the model."""
        if self.markers_are_text:
            return []
        found: list[str] = []
        for slot in (*self.prefix, *self.system, *self.user, *self.assistant):
            if isinstance(slot, Token):
                found += [slot.name] if slot.kind == "named" else []
                continue
            found += _MARKER.findall(slot)
            found += [marker for marker in self.markers if marker in slot]
        return list(dict.fromkeys(found))

    @property
    def opening_words(self) -> list[str]:
        """Stop words that open a message but do not end one, such as ``<|im_start|>`` in ChatML."""
        slots = (self.prefix, self.system, self.user, self.assistant, self.observation, self.function)
        heads = "".join(map(_text_before_content, slots))
        return [word for word in self.stop_words if word in heads]

    @property
    def between_observations(self) -> str:
        """Text between the results of parallel tool calls: the tags around a result, closed and opened again."""
        text = "".join(slot for slot in self.observation if isinstance(slot, str))
        tags = _TAGS.search(text)
        return f"{tags['closes']}\n{tags['opens']}" if tags else "\n"


def _text_before_content(slots: Slots) -> str:
    """Return the text before the content."""
    texts = [slot.name if isinstance(slot, Token) else slot for slot in slots]
    return "".join(texts).partition(CONTENT)[0]


def read_row(name: str, row: Mapping[str, Any], where: str = "") -> TemplateSpec:
    """Parse a template. ``observation`` defaults to ``user``, ``function`` to ``assistant``.

    Raises:
        UserError: with all unknown keys and all invalid slots.
    """
    known = {field.name for field in fields(TemplateSpec)} - {"name"}
    problems = [
        Problem(f'Unknown template key "{key}".{did_you_mean(key, known)}', where=where)
        for key in map(str, row)
        if key not in known
    ]
    values: dict[str, Any] = {}
    for key in known & set(row):
        try:
            values[key] = _READERS.get(key, _string)(row[key])
        except (TypeError, ValueError) as error:
            problems.append(Problem(f'"{key}" of template "{name}" {error}', where=where))
    if row.get("replace_eos") and not row.get("stop_words"):
        problems.append(Problem('"replace_eos" requires at least one of "stop_words".', where=where))
    raise_if(problems)
    if row.get("efficient_eos"):
        values.setdefault("assistant", (CONTENT,))
    values.setdefault("observation", values.get("user", (CONTENT,)))
    values.setdefault("function", values.get("assistant", TemplateSpec.assistant))
    values.setdefault("empty_thought", "".join(values.get("thought_words", TemplateSpec.thought_words)))
    values.setdefault("tool_list_format", values.get("tool_format", TemplateSpec.tool_format))
    return TemplateSpec(name=name, **values)


TEMPLATES: Registry[TemplateSpec] = Registry("template")
"""Templates registered by other packages, as returned by ``read_row``."""


@cache
def table() -> Mapping[str, TemplateSpec]:
    """Return all templates by name: those of the file in order, then those of other packages.

    Raises:
        UserError: if another package's template has a name that is already used.
    """
    rows = json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))
    added = {member.name: member.value for member in TEMPLATES}
    if both := sorted(rows.keys() & added.keys()):
        raise UserError(f'Another package registers the template "{both[0]}", a name that burnish already uses.')
    return {**{name: read_row(name, row) for name, row in rows.items()}, **added}


def _slots(value: Any) -> Slots:
    return tuple(_slot(item) for item in (value if isinstance(value, list) else [value]))


def _slot(item: Any) -> str | Token:
    if item in ("{bos}", "{eos}"):
        return Token(f"{item[1:-1]}_token", item[1:-1])
    if isinstance(item, str) and not _UNKNOWN_PLACEHOLDER.fullmatch(item.replace(CONTENT, "")):
        return item
    if isinstance(item, Mapping) and list(item) in (["token"], ["token_if_known"]):
        (kind, name), *_ = item.items()
        if isinstance(name, str):
            return Token(name, "named" if kind == "token" else "if_known")
    raise ValueError(
        f'must be a string whose only placeholder is "{CONTENT}", or one of "{{bos}}", "{{eos}}" and {{"token": ...}}. '
        f"Received: {item!r}."
    )


def _constant_slots(value: Any) -> Slots:
    slots = _slots(value)
    if any(CONTENT in slot for slot in slots if isinstance(slot, str)):
        raise ValueError(f'must not contain "{CONTENT}", because it precedes all messages. Received: {value!r}.')
    return slots


def _message_slots(value: Any) -> Slots:
    slots = _slots(value)
    if sum(slot.count(CONTENT) for slot in slots if isinstance(slot, str)) != 1:
        raise ValueError(f'must contain "{CONTENT}" exactly once. Received: {value!r}.')
    return slots


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"must be a list of strings. Received: {value!r}.")
    return tuple(value)


def _marker_pair(value: Any) -> tuple[str, ...]:
    markers = _words(value)
    if len(markers) != 2:
        raise ValueError(f"must be two strings, an opening and a closing marker. Received: {value!r}.")
    return markers


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false. Received: {value!r}.")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string. Received: {value!r}.")
    return value


def _tool_format(value: Any) -> str:
    if value not in TOOL_FORMATS:
        near = did_you_mean(str(value), TOOL_FORMATS.names())
        raise ValueError(f"must be one of {', '.join(TOOL_FORMATS.names())}. Received: {value!r}.{near}")
    return _string(value)


_READERS: dict[str, Any] = {
    "prefix": _constant_slots,
    **dict.fromkeys(("system", "user", "assistant", "observation", "function"), _message_slots),
    **dict.fromkeys(("stop_words", "markers"), _words),
    **dict.fromkeys(("thought_words", "tool_call_words"), _marker_pair),
    **dict.fromkeys(("tool_format", "tool_list_format"), _tool_format),
    **dict.fromkeys(
        ("replace_eos", "efficient_eos", "reasoning", "system_in_user", "tools_open_system", "markers_are_text"), _flag
    ),
}
