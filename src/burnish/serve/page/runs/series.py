"""The curves of a run: all rows as columns, a downsampled version that keeps spikes, or a sparkline.

In: a run's folder. Out: columns as ``log_columns`` has them, and the points of an SVG line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from burnish.serve.page.runs.files import LOG, foreign_row, history, tail_lines
from burnish.serve.page.runs.log_columns import MOST_ROWS, Columns, columns_of, is_evaluation, log_columns
from burnish.utils.files import open_regular_file_inside

_LONG_LOG_BYTES, _PLACES, _LOOK_BYTES = 128 * 1024, 64, 4096


def series(folder: Path) -> tuple[Columns, int]:
    """All rows of a run as columns, and the offset in its log."""
    columns, offset = log_columns(folder / LOG)
    if "grad_norm" in columns:
        return columns, offset
    own = columns_of(history(folder)[-MOST_ROWS:])
    if not columns["step"]:
        return own, offset
    if "grad_norm" in own:  # LLaMA-Factory's log has no norms; its state does
        norms = dict(zip(own["step"], own["grad_norm"], strict=True))
        columns = {**columns, "grad_norm": [norms.get(step) for step in columns["step"]]}
    return columns, offset


def downsample(columns: Columns, points: int) -> Columns:
    """Downsample to about ``points`` rows: the first and last row of each bucket, the rows with the minimum and
    maximum of a column, and all rows of evaluations."""
    count = len(columns["step"])
    if count <= points:
        return columns
    evaluations = [values for name, values in columns.items() if is_evaluation(name)]
    indices = {at for values in evaluations for at, value in enumerate(values) if value is not None}
    buckets = max(1, points // 4)
    for bucket in range(buckets):
        begin, end = bucket * count // buckets, (bucket + 1) * count // buckets
        if begin == end:
            continue
        indices |= {begin, end - 1}
        for name in ("loss", "grad_norm"):
            numbers = [(v, i) for i in range(begin, end) if isinstance(v := _at(columns, name, i), int | float)]
            odd = [i for i in range(begin, end) if isinstance(_at(columns, name, i), str)]
            indices |= {min(numbers)[1], max(numbers)[1]} if numbers else set()
            indices.update(odd[:1])
    return {name: [values[index] for index in sorted(indices)] for name, values in columns.items()}


def _at(columns: Columns, name: str, index: int) -> Any:
    return columns[name][index] if name in columns else None


def line_chart(columns: Columns, width: int = 120, height: int = 28) -> str:
    """The points of a sparkline of the loss for an SVG ``polyline``; "" with fewer than two points. Its height spans
    at least a quarter of the largest value, so that noise stays small."""
    values = [value for value in columns.get("loss", ()) if isinstance(value, int | float)]
    if len(values) < 2:
        return ""
    step = max(1, len(values) // 64)
    shown = [*values[::step], values[-1]]
    low, high = min(shown), max(shown)
    span = max(high - low, 0.25 * max(abs(low), abs(high)))
    low -= (span - (high - low)) / 2
    scale = (height - 4) / span if span else 0
    across = width / (len(shown) - 1)
    return " ".join(f"{i * across:.1f},{height - 2 - (value - low) * scale:.1f}" for i, value in enumerate(shown))


def small_line_chart(folder: Path) -> str:
    """``line_chart`` for a list of runs. Of a long log, only rows at some positions of the file are read."""
    path = folder / LOG
    size = path.stat().st_size if path.is_file() else 0
    if size <= _LONG_LOG_BYTES:
        return line_chart(series(folder)[0])
    rows: list[Mapping[str, Any]] = []
    with suppress(OSError), open_regular_file_inside(path) as file:
        for place in range(_PLACES):
            file.seek(place * size // _PLACES)
            lines = map(foreign_row, file.read(_LOOK_BYTES).split(b"\n")[1 if place else 0 : -1])
            rows += [row for row in lines if row is not None and "loss" in row][:1]
    rows += [row for row in tail_lines(path, _LOOK_BYTES) if "loss" in row][-1:]
    return line_chart(columns_of(rows))
