"""Length of a record in characters, and the bound on it: a record without end would take time and memory without end.

In: an example, or the columns of a script's row. Refused, by place: more than ``core.bounds.LONGEST_RECORD``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from burnish.config.bounds import LONGEST_RECORD
from burnish.config.errors import Problem
from burnish.config.options import raise_if
from burnish.loop.types import Example, Message

REMEDY = "Split it into several records, for example by chapters or paragraphs."


def num_characters(example: Example) -> int:
    """The characters of all its texts."""
    turns = (part for part in (example.messages, example.chosen, example.rejected, example.other) if part)
    contents = map(texts_in, turns)
    return _num_in([example.text, example.prompt, example.completion, example.system, example.tools, *contents])


def texts_in(part: str | Iterable[Message]) -> list[str]:
    """A text, or the texts of messages: those of their parts that are text."""
    if isinstance(part, str):
        return [part]
    return [piece.value for message in part for piece in message.parts if piece.kind == "text"]


def refuse_endless(examples: Iterable[Example]) -> None:
    """Raise UserError with every example that is too long."""
    sizes = ((example.place, num_characters(example)) for example in examples)
    raise_if([Problem(_too_long(size), where=place, remedy=REMEDY) for place, size in sizes if size > LONGEST_RECORD])


def endless(columns: Iterable[Any]) -> str:
    """The sentence on a script's row whose texts are too long together, and its remedy; "" where they are not."""
    size = _num_in(columns)
    return f"{_too_long(size)} {REMEDY}" if size > LONGEST_RECORD else ""


def _too_long(size: int) -> str:
    return f"expected a record of at most {LONGEST_RECORD:,} characters. Received: {size:,}."


def _num_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else ()
    return sum(map(_num_in, inside))
