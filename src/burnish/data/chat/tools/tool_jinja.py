"""The tool formats in Jinja: a saved chat template writes with them the text that ``tools.py`` writes in training.

In: the name of a tool format. Out: two Jinja snippets, one that prints the variable ``tools`` and one that prints
``calls``. Each must print the same text as its counterpart in ``tools.py``; a test renders both from the same data.
``raise_exception`` and ``tojson`` are those of transformers' chat templates.
"""

from __future__ import annotations

import json
from typing import Final

from burnish.data.chat.tools.tool_prompts import PROMPTS, TAGGED_CALLS

# A record may hold a tool bare or wrapped as {"type": "function", "function": {...}}; formats use one or the other.
_BARE = "{%- set bare = tool['function'] if tool['type'] == 'function' and tool['function'] is defined else tool -%}"
_WRAPPED = "(tool if tool['type'] == 'function' else {'type': 'function', 'function': tool})"
_EACH_CALL = (
    "{%- for call in calls -%}{%- set call = call['function'] if call['function'] is defined else call -%}"
    "{%- set name = call['name'] -%}{%- set arguments = call['arguments'] -%}"
)
_END_EACH = "{%- endfor -%}"
_VALUE = "{{- value if value is string else value | tojson -}}"

MACROS: Final = (
    "{%- macro gemma4_value(value) -%}"
    "{%- if value is string -%}{{- '<|\"|>' ~ value ~ '<|\"|>' -}}"
    "{%- elif value is boolean or value is none -%}{{- value | tojson -}}"
    "{%- elif value is mapping -%}{{- '{' -}}{{- gemma4_object(value) -}}{{- '}' -}}"
    "{%- elif value is iterable -%}{{- '[' -}}{%- for item in value -%}{{- gemma4_value(item) -}}"
    "{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"
    "{%- else -%}{{- value -}}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- macro gemma4_object(object) -%}"
    "{%- for key, value in object | dictsort(case_sensitive=true) -%}{{- key ~ ':' -}}{{- gemma4_value(value) -}}"
    "{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}"
    "{%- endmacro -%}"
    "{%- macro gemma4_schema(schema, parts, with_type=true) -%}"
    "{%- set all = parts | select | list -%}"
    "{%- if with_type and schema['type'] -%}"
    "{%- set all = all + ['type:<|\"|>' ~ schema['type'] | string | upper ~ '<|\"|>'] -%}{%- endif -%}"
    "{{- '{' ~ all | join(',') ~ '}' -}}"
    "{%- endmacro -%}"
    "{%- macro gemma4_description(schema) -%}"
    "{%- if schema['description'] -%}{{- 'description:<|\"|>' ~ schema['description'] ~ '<|\"|>' -}}{%- endif -%}"
    "{%- endmacro -%}"
)
"""Macros of the gemma4 format; the others need none."""


def jinja_string(text: str) -> str:
    """Write ``text`` as a Jinja string."""
    return json.dumps(text, ensure_ascii=False)


def jinja_print(text: str) -> str:
    """Write a Jinja statement that prints ``text`` as it is."""
    return "{{- " + jinja_string(text) + " -}}" if text else ""


def tools_in_jinja(tool_format: str) -> str:
    """Write Jinja that prints ``tools``, a list that is not empty."""
    if tool_format == "phi4_mini":
        return jinja_print("<|tool|>") + "{{- tools | tojson -}}" + jinja_print("<|/tool|>")
    if tool_format == "gemma4":
        return _GEMMA4_TOOLS
    if tool_format == "mistral":
        return _LIST_OF_WRAPPED
    each = _EACH_TOOL[tool_format]
    prompt = PROMPTS[tool_format]
    if tool_format == "default":
        prompt, names = prompt.split("{tool_names}")
        return _around(prompt, each) + _NAMES + jinja_print(names)
    return _around(prompt, each)


def calls_in_jinja(tool_format: str) -> str:
    """Write Jinja that prints ``calls``, the calls of one turn."""
    return _CALLS[tool_format]


def _around(prompt: str, inner: str) -> str:
    before, after = prompt.split("{tool_text}")
    return jinja_print(before) + inner + jinja_print(after)


def _for_each(body: str) -> str:
    return "{%- for tool in tools -%}" + _BARE + body + _END_EACH


_NAMES = _for_each("{{- bare['name'] -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}")
_LIST_OF_WRAPPED = (
    jinja_print("[AVAILABLE_TOOLS] [")
    + _for_each("{{- " + _WRAPPED + " | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}")
    + jinja_print("][/AVAILABLE_TOOLS]")
)
_REACT_TOOL = (
    "{{- '> Tool Name: ' ~ bare['name'] ~ '\\nTool Description: ' ~ bare['description'] | default('') -}}"
    "{{- '\\nTool Args:\\n' -}}"
    "{%- set parameters = bare['parameters'] or {} -%}"
    "{%- for name, schema in (parameters['properties'] | default({})).items() -%}"
    "{{- '  - ' ~ name ~ ' (' ~ schema['type'] | default('') -}}"
    "{%- if name in parameters['required'] | default([]) -%}{{- ', required' -}}{%- endif -%}"
    "{{- '): ' ~ schema['description'] | default('') -}}"
    "{%- if schema['enum'] -%}{{- ', should be one of [' ~ schema['enum'] | join(', ') ~ ']' -}}{%- endif -%}"
    "{%- if 'items' in schema and schema['items'] -%}"
    "{{- ', where each item should be ' ~ schema['items']['type'] | default('') -}}{%- endif -%}"
    "{{- '\\n' -}}{%- endfor -%}{{- '\\n' -}}"
)
_EACH_TOOL = {
    "default": _for_each(_REACT_TOOL),
    "glm4": _for_each(
        "{{- '\\n\\n## ' ~ bare['name'] ~ '\\n\\n' ~ bare | tojson(indent=4) -}}"
        + jinja_print("\n在调用上述函数时，请使用 Json 格式表示调用的参数。")
    ),
    "glm4_moe": _for_each("{{- '\\n' ~ " + _WRAPPED + " | tojson -}}"),
    "lfm2": jinja_print("[")
    + _for_each("{{- bare | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}")
    + jinja_print("]"),
    "ling": _for_each("{{- '\\n' ~ " + _WRAPPED + " | tojson -}}"),
    "llama3": _for_each("{{- " + _WRAPPED + " | tojson(indent=4) ~ '\\n\\n' -}}"),
    "minimax1": _for_each("{{- bare | tojson ~ '\\n' -}}"),
    "minimax2": _for_each("{{- '<tool>' ~ bare | tojson ~ '</tool>\\n' -}}"),
    "qwen": _for_each("{{- '\\n' ~ " + _WRAPPED + " | tojson -}}"),
    "qwen3_5": _for_each("{{- '\\n' ~ bare | tojson -}}"),
    "seed_oss": "{{- '\\n' ~ tools | tojson -}}",
}
_GEMMA4_TOOLS = _for_each(
    "{{- 'declaration:' ~ bare['name'] ~ '{description:<|\"|>' ~ bare['description'] | default('') ~ '<|\"|>' -}}"
    "{%- if bare['parameters'] -%}"
    "{%- set parameters = bare['parameters'] -%}"
    "{%- set each = namespace(properties=[], required=[]) -%}"
    "{%- for name, schema in (parameters['properties'] or {}).items() -%}"
    "{%- set each.properties = each.properties + [name ~ ':' ~ gemma4_schema(schema, [gemma4_description(schema)])] -%}"
    "{%- endfor -%}"
    "{%- for name in parameters['required'] or [] -%}"
    "{%- set each.required = each.required + ['<|\"|>' ~ name ~ '<|\"|>'] -%}{%- endfor -%}"
    "{{- ',parameters:' ~ gemma4_schema(parameters, ["
    "'properties:{' ~ each.properties | join(',') ~ '}' if each.properties else '', "
    "'required:[' ~ each.required | join(',') ~ ']' if each.required else '']) -}}"
    "{%- endif -%}"
    "{%- if bare['response'] -%}{%- set response = bare['response'] -%}"
    "{{- ',response:' ~ gemma4_schema(response, [gemma4_description(response)], "
    "response['type'] | default('') | string | upper == 'OBJECT') -}}"
    "{%- endif -%}"
    "{{- '}' -}}{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}"
)


def _calls(one: str, before: str = "", between: str = "\n", after: str = "") -> str:
    separator = "{%- if not loop.last -%}" + jinja_print(between) + "{%- endif -%}" if between else ""
    return jinja_print(before) + _EACH_CALL + one + separator + _END_EACH + jinja_print(after)


def _tagged(tool_format: str) -> str:
    opening, argument, closing = TAGGED_CALLS[tool_format]
    before_name, after_name = opening.split("{name}")
    before_key, rest = argument.split("{key}")
    before_value, after_value = rest.split("{value}")
    return _calls(
        jinja_print(before_name) + "{{- name -}}" + jinja_print(after_name)
        + "{%- for key, value in arguments.items() -%}"
        + jinja_print(before_key) + "{{- key -}}" + jinja_print(before_value) + _VALUE + jinja_print(after_value)
        + "{%- endfor -%}" + jinja_print(closing)
    )  # fmt: skip


_NAMED = "{{- '{\"name\": ' ~ name | tojson ~ ', \"arguments\": ' ~ arguments | tojson ~ '}' -}}"
_QWEN_CALL = jinja_print("<tool_call>\n") + _NAMED + jinja_print("\n</tool_call>")
_CALLS = {
    "default": _calls("{{- 'Action: ' ~ name ~ '\\nAction Input: ' ~ arguments | tojson -}}"),
    "gemma4": _calls(
        "{{- '<|tool_call>call:' ~ name ~ '{' -}}"
        "{%- if arguments is mapping -%}{{- gemma4_object(arguments) -}}"
        "{%- elif arguments is string -%}{{- arguments -}}{%- else -%}{{- gemma4_value(arguments) -}}{%- endif -%}"
        "{{- '}<tool_call|>' -}}",
        between="",
    ),
    "glm4": "{%- if calls | length > 1 -%}{{- raise_exception('This template cannot write parallel tool calls.') -}}"
    "{%- endif -%}" + _calls("{{- name ~ '\\n' ~ arguments | tojson -}}"),
    "glm4_moe": _tagged("glm4_moe"),
    "lfm2": _calls(
        "{{- name ~ '(' -}}{%- for key, value in arguments.items() -%}{{- key ~ '=' -}}"
        "{%- if value is string -%}{{- '\"' ~ value ~ '\"' -}}{%- else -%}{{- value | tojson -}}{%- endif -%}"
        "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ')' -}}",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
    ),
    "ling": _calls(_QWEN_CALL),
    "llama3": "{%- set several = calls | length > 1 -%}{%- if several -%}{{- '[' -}}{%- endif -%}"
    + _calls("{{- '{\"name\": ' ~ name | tojson ~ ', \"parameters\": ' ~ arguments | tojson ~ '}' -}}", between=", ")
    + "{%- if several -%}{{- ']' -}}{%- endif -%}",
    "minimax1": _calls(_NAMED, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "minimax2": _tagged("minimax2"),
    "mistral": _calls(_NAMED, "[", ", ", "]"),
    "qwen": _calls(_QWEN_CALL),
    "qwen3_5": _tagged("qwen3_5"),
    "seed_oss": _tagged("seed_oss"),
}
