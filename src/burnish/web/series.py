"""The rows of a run's log as columns: all of them, those since a place in the file, or few that show every spike.

In: a run's folder. Out: ``{"step": [1, 2], "loss": [2.3, 2.1], ...}``, and the offset up to which the file was read.
NaN and infinity travel as the texts "NaN" and "Infinity": JSON has no such numbers, and a gap would hide them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.web.runs import LOG, history, whole_row

COLUMNS = ("step", "loss", "eval_loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "epoch", "time", "tokens")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "step": ("current_steps", "step"), "loss": ("loss",), "eval_loss": ("eval_loss",), "lr": ("lr", "learning_rate"),
    "grad_norm": ("grad_norm",), "tokens_per_s": ("throughput",), "memory_bytes": ("memory_bytes",),
    "epoch": ("epoch",), "time": ("time",), "tokens": ("total_tokens", "num_tokens", "num_input_tokens_seen"),
}  # fmt: skip
MOST_ROWS = 200_000
MOST_BYTES = 64 * 2**20
Columns = dict[str, list[Any]]


def rows_since(path: Path, offset: int, most_bytes: int = MOST_BYTES) -> tuple[list[dict[str, Any]], int]:
    """The whole rows behind ``offset``, and the offset behind them. A row that is being written is left for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(most_bytes)
    except OSError:
        return [], offset
    end = data.rfind(b"\n") + 1
    rows = [row for line in data[:end].split(b"\n") if line and (row := whole_row(line)) is not None]
    return rows, offset + end


def series(folder: Path) -> tuple[Columns, int]:
    """All rows of a run as columns, and the offset in its log."""
    rows, offset = rows_since(folder / LOG, 0)
    own = history(folder) if not any("grad_norm" in row for row in rows) else []
    if not rows:
        rows = own
    elif own:  # LLaMA-Factory's log has no norms; its state does
        norms = {row["step"]: row["grad_norm"] for row in own if "grad_norm" in row and "step" in row}
        rows = [{**row, "grad_norm": norms.get(row.get("current_steps"))} for row in rows]
    return columns_of(rows[-MOST_ROWS:]), offset


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns of one length, null where a row says nothing; rows without any measure are left out."""
    kept = [row for row in rows if any(name in row for name in ("loss", "eval_loss"))]
    found: Columns = {}
    for column in COLUMNS:
        values = [_value(row, _KEYS[column]) for row in kept]
        if column == "step" or any(value is not None for value in values):
            found[column] = values
    return found


def _value(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if value in ("NaN", "Infinity", "-Infinity") else None
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def thinned(columns: Columns, points: int) -> Columns:
    """At most about ``points`` rows: of each bucket the first, the last, and those where a column is least and most,
    so that no spike is lost; and every row of an evaluation."""
    count = len(columns["step"])
    if count <= points:
        return columns
    kept: set[int] = {index for index, value in enumerate(columns.get("eval_loss", ())) if value is not None}
    buckets = max(1, points // 4)
    for bucket in range(buckets):
        begin, end = bucket * count // buckets, (bucket + 1) * count // buckets
        if begin == end:
            continue
        kept |= {begin, end - 1}
        for name in ("loss", "grad_norm"):
            numbers = [(v, i) for i in range(begin, end) if isinstance(v := _at(columns, name, i), int | float)]
            odd = [i for i in range(begin, end) if isinstance(_at(columns, name, i), str)]
            kept |= {min(numbers)[1], max(numbers)[1]} if numbers else set()
            kept.update(odd[:1])
    return {name: [values[index] for index in sorted(kept)] for name, values in columns.items()}


def _at(columns: Columns, name: str, index: int) -> Any:
    return columns[name][index] if name in columns else None


def picture(columns: Columns, width: int = 120, height: int = 28) -> str:
    """The points of a small line of the loss, for an SVG ``polyline``; "" where there are fewer than two."""
    values = [value for value in columns.get("loss", ()) if isinstance(value, int | float)]
    if len(values) < 2:
        return ""
    step = max(1, len(values) // 64)
    shown = [*values[::step], values[-1]]
    low, high = min(shown), max(shown)
    scale = (height - 4) / (high - low) if high > low else 0
    across = width / (len(shown) - 1)
    return " ".join(f"{i * across:.1f},{height - 2 - (value - low) * scale:.1f}" for i, value in enumerate(shown))
