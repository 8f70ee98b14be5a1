"""Figures -> ratios, medians and the lines of a table.

In: rounds, each with the figures of every setting by its name, or ``failed`` and why. Out: numbers and text. A ratio is
one of two processes of the same round; where there were several rounds, its median with the least and the greatest.
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
"""The name of a setting -> what stands in its line."""
GB = 1e9
PEERS = {"TRL": "trl", "transformers": "transformers", "LLaMA-Factory": "llamafactory"}


def speed(figures: Figures) -> float:
    return float(figures["labels"] / figures["cpu_s"])


def peak(figures: Figures) -> float:
    return float(figures["peak_bytes"])


def named(name: str) -> Value:
    return lambda figures: float(figures[name])


def middle(each: Sequence[Figures], value: Value) -> float:
    return statistics.median(map(value, each))


def whole(rounds: Sequence[Round], *names: str) -> list[Round]:
    """The rounds in which none of these failed."""
    return [found for found in rounds if all("failed" not in found.get(name, {"failed": ""}) for name in names)]


def figures_of(rounds: Sequence[Round], name: str) -> list[Figures]:
    return [found[name] for found in whole(rounds, name)]


def ratios(rounds: Sequence[Round], name: str, other: str, value: Value) -> str:
    """The median of one to the other, round by round, with the least and the greatest."""
    found = [value(each[name]) / value(each[other]) for each in whole(rounds, name, other)]
    if not found:
        return "-"
    spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}{spread}"


def fastest(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    names = [s.name for s in settings if s.library == library and whole(rounds, s.name)]
    return max(names, key=lambda name: middle(figures_of(rounds, name), speed), default=None)


def leanest(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    names = [s.name for s in settings if s.library == library and whole(rounds, s.name)]
    return min(names, key=lambda name: middle(figures_of(rounds, name), peak), default=None)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(rounds: Sequence[Round], columns: Mapping[str, Cell], first: str = "") -> str:
    """A line per setting of the first round; one that never ran says so.

    Args:
        columns: by title.
        first: the title above the names.
    """
    lines = [line([first, *columns]), f"|---|{'---:|' * len(columns)}"]
    for name in rounds[0]:
        ran = bool(figures_of(rounds, name))
        lines.append(line([name, *((cell(name) if ran else "failed") for cell in columns.values())]))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def amount(rounds: Sequence[Round], value: Value | str, form: str = ".2f", unit: float = 1.0) -> Cell:
    """The median of a value of each setting, or of the figure of that name; "-" where it has none."""

    def cell(name: str) -> str:
        each = figures_of(rounds, name)
        if isinstance(value, str):
            each = [figures for figures in each if value in figures]
        found = named(value) if isinstance(value, str) else value
        return format(middle(each, found) / unit, form) if each else "-"

    return cell


def beside(rounds: Sequence[Round], ours: str, value: Value) -> Cell:
    """The ratio of ``ours`` to each setting; "-" for what is burnish's too."""
    return lambda name: "-" if name.startswith("burnish") else ratios(rounds, ours, name, value)
