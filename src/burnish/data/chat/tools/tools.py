"""Tools and tool calls of records: validate and parse their JSON.

``tool_formats.py`` writes the parsed tools and calls as text. ``ToolError`` has a short reason; the caller adds the
record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from burnish.data.chat.tools.tool_calls import Call
from burnish.data.reading.json_files import parse_json

Tool: TypeAlias = Mapping[str, Any]


class ToolError(ValueError):
    """Raised for tools or calls that cannot be formatted. The message completes a sentence "dropped: ..."."""


def read_tools(tools: str) -> list[Tool]:
    """Parse the JSON list of a record's ``tools``.

    Raises:
        ToolError: if it is not a list of JSON objects.
    """
    listed = _json(tools, "tools are not valid JSON")
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise ToolError("tools are not a list of JSON objects")
    for tool in listed:
        inner = tool["function"] if tool.get("type") == "function" and "function" in tool else tool
        if not isinstance(inner, Mapping):
            raise ToolError("tools are not a list of JSON objects")
        if not isinstance(name := inner.get("name", ""), str):
            raise ToolError(f"a tool name is not a string: {json.dumps(name, ensure_ascii=False)}")
    return listed


def read_calls(content: str, thought_words: Sequence[str], call_words: Sequence[str]) -> tuple[str, list[Call]]:
    """Split the content of a ``function`` message into the text before the calls, and the calls.

    The content is the JSON of one call or of a list of calls. It may have text around it if the JSON is wrapped in
    ``call_words``. Otherwise only reasoning, wrapped in ``thought_words``, may precede it.

    Raises:
        ToolError: if no call can be parsed.
    """
    wrapped = list(_between(call_words).finditer(content))
    if wrapped:
        text = _between(call_words).sub("", content)
        return text, [call for found in wrapped for call in _calls(found.group(1))]
    thought = _between(thought_words).search(content)
    if thought:
        return thought.group(0), _calls(content.replace(thought.group(0), ""))
    return "", _calls(content)


def arguments_by_name(call: Call) -> Mapping[str, Any]:
    """Return the arguments of a call as an object, parsed if the record stores them as JSON text.

    Raises:
        ToolError: if they are not an object.
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = _json(arguments, "the arguments of a tool call are not valid JSON")
    if not isinstance(arguments, Mapping):
        raise ToolError("the arguments of a tool call are not a JSON object, which the tool format requires")
    return arguments


def function_schema(tool: Tool) -> Tool:
    """Return a tool in OpenAI's form {"type": "function", "function": {...}}."""
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _between(markers: Sequence[str]) -> re.Pattern[str]:
    opens, closes = map(re.escape, markers)
    return re.compile(f"{opens}(.*?){closes}", re.DOTALL)


def _calls(text: str) -> list[Call]:
    read = _json(text, "a tool call is not valid JSON")
    calls = read if isinstance(read, list) else [read]
    if not all(isinstance(call, Mapping) and "name" in call and "arguments" in call for call in calls):
        raise ToolError('a tool call has no "name" or "arguments"')
    if not calls:
        raise ToolError("an empty list of tool calls")
    if not all(isinstance(call["name"], str) and call["name"] for call in calls):
        raise ToolError("the name of a tool call is not a string")
    for call in calls:
        if isinstance(call["arguments"], str):
            _json(call["arguments"], "the arguments of a tool call are not valid JSON")
    return [Call(call["name"], call["arguments"]) for call in calls]


def _json(text: str, why: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ToolError(why) from error
