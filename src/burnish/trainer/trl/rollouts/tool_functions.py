"""Functions that a model may call as tools: their schemas, and their results as text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from burnish.config.errors import UserError, first_line

Tool = Callable[..., Any]


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the JSON schemas of functions, from their signatures and docstrings. Raises UserError if one has none."""
    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            remedy = "Add type hints, and a docstring with a description and each argument under Args."
            raise UserError(f"{first_line(error).removesuffix('!')}.", remedy=remedy, option="tools") from error
    return found


def check_tools(tools: Any) -> list[Tool]:
    """Return the tools of a trainer as a list. Raises TypeError if they are no list of functions."""
    if tools is not None and not isinstance(tools, list | tuple):
        raise TypeError(
            f"`tools` must be a list of functions. Received: {tools!r:.100}, of type {type(tools).__name__}."
        )
    for tool in tools or ():
        if not inspect.isroutine(tool):
            kind = type(tool).__name__
            what = f"`tools` must be functions or methods. Received: {tool!r:.100}, of type {kind}."
            raise TypeError(f"{what} Define a function with type hints and a docstring.")
    return list(tools or ())


def text_or_list(result: Any) -> Any:
    text = str(result)  # also of a list, whose entries may fail here
    return result if isinstance(result, list) else text


def text_of(error: BaseException) -> str:
    """Return the message of an exception, or its type if it has none."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # the script's code may raise anything
        return type(error).__name__
