"""Tool formats of model families: how tools and tool calls are rendered, parsed and constrained by a grammar.

``ToolFormat.tools`` and ``ToolFormat.calls`` are Jinja. Training renders them, and a saved chat template contains them,
so that a served model sees the same text as in training. Packages can register a format through the entry-point group
``burnish.tool_format``:

    TOOL_FORMATS.register("acme")(
        ToolFormat(
            tools=each_tool("\\nTool: {{ tool | tojson }}"),
            calls=each_call("<call>{{ name }} {{ arguments | tojson }}</call>"),
            reader=CallReader(read_acme, ("<call>",), "</call>"),
        )
    )

Sources: the models' own chat templates, with the text of LLaMA-Factory's tool_utils.py (August 2026). One difference:
``llama3`` contains a fixed date, as in Meta's template. LLaMA-Factory writes the current date, but rows must not depend
on the day of tokenization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NoReturn

from burnish.config.registry import Registry
from burnish.data.chat.tools.tool_calls import (
    Call,
    CallReader,
    json_after,
    json_between,
    read_action,
    read_gemma4,
    read_json_lines,
    read_lfm2,
    read_named_line,
    tagged_call_parser,
)
from burnish.data.chat.tools.tools import ToolError, arguments_by_name, read_tools

_BLOCK = re.compile(r"(\{\{.*?\}\}|\{%.*?%\})", re.DOTALL)


def exact_jinja(source: str) -> str:
    """Rewrite Jinja so that its literal text is printed unchanged, regardless of the renderer's whitespace settings."""
    parts = _BLOCK.split(source)
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = f"{part[:2]}-{part[2:-2].removeprefix('-').removesuffix('-')}-{part[-2:]}"
        else:
            parts[at] = f"{{{{- {json.dumps(part, ensure_ascii=False)} -}}}}" if part else ""
    return "".join(parts)


@dataclass(frozen=True)
class CallGrammar:
    """Grammar of a required tool call: JSON with ``name`` and arguments, between two texts.

    Args:
        opens: the text before a call.
        closes: the text after a call.
        arguments: the key of the arguments.
        between: the text between two calls; None if an answer can have one call only.
    """

    opens: str = ""
    closes: str = ""
    arguments: str = "arguments"
    between: str | None = "\n"


@dataclass(frozen=True)
class ToolFormat:
    """The tool format of one model family. All Jinja text outside of delimiters is printed unchanged.

    Args:
        tools: Jinja that prints the variable ``tools``, a non-empty list of JSON objects; this text follows the
            system message. ``raise_exception`` and ``tojson`` are those of transformers' chat templates.
        calls: Jinja that prints the variable ``calls``, the calls of one turn.
        macros: Jinja macros that both may use.
        reader: parses calls in responses; None leaves them in the text.
        grammar: constrains a required call; None if calls cannot be required.
        names_arguments: ``calls`` prints arguments one by one, so arguments given as JSON text are parsed first.
        keeps_json: ``tools`` prints ``tools_json``, the record's own JSON, also for an empty list.
    """

    tools: str
    calls: str
    macros: str = ""
    reader: CallReader | None = None
    grammar: CallGrammar | None = None
    names_arguments: bool = False
    keeps_json: bool = False

    def describe(self, tools: Sequence[Any], tools_json: str | None = None) -> str:
        """Return a list of tools as text.

        Raises:
            ToolError: if a tool lacks a field that the format prints.
        """
        values = {"tools": tools} if tools_json is None else {"tools": tools, "tools_json": tools_json}
        return _render(self.macros + self.tools, "a tool has no name or malformed parameters", values)

    def write(self, calls: Sequence[Call]) -> str:
        """Return the calls of one turn as text.

        Raises:
            ToolError: if the format cannot express them.
        """
        if self.names_arguments:
            calls = [replace(call, arguments=arguments_by_name(call)) for call in calls]
        listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return _render(self.macros + self.calls, "malformed tool calls", {"calls": listed})


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool format")


def describe_tools(tools: str, tool_format: str) -> str:
    """Return a record's ``tools``, a JSON list, as text. An empty list usually gives no text.

    Raises:
        ToolError: if it is not a JSON list of tools, or a tool lacks a field that the format prints.
    """
    listed, row = read_tools(tools), TOOL_FORMATS[tool_format]
    return row.describe(listed, tools) if listed or row.keeps_json else ""


@lru_cache
def _compile_pattern(source: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, autoescape=False)  # noqa: S701  # input of a tokenizer, not HTML
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(exact_jinja(source))


def _refuse(why: str) -> NoReturn:
    raise ToolError(why)


def _render(source: str, why: str, values: dict[str, Any]) -> str:
    from jinja2 import UndefinedError

    try:
        return str(_compile_pattern(source).render(values))
    except (UndefinedError, KeyError, AttributeError, TypeError) as error:
        raise ToolError(why) from error


def each_tool(body: str, between: str = "") -> str:
    """Return Jinja that prints ``body`` for each tool.

    In ``body``, ``bare`` is the tool as {"name": ...} and ``wrapped`` is {"type": "function", "function": {...}}.
    Records may contain either form.
    """
    return (
        "{% for tool in tools %}{% set is_wrapped = tool.get('type') == 'function' %}"
        "{% set bare = tool['function'] if is_wrapped and 'function' in tool else tool %}"
        "{% set wrapped = tool if is_wrapped else {'type': 'function', 'function': tool} %}"
    ) + _join_body(body, between)


def each_call(body: str, between: str = "\n") -> str:
    """Return Jinja that prints ``body`` for each call, with the variables ``name`` and ``arguments``."""
    return (
        "{% for call in calls %}{% set call = call['function'] if 'function' in call else call %}"
        "{% set name = call['name'] %}{% set arguments = call['arguments'] %}"
    ) + _join_body(body, between)


def _join_body(body: str, between: str) -> str:
    return body + (f"{{% if not loop.last %}}{between}{{% endif %}}" if between else "") + "{% endfor %}"


def _each_argument(body: str) -> str:
    return (
        "{% for key, value in arguments.items() %}"
        "{% set value = value if value is string else value | tojson %}" + body + "{% endfor %}"
    )


_NAMED = '{"name": {{ name | tojson }}, "arguments": {{ arguments | tojson }}}'
_JSON_CALL = f"<tool_call>\n{_NAMED}\n</tool_call>"
_FUNCTIONS_IN_XML = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    + each_tool("\n{{ wrapped | tojson }}")
    + "\n</tools>\n\n"
)
_JSON_IN_XML = (
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_GEMMA4_MACROS = (
    "{% macro gemma4_value(value) %}"
    '{% if value is string %}<|"|>{{ value }}<|"|>'
    "{% elif value is boolean or value is none %}{{ value | tojson }}"
    "{% elif value is mapping %}{{ '{' }}{{ gemma4_object(value) }}{{ '}' }}"
    "{% elif value is iterable %}[{% for item in value %}{{ gemma4_value(item) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ value }}{% endif %}{% endmacro %}"
    "{% macro gemma4_object(object) %}"
    "{% for key, value in object | dictsort(case_sensitive=true) %}{{ key }}:{{ gemma4_value(value) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{% endmacro %}"
    "{% macro gemma4_schema(schema, parts, with_type=true) %}"
    "{% set all = parts | select | list %}"
    "{% if with_type and schema.get('type') %}"
    "{% set all = all + ['type:<|\"|>' ~ schema['type'] | string | upper ~ '<|\"|>'] %}{% endif %}"
    "{{ '{' ~ all | join(',') ~ '}' }}{% endmacro %}"
    "{% macro gemma4_description(schema) %}"
    "{% if schema.get('description') %}description:<|\"|>{{ schema['description'] }}<|\"|>{% endif %}{% endmacro %}"
)

_QWEN = ToolFormat(
    tools=f"\n\n{_FUNCTIONS_IN_XML}{_JSON_IN_XML}",
    calls=each_call(_JSON_CALL),
    reader=CallReader(json_between("<tool_call>", "</tool_call>"), ("<tool_call>",), "</tool_call>"),
    grammar=CallGrammar("<tool_call>\n", "\n</tool_call>"),
)
_DEFAULT = ToolFormat(
    tools="You have access to the following tools:\n"
    + each_tool(
        "> Tool Name: {{ bare['name'] }}\nTool Description: {{ bare.get('description', '') }}\nTool Args:\n"
        "{% set parameters = bare.get('parameters') or {} %}{% set required = parameters.get('required', []) %}"
        "{% for name, schema in parameters.get('properties', {}).items() %}"
        "  - {{ name }} ({{ schema.get('type', '') }}{% if name in required %}, required{% endif %}): "
        "{{ schema.get('description', '') }}"
        "{% if schema.get('enum') %}, should be one of [{{ schema['enum'] | join(', ') }}]{% endif %}"
        "{% if schema.get('items') %}, where each item should be {{ schema['items'].get('type', '') }}{% endif %}\n"
        "{% endfor %}\n"
    )
    + "Use the following format if using a tool:\n```\nAction: tool name (one of ["
    + each_tool("{{ bare['name'] }}", ", ")
    + "])\nAction Input: the input to the tool, in a JSON format representing the kwargs "
    '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n',
    calls=each_call("Action: {{ name }}\nAction Input: {{ arguments | tojson }}"),
    reader=CallReader(read_action, ("Action:",)),
)

_ROWS: Final[dict[str, ToolFormat]] = {
    "default": _DEFAULT,
    "gemma4": ToolFormat(
        tools=each_tool(
            "declaration:{{ bare['name'] }}{{ '{' }}description:<|\"|>{{ bare.get('description', '') }}<|\"|>"
            "{% if bare.get('parameters') %}{% set parameters = bare['parameters'] %}"
            "{% set each = namespace(properties=[], required=[]) %}"
            "{% for name, schema in (parameters.get('properties') or {}).items() %}"
            "{% set each.properties = "
            "each.properties + [name ~ ':' ~ gemma4_schema(schema, [gemma4_description(schema)])] %}{% endfor %}"
            "{% for name in parameters.get('required') or [] %}"
            "{% set each.required = each.required + ['<|\"|>' ~ name ~ '<|\"|>'] %}{% endfor %}"
            ",parameters:{{ gemma4_schema(parameters, ["
            "'properties:{' ~ each.properties | join(',') ~ '}' if each.properties else '', "
            "'required:[' ~ each.required | join(',') ~ ']' if each.required else '']) }}{% endif %}"
            "{% if bare.get('response') %}{% set response = bare['response'] %}"
            ",response:{{ gemma4_schema(response, [gemma4_description(response)], "
            "response.get('type', '') | string | upper == 'OBJECT') }}{% endif %}{{ '}' }}",
            "\n",
        ),
        calls=each_call(
            "<|tool_call>call:{{ name }}{{ '{' }}{% if arguments is mapping %}{{ gemma4_object(arguments) }}"
            "{% elif arguments is string %}{{ arguments }}{% else %}{{ gemma4_value(arguments) }}{% endif %}"
            "{{ '}' }}<tool_call|>",
            "",
        ),
        macros=_GEMMA4_MACROS,
        reader=CallReader(read_gemma4, ("<|tool_call>",), "<tool_call|>"),
    ),
    "glm4": ToolFormat(
        tools="你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
        + each_tool(
            "\n\n## {{ bare['name'] }}\n\n{{ bare | tojson(indent=4) }}"
            "\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        ),
        calls="{% if calls | length > 1 %}"
        "{{ raise_exception('several tool calls in a turn, which the glm4 tool format does not support') }}{% endif %}"
        + each_call("{{ name }}\n{{ arguments | tojson }}"),
        reader=CallReader(read_named_line, opens_with_name=True, only_at_start=True),
    ),
    "glm4_moe": ToolFormat(
        tools=f"\n\n{_FUNCTIONS_IN_XML}"
        "For each function call, output the function name and arguments within the following XML format:"
        "\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"
        "\n<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>\n",
        # LLaMA-Factory does not close a tag here and in seed_oss. Rows must be the same as in LLaMA-Factory.
        calls=each_call(
            "\n<tool_call>{{ name }}"
            + _each_argument("\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>")
        ),
        reader=CallReader(
            tagged_call_parser(
                r"<tool_call>(?P<name>[^\n<]+)(?P<inside>.*?)(?:</tool_call>|(?=\s*<tool_call>)|\Z)",
                r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ),
            ("<tool_call>",),
        ),
        names_arguments=True,
    ),
    "lfm2": ToolFormat(
        tools="List of tools: <|tool_list_start|>[" + each_tool("{{ bare | tojson }}", ", ") + "]<|tool_list_end|>",
        calls="<|tool_call_start|>["
        + each_call(
            "{{ name }}({% for key, value in arguments.items() %}{{ key }}="
            '{% if value is string %}"{{ value }}"{% else %}{{ value | tojson }}{% endif %}'
            "{% if not loop.last %}, {% endif %}{% endfor %})",
            ", ",
        )
        + "]<|tool_call_end|>",
        reader=CallReader(read_lfm2, ("<|tool_call_start|>",), "<|tool_call_end|>"),
        names_arguments=True,
    ),
    "ling": replace(_QWEN, tools=f"{_FUNCTIONS_IN_XML}{_JSON_IN_XML}\ndetailed thinking off"),
    "llama3": ToolFormat(
        tools="Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "Do not use variables.\n\n" + each_tool("{{ wrapped | tojson(indent=4) }}\n\n"),
        calls="{% if calls | length > 1 %}[{% endif %}"
        + each_call('{"name": {{ name | tojson }}, "parameters": {{ arguments | tojson }}}', ", ")
        + "{% if calls | length > 1 %}]{% endif %}",
        reader=CallReader(json_after("<|python_tag|>", "parameters"), ("<|python_tag|>", "{", "["), only_at_start=True),
        grammar=CallGrammar(arguments="parameters", between=None),
    ),
    "minimax1": ToolFormat(
        tools="You are provided with these tools:\n<tools>\n" + each_tool("{{ bare | tojson }}\n") + "</tools>\n\n"
        "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
        "json-object of arguments, following the format below:\n<tool_calls>\n"
        '{"name": <tool-name-1>, "arguments": <args-json-object-1>}\n...\n</tool_calls>',
        calls="<tool_calls>\n" + each_call(_NAMED) + "\n</tool_calls>",
        reader=CallReader(read_json_lines, ("<tool_calls>",), "</tool_calls>"),
        grammar=CallGrammar("<tool_calls>\n", "\n</tool_calls>", between=None),
    ),
    "minimax2": ToolFormat(
        tools="\n\n# Tools\n\nYou may call one or more tools to assist with the user query.\n"
        "Here are the tools available in JSONSchema format:\n\n<tools>\n"
        + each_tool("<tool>{{ bare | tojson }}</tool>\n")
        + "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n"
        '\n<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>',
        calls=each_call(
            '<invoke name="{{ name }}">'
            + _each_argument('\n<parameter name="{{ key }}">{{ value }}</parameter>')
            + "\n</invoke>"
        ),
        reader=CallReader(
            tagged_call_parser(
                r"(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"]+)\">(?P<inside>.*?)</invoke>"
                r"(?:\s*</minimax:tool_call>)?",
                r"<parameter name=\"(?P<key>.*?)\">(?P<value>.*?)</parameter>",
            ),
            ("<minimax:tool_call>", "<invoke name="),
        ),
        names_arguments=True,
    ),
    "mistral": ToolFormat(
        tools="[AVAILABLE_TOOLS] [" + each_tool("{{ wrapped | tojson }}", ", ") + "][/AVAILABLE_TOOLS]",
        calls="[" + each_call(_NAMED, ", ") + "]",
        reader=CallReader(json_after("[TOOL_CALLS]"), ("[TOOL_CALLS]", '[{"name"')),
        grammar=CallGrammar("[TOOL_CALLS] [", "]", between=None),
    ),
    "qwen": _QWEN,
    "qwen3_5": ToolFormat(
        tools="\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>"
        + each_tool("\n{{ bare | tojson }}")
        + "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: "
        "an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
        "- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language "
        "BEFORE the function call, but NOT after\n"
        "- If there is no function call available, answer the question like normal with your current knowledge "
        "and do not tell the user about function calls\n</IMPORTANT>",
        calls=each_call(
            "<tool_call>\n<function={{ name }}>"
            + _each_argument("\n<parameter={{ key }}>\n{{ value }}\n</parameter>")
            + "\n</function>\n</tool_call>"
        ),
        reader=CallReader(
            tagged_call_parser(
                r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<inside>.*?)</function>\s*</tool_call>",
                r"<parameter=(?P<key>[^>]*)>\n?(?P<value>.*?)\n?</parameter>",
            ),
            ("<tool_call>",),
            "</tool_call>",
        ),
        names_arguments=True,
    ),
    "seed_oss": ToolFormat(
        tools="system\nYou are Doubao, a helpful AI assistant. "
        "You may call one or more functions to assist with the user query."
        "Tool List:\nYou are authorized to use the following tools (described in JSON Schema format). "
        "Before performing any task, you must decide how to call them based on the descriptions and parameters "
        "of these tools.\n{{ tools | tojson }}\n"
        "工具调用请遵循如下格式:\n<seed:tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>value_1</parameter>\n<parameter=example_parameter_2>"
        "This is the value for the second parameter\nthat can span\nmultiple lines</parameter>\n"
        "</function>\n</seed:tool_call>\n",
        calls=each_call(
            "\n<seed:tool_call>\n<function={{ name }}"
            + _each_argument("\n<parameter={{ key }}>{{ value }}</parameter>")
            + "\n</function>\n</seed:tool_call>"
        ),
        reader=CallReader(
            tagged_call_parser(
                r"<seed:tool_call>\s*<function=(?P<name>[^>\n<]+)>?(?P<inside>.*?)</function>\s*</seed:tool_call>",
                r"<parameter=(?P<key>[^>]*)>(?P<value>.*?)</parameter>",
            ),
            ("<seed:tool_call>",),
            "</seed:tool_call>",
        ),
        names_arguments=True,
    ),
}
for _name, _row in _ROWS.items():
    TOOL_FORMATS.register(_name)(_row)
TOOL_FORMATS.register(
    "phi4_mini", refused="it formats only the list of tools; the template uses the default format for tool calls"
)(replace(_DEFAULT, tools="<|tool|>{{ tools_json | default(tools | tojson) }}<|/tool|>", keeps_json=True))
