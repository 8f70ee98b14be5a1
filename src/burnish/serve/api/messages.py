"""The messages and tools of a chat request: who said what, in OpenAI's roles.

In: ``messages``, ``tools`` and ``tool_choice`` of a body. Out: typed messages. Refused, each with its place
(``messages[3].content``): parts that are not text (nothing is ever opened or fetched), an answer to a call that was not
made, an order that no template could write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from burnish.serve.api.fields import BodyFields

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES, MOST_TOOLS, MOST_CALLS, MOST_PARTS = 4096, 128, 128, 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolCall:
    """A call of the assistant; ``arguments`` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message. ``developer`` has become ``system``."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True)
class ToolChoice:
    """``auto`` leaves it to the model, ``none`` tells it of no tool, ``required`` demands a call (of ``name``)."""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str = ""


AUTO = ToolChoice()


def read_messages(fields: BodyFields, continues: bool) -> tuple[ChatMessage, ...]:
    """``messages``, whole or not at all: what is wrong is in ``fields.problems``."""
    listed = fields.items("messages", MOST_MESSAGES, required=True)
    each = fields.each("messages", listed)
    before = len(fields.problems)
    messages = [_message(one) for one in each]
    if len(fields.problems) == before and messages:
        _check_order(fields, messages, continues)
    return tuple(messages)


def _message(one: BodyFields) -> ChatMessage:
    role: Any = one.one_of("role", ROLES)
    if role is None:
        if one.values.get("role") is None:
            one.missing("role")
        role = "user"
    calls = _calls(one) if role == "assistant" else ()
    content = _content(one, optional=bool(calls) or (role == "assistant" and bool(one.values.get("reasoning_content"))))
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=content,
        reasoning=(one.text("reasoning_content") or "") if role == "assistant" else "",
        calls=calls,
        tool_call_id=(one.text("tool_call_id") or "") if role == "tool" else "",
    )


def _content(one: BodyFields, optional: bool) -> str:
    given = one.raw("content")
    if isinstance(given, str):
        return given
    if given is None:
        if not optional:
            one.missing("content")
        return ""
    parts = one.items("content", MOST_PARTS)
    return "".join(_part(part) for part in one.each("content", parts))


def _part(part: BodyFields) -> str:
    kind = part.text("type", required=True)
    if kind == "refusal":
        return part.text("refusal", required=True) or ""
    if kind is not None and kind != "text":
        part.add(
            "unsupported_content", "type", f'must be "text": nothing is opened or fetched. Received: "{kind[:40]}".'
        )
        return ""
    return part.text("text", required=True) or ""


def _calls(one: BodyFields) -> tuple[ToolCall, ...]:
    found = []
    for call in one.each("tool_calls", one.items("tool_calls", MOST_CALLS)):
        call.one_of("type", ("function",))
        function = call.within("function", required=True)
        identity = call.text("id", required=True) or ""
        if function is None:
            continue
        name, arguments = function.text("name", required=True) or "", _arguments(function)
        found.append(ToolCall(identity, name, arguments))
    return tuple(found)


def _arguments(function: BodyFields) -> str:
    """The JSON text of an object; an object itself is taken too, as some clients send it."""
    given = function.raw("arguments")
    if isinstance(given, dict):
        return json.dumps(given, ensure_ascii=False)
    text = function.text("arguments", required=True)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if text is not None and not isinstance(value, dict):
        function.wrong("arguments", "must be the JSON text of an object", text)
    return text or "{}"


def _check_order(fields: BodyFields, messages: list[ChatMessage], continues: bool) -> None:
    last = messages[-1]
    if continues and (last.role != "assistant" or last.calls):
        fields.wrong("messages", "must end with an answer that can be continued, as continue_final_message asks",
                     f"a message of {last.role}")  # fmt: skip
    if not continues and last.role not in {"user", "tool"}:
        fields.wrong(
            f"messages[{len(messages) - 1}].role",
            "of the last message must be user or tool; with continue_final_message: true it may be assistant",
            last.role,
        )
    _check_answers(fields, messages)


def _check_answers(fields: BodyFields, messages: list[ChatMessage]) -> None:
    """A tool's message answers a call of the assistant's message before it: the one that it names, else the first that
    has no answer yet, as LLaMA-Factory's clients leave the id out."""
    offered: list[str] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            offered = [call.id for call in message.calls]
            waiting = list(offered)
        elif message.role != "tool":
            offered, waiting = [], []
        elif not message.tool_call_id and waiting:
            messages[index] = replace(message, tool_call_id=waiting.pop(0))
        elif message.tool_call_id in waiting:
            waiting.remove(message.tool_call_id)
        elif message.tool_call_id not in offered:
            ids = ", ".join(offered) or "none"
            fields.wrong(f"messages[{index}].tool_call_id",
                         f"must be the id of a call in the assistant's message before it ({ids})",
                         message.tool_call_id)  # fmt: skip


def openai_tools(fields: BodyFields) -> tuple[Mapping[str, Any], ...]:
    """``tools`` in OpenAI's form, ``{"type": "function", "function": {...}}``."""
    found: list[dict[str, Any]] = []
    for tool in fields.each("tools", fields.items("tools", MOST_TOOLS)):
        tool.one_of("type", ("function",))
        function = tool.within("function", required=True)
        if function is None:
            continue
        name = function.text("name", required=True)
        if name is not None and not _NAME.fullmatch(name):
            function.wrong("name", "must be 1 to 64 letters, digits, _, - and .", name)
        function.text("description")
        function.flag("strict")
        parameters = function.object("parameters")
        if parameters is not None and not _is_schema(parameters):
            function.wrong("parameters", 'must be a JSON schema of an object with "properties"', "another schema")
        found.append({"type": "function", "function": dict(function.values)})
    names = [tool["function"].get("name") for tool in found]
    for name in {str(name) for name in names if names.count(name) > 1}:
        fields.wrong("tools", "must have names of their own", name)
    return tuple(found)


def _is_schema(parameters: Mapping[str, Any]) -> bool:
    """Return whether a template that lists parameters one by one can read a tool."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return (
        parameters.get("type", "object") == "object"
        and isinstance(properties, dict)
        and all(isinstance(schema, dict) for schema in properties.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def read_tool_choice(fields: BodyFields, tools: tuple[Mapping[str, Any], ...]) -> ToolChoice:
    """``tool_choice``: a word, or the name of one function."""
    given = fields.raw("tool_choice")
    if given is None:
        return AUTO
    if isinstance(given, dict):
        choice = BodyFields(given, "tool_choice", fields.problems)
        choice.one_of("type", ("function",))
        function = choice.within("function", required=True)
        name = function.text("name", required=True) if function else None
        known = [tool["function"].get("name") for tool in tools]
        if name is not None and name not in known:
            fields.wrong("tool_choice.function.name", f"must be one of the tools ({_listed(known)})", name)
        return ToolChoice("required", name or "")
    word: Any = fields.one_of("tool_choice", ("none", "auto", "required"))
    if word == "required" and not tools:
        fields.wrong("tool_choice", "needs tools to choose from", "required")
    return ToolChoice(word or "auto")


def _listed(names: list[Any]) -> str:
    return ", ".join(str(name) for name in names) or "there are none"
