"""Warnings about a run that follow from its curves, such as a rising evaluation loss.

A ``RunWarning`` has a key of ``words/*.json`` and its values, so that it can be translated.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from burnish.report.metadata import EVENTS
from burnish.serve.page.runs.files import checkpoints, tail_lines
from burnish.serve.page.runs.log_columns import Columns
from burnish.serve.page.runs.runs import FoundRun
from burnish.serve.page.words import translator

RISES, NO_BETTER, ZERO_RATES = 2, 3, 3
"""Consecutive evaluations that are each worse than the previous one; evaluations since the best; rows with learning
rate 0."""
Points: TypeAlias = list[tuple[int, float]]
"""(step, value) of the rows that have a finite value, in the order of their steps."""


@dataclass(frozen=True)
class RunWarning:
    key: str
    values: Mapping[str, object]

    def text(self, language: str) -> str:
        return translator(language)(self.key, **self.values)


def warnings_of(run: FoundRun, columns: Columns) -> list[RunWarning]:
    """All warnings about a run in its current state."""
    room = room_for_checkpoints(run.folder) if run.is_alive else None
    rows = run.launch.get("rows")
    counts = rows if isinstance(rows, dict) and all(isinstance(one, int) for one in rows.values()) else {}
    return list(find_warnings(columns, tail_lines(run.folder / EVENTS), run.total, room, counts))


def find_warnings(
    columns: Columns,
    events: Sequence[Mapping[str, Any]] = (),
    total: int = 0,
    room: float | None = None,
    rows: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[RunWarning]:
    """Yield the warnings that follow from the curves.

    Args:
        columns: the logged values by name (``log_columns.py``).
        events: entries of ``events.jsonl``.
        total: number of steps of the run; 0 if unknown.
        room: number of checkpoints that still fit on the disk.
        rows: numbers of examples that were "seen" and "dropped".
    """
    if rows.get("dropped"):
        yield RunWarning("warning_dropped", {"count": rows["dropped"], "seen": rows.get("seen", 0)})
    yield from _evaluation(_points(columns, "eval_loss"))
    odd = [step for name in ("loss", "eval_loss") for step in _non_finite_steps(columns, name)]
    if odd:
        yield RunWarning("warning_not_finite", {"count": len(odd), "step": min(odd)})
    counts = [event.get("count", 1) for event in events if event.get("kind") == "skipped"]
    if skipped := sum(count for count in counts if isinstance(count, int)):
        yield RunWarning("warning_skipped", {"count": skipped})
    zeros = _trailing_zeros(columns, "lr")
    if len(zeros) >= ZERO_RATES and zeros[0] < total:
        yield RunWarning("warning_learning_rate_zero", {"step": zeros[-1]})
    if room is not None and room < 2:
        yield RunWarning("warning_disk", {"count": int(room)})


def _evaluation(points: Points) -> Iterator[RunWarning]:
    """At most one warning: the evaluation loss is rising, or it has not improved for some evaluations."""
    rises = 0
    for (_, before), (_, after) in pairwise(points):
        rises = rises + 1 if after > before else 0
    best = min(points, key=lambda point: point[1], default=(0, 0.0))
    values = {"best": f"{best[1]:.4g}", "at": best[0]}
    if rises >= RISES:
        yield RunWarning("warning_eval_loss_rising", {"step": points[-1 - rises][0], **values})
    elif len([step for step, _ in points if step > best[0]]) >= NO_BETTER:
        yield RunWarning("warning_eval_loss_not_improving", {"steps": points[-1][0] - best[0], **values})


def _points(columns: Columns, name: str) -> Points:
    pairs = zip(columns["step"], columns.get(name, ()), strict=False)
    return [(step, value) for step, value in pairs if step is not None and isinstance(value, int | float)]


def _trailing_zeros(columns: Columns, name: str) -> list[int]:
    """The steps since which a value is 0, the last first. Only the end of a long log is used."""
    pairs = zip(reversed(columns["step"]), reversed(columns.get(name, [])), strict=False)
    numbers = ((step, value) for step, value in pairs if step is not None and isinstance(value, int | float))
    return [step for step, _ in takewhile(lambda pair: pair[1] == 0, numbers)]


def _non_finite_steps(columns: Columns, name: str) -> list[int]:
    """The steps whose value is NaN or infinite."""
    values = columns.get(name, ())
    if str not in set(map(type, values)):
        return []
    pairs = zip(columns["step"], values, strict=False)
    return [step for step, value in pairs if step is not None and isinstance(value, str)]


def room_for_checkpoints(folder: Path) -> float | None:
    """Number of further checkpoints of the size of the latest that fit on the disk; None without a checkpoint."""
    steps = checkpoints(folder)
    if not steps:
        return None
    try:
        size = sum(entry.stat().st_size for entry in os.scandir(folder / f"checkpoint-{steps[-1]}"))
        free = shutil.disk_usage(folder).free
    except OSError:  # it is removed at this moment
        return None
    return free / size if size else math.inf
