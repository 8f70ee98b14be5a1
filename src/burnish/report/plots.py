"""Plots of a run, as PNG files in ``output_dir``, one per metric that was logged.

The files are ``training_loss.png``, ``training_eval_loss.png``, ``training_eval_accuracy.png``, for preference
training and rollouts ``training_rewards.png``, and for preference training ``training_rewards_accuracies.png`` and
``training_margins.png``. matplotlib is imported when the first plot is drawn and needs no display.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.loop.best import eval_prefix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREY = "#1f6fb4", "#5f6b76"
_COLORS = (_BLUE, "#d1603d", "#3d8f5f", "#8a5fb0", "#b08a1f", _GREY)
TRAINING_LOSS, TRAINING_REWARDS = "training_loss.png", "training_rewards.png"
_REWARDS = {f"rewards/{name}": name for name in ("chosen", "rejected", "margins")}
_SCORES = {f"{name}_reward": name for name in ("max", "mean", "min")}
"""Logged metric -> label of its curve, for pairs and for a reward model."""
_FUNCTION_REWARD = re.compile(r"rewards/(.+)/mean")
"""Logged metric of a reward function."""
_INCHES, _DOTS_PER_INCH = (8.0, 4.8), 120


@dataclass(frozen=True)
class Curve:
    """Values of one metric and the steps at which they were logged."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def plot_history(
    history: Sequence[Mapping[str, Any]], folder: str | Path, title: str = "", eval_sets: Iterable[str] = ("",)
) -> list[Path]:
    """Draw plots of ``history`` (``state.log_history``).

    Args:
        history: log entries.
        folder: output folder.
        title: name of the run, for the title of each plot.
        eval_sets: names of the evaluation sets; "" is the name of a single set.
    Returns:
        The files written; empty if nothing was logged.
    """
    sets = {name: eval_prefix(name) for name in eval_sets}
    losses = {f"{prefix}_loss": name for name, prefix in sets.items()}
    accuracies = {f"{prefix}_accuracy": name for name, prefix in sets.items()}
    plots = (
        (TRAINING_LOSS, "training loss", curves(history, {"loss": ""}), True),
        ("training_eval_loss.png", "evaluation loss", curves(history, losses), False),
        ("training_eval_accuracy.png", "evaluation accuracy", curves(history, accuracies), False),
        (TRAINING_REWARDS, "rewards", curves(history, _REWARDS | _SCORES | _reward_metrics(history, sets)), False),
        ("training_rewards_accuracies.png", "reward accuracy", curves(history, {"rewards/accuracies": ""}), True),
    )
    return [
        _draw(Path(folder) / file, label, title, found, is_noisy) for file, label, found, is_noisy in plots if found
    ]


def _reward_metrics(history: Sequence[Mapping[str, Any]], sets: Mapping[str, str]) -> dict[str, str]:
    """Return the logged rewards of completions with their labels: the sum, that of each of several reward functions,
    and the sum on each evaluation set.

    Args:
        sets: evaluation set -> prefix of its metrics.
    """
    logged = dict.fromkeys(name for row in history for name in row)
    functions = {name: match[1] for name in logged if (match := _FUNCTION_REWARD.fullmatch(name))}
    found = {"reward": "reward"} | (functions if len(functions) > 1 else {})
    return found | {f"{prefix}_reward": f"evaluation {name}".rstrip() for name, prefix in sets.items()}


def plot_margins(margins: Mapping[str, Sequence[float]], folder: str | Path, title: str = "") -> list[Path]:
    """Draw a histogram of reward margins. Pairs left of 0 are ranked incorrectly.

    Args:
        margins: dataset name -> score of the chosen response minus score of the rejected one, for each pair.
        folder: output folder.
        title: name of the run, for the title of the plot.
    Returns:
        The file written; empty if no margin is finite.
    """
    finite = {name: [value for value in of_set if math.isfinite(value)] for name, of_set in margins.items()}
    finite = {name: of_set for name, of_set in finite.items() if of_set}
    if not finite:
        return []
    figure, axes = _figure()
    least, most = (pick(map(pick, finite.values())) for pick in (min, max))
    edges = _bin_edges(min(least, 0.0), max(most, 0.0))
    for (name, of_set), color in zip(finite.items(), cycle(_COLORS)):
        right = sum(value > 0 for value in of_set) / len(of_set)
        label = _in_legend(f"{name}: {right:.0%} of {len(of_set):,} pairs ranked correctly")
        axes.hist(of_set, bins=edges, color=color, alpha=0.55 if len(finite) > 1 else 0.8, label=label)
    axes.axvline(0.0, color=_GREY, linewidth=1.2)
    _style_axes(axes, "margin of each pair", title, has_legend=True, below="score(chosen) - score(rejected)")
    axes.set_ylabel("pairs", color=_GREY)
    return [_save_figure(figure, Path(folder) / "training_margins.png")]


def _bin_edges(least: float, most: float) -> list[float]:
    """Return the edges of about thirty bins, one of which is 0."""
    width = max(most - least, 1e-6) / 30
    first, last = math.floor(least / width), math.ceil(most / width)
    return [width * at for at in range(first, max(last, first + 1) + 1)]


def curves(history: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> list[Curve]:
    """Return a curve of each metric that was logged. Non-finite values leave a gap.

    Args:
        history: log entries.
        metrics: name in the log -> label.
    """
    found = []
    for name, label in metrics.items():
        points = [(row["step"], float(row[name])) for row in history if row.get(name) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            found.append(Curve(label, steps, tuple(v if math.isfinite(v) else math.nan for v in values)))
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """Return an exponential moving average of ``values``. Smoothing grows with their number.

    s_0 = x_0, s_t = w s_(t-1) + (1 - w) x_t, with w = 1.8 (sigmoid(n / 20) - 1/2) for n values: 0 for few values, 0.9
    for hundreds. The average is TensorBoard's, the weight LLaMA-Factory's (``extras/ploting.py``), so that plots of
    both tools are comparable. A gap remains a gap and does not interrupt the average.
    """
    weight = 1.8 * (1 / (1 + math.exp(-len(values) / 20)) - 0.5)
    averages: list[float] = []
    last = math.nan
    for value in values:
        if not math.isnan(value):
            last = value if math.isnan(last) else weight * last + (1 - weight) * value
        averages.append(math.nan if math.isnan(value) else last)
    return averages


def _draw(path: Path, label: str, title: str, found: Sequence[Curve], is_noisy: bool) -> Path:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure()
    for curve, color in zip(found, _COLORS * (1 + len(found) // len(_COLORS)), strict=False):
        if is_noisy:
            _draw_noisy(axes, curve, color)
        else:
            axes.plot(curve.steps, curve.values, color=color, marker="o", markersize=4, label=_in_legend(curve.label))
    _style_axes(axes, label, title, has_legend=is_noisy or len(found) > 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return _save_figure(figure, path)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The figure is created without pyplot, which keeps global state and selects a backend for the whole process.
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():  # about characters missing from matplotlib's font, such as Chinese ones
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, metadata={"Software": "burnish"})
    return path


def _draw_noisy(axes: Axes, curve: Curve, color: str) -> None:
    marker = "o" if len(curve.values) == 1 else ""
    axes.plot(curve.steps, curve.values, color=color, alpha=0.35, linewidth=1, marker=marker, label="original")
    axes.plot(curve.steps, smooth(curve.values), color=color, linewidth=1.8, label="smoothed")


def _in_legend(label: str) -> str:
    """Return a label that begins with a space, since matplotlib leaves out those that begin with an underscore."""
    return f" {label}"


def _style_axes(axes: Axes, label: str, title: str, has_legend: bool, below: str = "step") -> None:
    text = f"{title}: {label}" if title else label  # the name of a folder may contain $
    axes.set_title(text, loc="left", fontsize=11, color="#22272b", parse_math=False)
    axes.set_xlabel(below, color=_GREY)
    axes.grid(True, color="#e3e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GREY, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4cbd1")
    if has_legend:
        for entry in axes.legend(frameon=False).get_texts():
            entry.set_parse_math(False)
