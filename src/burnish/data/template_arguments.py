"""Arguments of the chat template that a record sets for itself, in the column ``chat_template_kwargs`` as in TRL.

A Jinja template reads them as variables. A named template has the arguments ``enable_thinking`` and
``preserve_thinking`` if it supports reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from burnish.data.stats import keep_reason
from burnish.loop.types import Example

COLUMN: Final = "chat_template_kwargs"
THINKING: Final = frozenset({"enable_thinking", "preserve_thinking"})
RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"}
)
"""Variables of a chat template that burnish or the tokenizer sets."""
UNUSED = keep_reason('the template does not use the argument "{name}" of chat_template_kwargs')
NO_TEMPLATE = keep_reason("chat_template_kwargs has no effect on a record without messages")
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Marks around the responses of a template, a tag of transformers."""


def arguments_of(example: Example) -> Mapping[str, Any]:
    """Return the arguments that the record of an example sets, without null values."""
    found: Mapping[str, Any] = example.extra.get(COLUMN) or {}
    return found


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Return the names of the undeclared variables of a Jinja template."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))


def set_variables(arguments: Mapping[str, Any]) -> str:
    """Return Jinja code that sets variables to JSON values. The names must be identifiers."""
    return "".join(f"{{%- set {name} = {_literal(value)} %}}" for name, value in arguments.items())


def _literal(value: Any) -> str:
    """Return a JSON value as a Jinja literal."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return _json(value)  # Jinja does not join the two escaped surrogates of a character


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
