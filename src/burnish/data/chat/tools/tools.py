"""Tools and tool calls as records hold them: JSON, checked and parsed.

In: the JSON of a record, a list of tools or the content of a ``function`` message. Out: the parsed tools and calls,
which ``tool_formats.py`` writes as text. ``ToolError`` gives the reason for a refusal in a few words; the caller adds
the record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from burnish.data.chat.tools.tool_calls import Call
from burnish.data.reading.json_files import parsed

Tool: TypeAlias = Mapping[str, Any]


class ToolError(ValueError):
    """Raised where tools or calls cannot be written, with the rest of a sentence that begins with "dropped: "."""


def read_tools(tools: str) -> list[Tool]:
    """Parse the JSON list of a record's ``tools``.

    Raises:
        ToolError: if it is no list of JSON objects.
    """
    listed = _json(tools, "its tools are not JSON")
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise ToolError("its tools are not a list of JSON objects")
    for tool in listed:
        inner = tool["function"] if tool.get("type") == "function" and "function" in tool else tool
        if not isinstance(inner, Mapping):
            raise ToolError("its tools are not a list of JSON objects")
        if not isinstance(name := inner.get("name", ""), str):
            raise ToolError(f"the name of a tool is not a string, but {json.dumps(name, ensure_ascii=False)}")
    return listed


def read_calls(content: str, thought_words: Sequence[str], call_words: Sequence[str]) -> tuple[str, list[Call]]:
    """Split the content of a ``function`` message into the text before the calls, and the calls.

    The content is the JSON of one call or of a list of calls. It may have text around it if the JSON is wrapped in
    ``call_words``; otherwise only a thought, wrapped in ``thought_words``, may precede it.

    Raises:
        ToolError: if no call can be read.
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
    """The arguments of a call as an object; parsed if the record holds them as JSON text.

    Raises:
        ToolError: if they are no object.
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = _json(arguments, "a tool call's arguments are not JSON")
    if not isinstance(arguments, Mapping):
        raise ToolError("a tool call's arguments are not a JSON object, and the tool format names each one")
    return arguments


def function_schema(tool: Tool) -> Tool:
    """{...} -> {"type": "function", "function": {...}}"""
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _between(words: Sequence[str]) -> re.Pattern[str]:
    opens, closes = map(re.escape, words)
    return re.compile(f"{opens}(.*?){closes}", re.DOTALL)


def _calls(text: str) -> list[Call]:
    read = _json(text, "a tool call is not JSON")
    calls = read if isinstance(read, list) else [read]
    if not all(isinstance(call, Mapping) and "name" in call and "arguments" in call for call in calls):
        raise ToolError('a tool call lacks "name" or "arguments"')
    if not calls:
        raise ToolError("it calls no tool")
    if not all(isinstance(call["name"], str) and call["name"] for call in calls):
        raise ToolError("the name of a tool call is not a string")
    for call in calls:
        if isinstance(call["arguments"], str):
            _json(call["arguments"], "a tool call's arguments are not JSON")
    return [Call(call["name"], call["arguments"]) for call in calls]


def _json(text: str, why: str) -> Any:
    try:
        return parsed(text)
    except json.JSONDecodeError as error:
        raise ToolError(why) from error
