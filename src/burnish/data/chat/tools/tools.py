"""Tool formats: the text of a list of tools, and of calls, for each model family.

In: the JSON of the record, a list of tools or the content of a ``function`` message. Out: text for the system message
or the assistant's turn. Refused: broken JSON, calls without a name or arguments, and whatever a format cannot express;
``ToolError`` gives the reason in a few words, and the caller adds the record.

Each format is that of the model family it is named after, as LLaMA-Factory writes it
(src/llamafactory/data/tool_utils.py, August 2026). One thing differs: ``llama3`` names a fixed date, as Meta's own
template does, where LLaMA-Factory writes the day on which the data was tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from burnish.config.registry import Registry
from burnish.data.chat.tools.tool_calls import CALL_READERS, Call, CallReader
from burnish.data.chat.tools.tool_prompts import PROMPTS, TAGGED_CALLS
from burnish.data.reading.json_files import parsed

Tool: TypeAlias = Mapping[str, Any]


class ToolError(ValueError):
    """Raised where tools or calls cannot be written, with the rest of a sentence that begins with "dropped: "."""


@dataclass(frozen=True)
class ToolFormat:
    """The tool format of one model family.

    Args:
        describe: the list of tools -> the text that follows the system message.
        write: the calls of one turn -> the text of the turn.
        reader: finds and reads what ``write`` wrote; None where calls are left in the text of answers.
    """

    describe: Callable[[Sequence[Tool]], str]
    write: Callable[[Sequence[Call]], str]
    reader: CallReader | None = None


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool format")


def describe_tools(tools: str, tool_format: str) -> str:
    """Write the text of a record's ``tools``, a JSON list. An empty list gives no text.

    Raises:
        ToolError: if it is not such a list, or a tool lacks what the format names.
    """
    listed = read_tools(tools)
    if tool_format == "phi4_mini":
        return f"<|tool|>{tools}<|/tool|>"  # the record's own spelling of the JSON
    if not listed:
        return ""
    try:
        return TOOL_FORMATS[tool_format].describe(listed)
    except (KeyError, AttributeError, TypeError) as error:
        raise ToolError("a tool lacks its name or has malformed parameters") from error


def read_tools(tools: str) -> list[Tool]:
    """Parse the JSON list of a record's ``tools``.

    Raises:
        ToolError: if it is no list of JSON objects.
    """
    listed = _json(tools, "its tools are not JSON")
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise ToolError("its tools are not a list of JSON objects")
    if any(not isinstance(name := _unwrap(tool).get("name", ""), str) for tool in listed):
        raise ToolError(f"the name of a tool is no text, but {_dump(name)}")
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
        raise ToolError("the name of a tool call is no text")
    for call in calls:
        if isinstance(call["arguments"], str):
            _json(call["arguments"], "a tool call's arguments are not JSON")
    return [Call(call["name"], call["arguments"]) for call in calls]


def _json(text: str, why: str) -> Any:
    try:
        return parsed(text)
    except json.JSONDecodeError as error:
        raise ToolError(why) from error


def _dump(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _unwrap(tool: Tool) -> Tool:
    """{"type": "function", "function": {...}} -> {...}"""
    inner = tool["function"] if tool.get("type") == "function" and "function" in tool else tool
    if not isinstance(inner, Mapping):
        raise ToolError("its tools are not a list of JSON objects")
    return inner


def function_schema(tool: Tool) -> Tool:
    """{...} -> {"type": "function", "function": {...}}"""
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _named(call: Call) -> str:
    return _dump({"name": call.name, "arguments": call.arguments})


def _items(call: Call) -> list[tuple[str, str]]:
    """The arguments as pairs of text, for the formats that write each one in a tag of its own."""
    return [(key, value if isinstance(value, str) else _dump(value)) for key, value in _object(call).items()]


def _object(call: Call) -> Mapping[str, Any]:
    given = call.arguments
    arguments = _json(given, "a tool call's arguments are not JSON") if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        raise ToolError("a tool call's arguments are not a JSON object, and the tool format names each one")
    return arguments


def _react_parameter(name: str, schema: Tool, required: Sequence[str]) -> str:
    options = f", should be one of [{', '.join(map(str, schema['enum']))}]" if schema.get("enum") else ""
    items = f", where each item should be {schema['items'].get('type', '')}" if schema.get("items") else ""
    kind = f"{schema.get('type', '')}{', required' if name in required else ''}"
    return f"  - {name} ({kind}): {schema.get('description', '')}{options}{items}\n"


def _react_tools(tools: Sequence[Tool]) -> str:
    text = ""
    for tool in map(_unwrap, tools):
        parameters = tool.get("parameters") or {}
        required = parameters.get("required", [])
        arguments = "".join(_react_parameter(n, s, required) for n, s in parameters.get("properties", {}).items())
        text += (
            f"> Tool Name: {tool['name']}\nTool Description: {tool.get('description', '')}\nTool Args:\n{arguments}\n"
        )
    names = ", ".join(_unwrap(tool)["name"] for tool in tools)
    before, between, after = re.split(r"\{tool_text\}|\{tool_names\}", PROMPTS["default"])
    return before + text + between + names + after


def _glm4_tool(tool: Tool) -> str:
    inner = _unwrap(tool)
    return f"\n\n## {inner['name']}\n\n{_dump(inner, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"


def _glm4_call(calls: Sequence[Call]) -> str:
    if len(calls) > 1:
        raise ToolError("it calls several tools at once, which the glm4 tool format cannot write")
    return f"{calls[0].name}\n{_dump(calls[0].arguments)}"


def _llama3_calls(calls: Sequence[Call]) -> str:
    written = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return _dump(written[0] if len(written) == 1 else written)


def _gemma4_string(value: Any) -> str:
    return f'<|"|>{value}<|"|>'


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return _gemma4_string(value)
    if isinstance(value, bool) or value is None:
        return _dump(value)
    if isinstance(value, Mapping):
        return "{" + _gemma4_object(value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma4_value, value)) + "]"
    return str(value)


def _gemma4_object(value: Mapping[str, Any]) -> str:
    return ",".join(f"{key}:{_gemma4_value(value[key])}" for key in sorted(value))


def _gemma4_call(call: Call) -> str:
    inside = call.arguments if isinstance(call.arguments, str) else _gemma4_value(call.arguments)
    if isinstance(call.arguments, Mapping):
        inside = _gemma4_object(call.arguments)
    return f"<|tool_call>call:{call.name}{{{inside}}}<tool_call|>"


def _gemma4_schema(schema: Tool, *parts: str) -> str:
    kind = [f"type:{_gemma4_string(str(schema['type']).upper())}"] if schema.get("type") else []
    return "{" + ",".join([*(part for part in parts if part), *kind]) + "}"


def _gemma4_tool(tool: Tool) -> str:
    inner = _unwrap(tool)
    text = f"declaration:{inner['name']}{{description:{_gemma4_string(inner.get('description', ''))}"
    if parameters := inner.get("parameters"):
        text += f",parameters:{_gemma4_parameters(parameters)}"
    if response := inner.get("response"):
        shown = {"type": response["type"]} if str(response.get("type", "")).upper() == "OBJECT" else {}
        text += f",response:{_gemma4_schema(shown, _gemma4_description(response))}"
    return text + "}"


def _gemma4_description(schema: Tool) -> str:
    return f"description:{_gemma4_string(schema['description'])}" if schema.get("description") else ""


def _gemma4_parameters(parameters: Tool) -> str:
    each = [
        f"{name}:{_gemma4_schema(s, _gemma4_description(s))}"
        for name, s in (parameters.get("properties") or {}).items()
    ]
    required = ",".join(map(_gemma4_string, parameters.get("required") or []))
    return _gemma4_schema(
        parameters, f"properties:{{{','.join(each)}}}" if each else "", f"required:[{required}]" if required else ""
    )


def _tagged(tool_format: str) -> Callable[[Sequence[Call]], str]:
    opening, argument, closing = TAGGED_CALLS[tool_format]

    def write(call: Call) -> str:
        arguments = (argument.replace("{key}", key, 1).replace("{value}", value, 1) for key, value in _items(call))
        return opening.replace("{name}", call.name, 1) + "".join(arguments) + closing

    return _joined(write)


def _lfm2_call(call: Call) -> str:
    values = ((key, f'"{value}"' if isinstance(value, str) else _dump(value)) for key, value in _object(call).items())
    return f"{call.name}({', '.join(f'{key}={value}' for key, value in values)})"


def _joined(
    one: Callable[[Call], str], before: str = "", between: str = "\n", after: str = ""
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: before + between.join(map(one, calls)) + after


def _qwen_call(call: Call) -> str:
    return f"<tool_call>\n{_named(call)}\n</tool_call>"


def _bare_json(tool: Tool) -> str:
    return _dump(_unwrap(tool))


def _full_json(tool: Tool) -> str:
    return _dump(function_schema(tool))


def _all_in(prompt: str, text: Callable[[Sequence[Tool]], str]) -> Callable[[Sequence[Tool]], str]:
    """Make a function that writes the text of all tools in place of ``{tool_text}`` in the prompt."""
    before, after = PROMPTS[prompt].split("{tool_text}")
    return lambda tools: before + text(tools) + after


def _each_in(prompt: str, one: str, write: Callable[[Tool], str]) -> Callable[[Sequence[Tool]], str]:
    """The same, with each tool in place of {} in ``one``."""
    before, after = one.split("{}")
    return _all_in(prompt, lambda tools: "".join(before + write(tool) + after for tool in tools))


_FORMATS = {
    "default": ToolFormat(
        _react_tools, _joined(lambda call: f"Action: {call.name}\nAction Input: {_dump(call.arguments)}")
    ),
    "gemma4": ToolFormat(lambda tools: "\n".join(map(_gemma4_tool, tools)), _joined(_gemma4_call, between="")),
    "glm4": ToolFormat(_each_in("glm4", "{}", _glm4_tool), _glm4_call),
    "glm4_moe": ToolFormat(_each_in("glm4_moe", "\n{}", _full_json), _tagged("glm4_moe")),
    "lfm2": ToolFormat(
        _all_in("lfm2", lambda tools: _dump(list(map(_unwrap, tools)))),
        _joined(_lfm2_call, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ),
    "ling": ToolFormat(_each_in("ling", "\n{}", _full_json), _joined(_qwen_call)),
    "llama3": ToolFormat(
        _each_in("llama3", "{}\n\n", lambda tool: _dump(function_schema(tool), indent=4)), _llama3_calls
    ),
    "minimax1": ToolFormat(
        _each_in("minimax1", "{}\n", _bare_json), _joined(_named, "<tool_calls>\n", "\n", "\n</tool_calls>")
    ),
    "minimax2": ToolFormat(_each_in("minimax2", "<tool>{}</tool>\n", _bare_json), _tagged("minimax2")),
    "mistral": ToolFormat(
        lambda tools: f"[AVAILABLE_TOOLS] {_dump(list(map(function_schema, tools)))}[/AVAILABLE_TOOLS]",
        _joined(_named, "[", ", ", "]"),
    ),
    "qwen": ToolFormat(_each_in("qwen", "\n{}", _full_json), _joined(_qwen_call)),
    "qwen3_5": ToolFormat(_each_in("qwen3_5", "\n{}", _bare_json), _tagged("qwen3_5")),
    "seed_oss": ToolFormat(_all_in("seed_oss", lambda tools: "\n" + _dump(tools)), _tagged("seed_oss")),
}
for _name, _format in _FORMATS.items():
    TOOL_FORMATS.register(_name, summary=f"as the {_name} models write tools")(
        replace(_format, reader=CALL_READERS[_name])
    )
