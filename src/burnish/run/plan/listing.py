"""The list of options as text, for ``--help``: by component, each with default, unit, bounds and help."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

from burnish.config.errors import did_you_mean
from burnish.config.options import OptionSpec, specs, unit_after

_NAME_WIDTH = 34


def list_options(options: type, word: str = "", beginnings: Sequence[str] = ("",), unread: Sequence[str] = ()) -> str:
    """Return the listing of all options, or of those whose name, help or aliases contain ``word``.

    Args:
        options: options class.
        word: filter, or "".
        beginnings: prefixes of the options to list. Default: all.
        unread: names of options to omit.
    """
    part = word.lstrip("-").replace("-", "_").lower()
    matching = [
        spec
        for name, spec in specs(options).items()
        if name.startswith(tuple(beginnings))
        and name not in unread
        and any(part in text.lower() for text in (spec.name, spec.help, *spec.aliases))
    ]
    if not matching:
        return f'No option matches "{word}".{did_you_mean(word, specs(options))}\n'
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines: list[str] = []
    for group, members in groupby(matching, key=lambda spec: spec.group):
        lines += [f"{component(group)}", *(line for spec in members for line in _entry(spec, width)), ""]
    return "\n".join(lines) + "\n"


def component(group: type) -> str:
    """Return the heading of an option group: the first line of its docstring, without the full stop."""
    return (group.__doc__ or group.__name__).strip().splitlines()[0].rstrip(".")


def _entry(spec: OptionSpec, width: int) -> Iterator[str]:
    facts = "; ".join(_facts(spec))
    text = f"{spec.help} ({facts})" if facts else spec.help
    body = textwrap.wrap(text, max(width - _NAME_WIDTH, 30), break_long_words=False, break_on_hyphens=False)
    head = f"  --{spec.name}"
    if len(head) < _NAME_WIDTH:
        yield head.ljust(_NAME_WIDTH) + body.pop(0)
    else:
        yield head
    yield from (" " * _NAME_WIDTH + line for line in body)


def _facts(spec: OptionSpec) -> Iterator[str]:
    """Yield facts about an option: ``default 8 rows``, ``one of full, freeze, lora``, ``at least 1``, ``also:
    alias``."""
    if spec.default is not None:
        yield f"default {format_value(spec.default)}{' ' + spec.unit if spec.unit else ''}"
    if spec.choices:
        yield f"one of {', '.join(map(format_value, spec.choices))}"
    if bounds := shown_bounds(spec):
        yield bounds
    if spec.aliases:
        yield f"also: {', '.join(spec.aliases)}"
    if spec.ignored:
        yield f"accepted but has no effect: {spec.ignored.rstrip('.')}"


def shown_bounds(spec: OptionSpec) -> str:
    """Return the bounds of an option, such as ``at least 1``, or "". The unit is appended if there is no default."""
    prefixes = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(prefixes[name], bound) for name, bound in spec.bounds.items() if bound is not None and isfinite(bound)]
    text = " and ".join(f"{prefix} {format_value(bound)}" for prefix, bound in bounds)
    return f"{text} {unit_after(bounds[-1][1], spec.unit)}".rstrip() if bounds and spec.default is None else text


def format_value(value: Any) -> str:
    """Return a value as it would be written in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    return f'"{value}"' if value == "" else str(value)
