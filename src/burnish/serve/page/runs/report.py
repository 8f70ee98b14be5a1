"""A report of one run as a single HTML file without scripts, for sharing.

In: a run and its columns. Out: the values of ``pages/report.html``: metrics, curves as SVG, options, warnings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.serve.page.runs.log_columns import Columns

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 640, 220, 56, 20, 24
_MOST_POINTS = 400
_CURVES = {
    "loss": "loss", "reward": "reward", "eval_loss": "eval_loss", "rewards/accuracies": "accuracies",
    "accuracy": "accuracies", "rewards/margins": "margins", "margin": "margins", "kl": "kl", "objective/kl": "kl",
    "entropy": "entropy", "ppo/entropy": "entropy", "completions/mean_length": "lengths", "lr": "lr",
    "grad_norm": "grad_norm",
}  # fmt: skip
"""Column -> key of its name in ``words/*.json``."""


@dataclass(frozen=True)
class ReportCurve:
    """One chart: the key of its name, the points of its line in a box of ``WIDTH`` x ``HEIGHT``, and the marks of its
    axes."""

    name: str
    points: str
    y_marks: Sequence[tuple[float, str]]
    x_marks: Sequence[tuple[float, str]]


def curves(columns: Columns) -> Iterator[ReportCurve]:
    """The charts of a report, for the columns that a run has."""
    for name in _CURVES:
        steps = columns["step"]
        pairs = [
            (step, value)
            for step, value in zip(steps, columns.get(name, ()), strict=False)
            if isinstance(value, int | float) and isinstance(step, int | float)
        ]
        if len(pairs) > 1:
            yield _curve(_CURVES[name], pairs)


def _curve(name: str, pairs: Sequence[tuple[float, float]]) -> ReportCurve:
    every = max(1, len(pairs) // _MOST_POINTS)
    shown = [*pairs[::every], pairs[-1]]
    values = [value for _, value in shown]
    low, high = min(values), max(values)
    span = max(high - low, 0.25 * max(abs(low), abs(high))) or 1.0
    low -= (span - (high - low)) / 2
    first, last = shown[0][0], shown[-1][0]
    across = (WIDTH - LEFT - RIGHT) / ((last - first) or 1)
    up = (HEIGHT - BOTTOM - 8) / span

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + (step - first) * across, HEIGHT - BOTTOM - (value - low) * up

    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*pair) for pair in shown))
    y_marks = [(place(first, value)[1], f"{value:g}") for value in round_values(low, low + span)]
    x_marks = [(place(step, low)[0], f"{step:g}") for step in round_values(first, last) if step == int(step)]
    return ReportCurve(name, points, y_marks, x_marks)


def round_values(low: float, high: float, at_least: int = 3) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``: at least 3, and at most 8."""
    if not high > low:
        return [low]
    exponent = math.floor(math.log10((high - low) / at_least))
    interval = max(
        factor * 10.0**exponent
        for factor in (1, 2, 5)
        if factor * 10.0**exponent * at_least <= (high - low) * (1 + 1e-9)
    )
    first, last = math.ceil(low / interval - 1e-9), math.floor(high / interval + 1e-9)
    return [float(f"{number * interval:.12g}") for number in range(first, last + 1)]


def table(text: str) -> list[tuple[str, Any]]:
    """The options of a ``run.yaml`` as pairs."""
    lines = (line.partition(": ") for line in text.splitlines() if not line.startswith(("#", " ", "-")))
    return [(name, _plain(value.partition("  # ")[0])) for name, colon, value in lines if colon]


def _plain(value: str) -> str:
    """A value of YAML as a person writes it: ``10.0`` as 10, ``["a", "b"]`` as a, b."""
    if value.startswith("[") and value.endswith("]"):
        return value[1:-1].replace('"', "")
    return value.removesuffix(".0") if value.removesuffix(".0").isdigit() else value.strip('"')
