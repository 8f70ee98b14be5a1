"""Length of a record in characters, and its upper bound: an endless record would take unbounded time and memory.

Records of more than ``config.bounds.LONGEST_RECORD`` characters are refused, with the place of the record.
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
    """Return the total number of characters in the texts of an example."""
    texts = [example.text, example.prompt, example.completion, example.system, example.tools]
    for part in (example.messages, example.chosen, example.rejected, example.other):
        texts += texts_in(part) if part else ()
    return sum(len(text) for text in texts if text)


def texts_in(part: str | Iterable[Message]) -> list[str]:
    """Return a list with the text, or the texts of the text parts of messages."""
    if isinstance(part, str):
        return [part]
    return [text for message in part for text in message.texts]


def check_record_lengths(examples: Iterable[Example]) -> None:
    """Raise UserError with every example that is too long."""
    sizes = ((example.place, num_characters(example)) for example in examples)
    raise_if([Problem(_too_long(size), where=place, remedy=REMEDY) for place, size in sizes if size > LONGEST_RECORD])


def record_length_error(columns: Iterable[Any]) -> str:
    """Return the error message for a script's row whose texts are too long in total, or ""."""
    size = _num_in(columns)
    return f"{_too_long(size)} {REMEDY}" if size > LONGEST_RECORD else ""


def _too_long(size: int) -> str:
    return f"expected a record of at most {LONGEST_RECORD:,} characters. Received: {size:,}."


def _num_in(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else ()
    return sum(map(_num_in, inside))
