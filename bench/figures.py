"""Compute ratios and medians of measurements and format tables.

A round maps the name of a setting to its measurements, or to ``failed`` and a message. A ratio compares two processes
of the same round; with several rounds, it is the median with minimum and maximum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from settings import Setting

Figures: TypeAlias = dict[str, Any]
Round: TypeAlias = dict[str, Figures]
Value: TypeAlias = Callable[[Figures], float]
Cell: TypeAlias = Callable[[str], str]
"""Formats the cell of a setting, given its name."""
GB = 1e9
PEERS = {"TRL": "trl", "transformers": "transformers", "LLaMA-Factory": "llamafactory"}


def speed(figures: Figures) -> float:
    """Return labels per processor second."""
    return float(figures["labels"] / figures["cpu_s"])


def peak(figures: Figures) -> float:
    """Return the peak memory in bytes."""
    return float(figures["peak_bytes"])


def measurement(name: str) -> Value:
    """Return a function that returns the measurement ``name``."""
    return lambda figures: float(figures[name])


def median_of(each: Sequence[Figures], value: Value) -> float:
    """Return the median of a value."""
    return statistics.median(map(value, each))


def successful_rounds(rounds: Sequence[Round], *names: str) -> list[Round]:
    """Return the rounds in which none of these settings failed."""
    return [results for results in rounds if all("failed" not in results.get(name, {"failed": ""}) for name in names)]


def figures_of(rounds: Sequence[Round], name: str) -> list[Figures]:
    """Return the measurements of a setting in all rounds in which it did not fail."""
    return [results[name] for results in successful_rounds(rounds, name)]


def ratios(rounds: Sequence[Round], name: str, other: str, value: Value) -> str:
    """Return the median ratio of one setting to another, with minimum and maximum over the rounds."""
    values = [value(each[name]) / value(each[other]) for each in successful_rounds(rounds, name, other)]
    if not values:
        return "-"
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def fastest(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    """Return the setting of a library with the highest rate, or None."""
    names = [s.name for s in settings if s.library == library and successful_rounds(rounds, s.name)]
    return max(names, key=lambda name: median_of(figures_of(rounds, name), speed), default=None)


def least_memory(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    """Return the setting of a library with the smallest peak memory, or None."""
    names = [s.name for s in settings if s.library == library and successful_rounds(rounds, s.name)]
    return min(names, key=lambda name: median_of(figures_of(rounds, name), peak), default=None)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(rounds: Sequence[Round], columns: Mapping[str, Cell], first: str = "") -> str:
    """Return a Markdown table with a line for each setting of the first round; settings that always failed are marked.

    Args:
        columns: title -> function that formats a cell.
        first: title of the column of names.
    """
    lines = [table_line([first, *columns]), f"|---|{'---:|' * len(columns)}"]
    for name in rounds[0]:
        is_measured = bool(figures_of(rounds, name))
        lines.append(table_line([name, *((cell(name) if is_measured else "failed") for cell in columns.values())]))
    return "\n".join(lines)


def table_line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def median_cell(rounds: Sequence[Round], value: Value | str, format_spec: str = ".2f", unit: float = 1.0) -> Cell:
    """Return a function that formats the median of a value, given as a function or by name; "-" if it is missing."""

    def cell(name: str) -> str:
        each = figures_of(rounds, name)
        if isinstance(value, str):
            each = [figures for figures in each if value in figures]
        getter = measurement(value) if isinstance(value, str) else value
        return format(median_of(each, getter) / unit, format_spec) if each else "-"

    return cell


def ratio_cell(rounds: Sequence[Round], ours: str, value: Value) -> Cell:
    """Return a function that formats the ratio of ``ours`` to a setting; "-" for burnish's settings."""
    return lambda name: "-" if name.startswith("burnish") else ratios(rounds, ours, name, value)
