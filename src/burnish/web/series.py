"""The rows of a run's log as columns: all of them, those since a place in the file, or few that show every spike.

In: a run's folder. Out: ``{"step": [1, 2], "loss": [2.3, 2.1], ...}``, and the offset up to which the file was read.
NaN and infinity travel as the texts "NaN" and "Infinity": JSON has no such numbers, and a gap would hide them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from burnish.web.runs import LOG, history, tail_lines, whole_row

COLUMNS = ("step", "loss", "eval_loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "epoch", "time", "tokens")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "step": ("current_steps", "step"), "loss": ("loss",), "eval_loss": ("eval_loss",), "lr": ("lr", "learning_rate"),
    "grad_norm": ("grad_norm",), "tokens_per_s": ("throughput",), "memory_bytes": ("memory_bytes",),
    "epoch": ("epoch",), "time": ("time",), "tokens": ("total_tokens", "num_tokens", "num_input_tokens_seen"),
}  # fmt: skip
MOST_ROWS = 200_000
MOST_BYTES, _PIECE_BYTES = 64 * 2**20, 2**20
_LONG_LOG_BYTES, _PLACES, _LOOK_BYTES = 128 * 1024, 64, 4096
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
    return _rows_of(data[:end]), offset + end


def _rows_of(data: bytes) -> list[dict[str, Any]]:
    """The objects on whole lines: all at once, in two thirds of the time, or one by one where a line is damaged."""
    lines = [line for line in data.split(b"\n") if line]
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(row.__class__ is dict for row in rows):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return [row for row in map(whole_row, lines) if row is not None]


def series(folder: Path) -> tuple[Columns, int]:
    """All rows of a run as columns, which nobody may change, and the offset in its log."""
    columns, offset = _logged(folder / LOG, *size_and_time(folder / LOG))
    if "grad_norm" in columns:
        return columns, offset
    own = columns_of(history(folder)[-MOST_ROWS:])
    if not columns["step"]:
        return own, offset
    if "grad_norm" in own:  # LLaMA-Factory's log has no norms; its state does
        norms = dict(zip(own["step"], own["grad_norm"], strict=True))
        columns = {**columns, "grad_norm": [norms.get(step) for step in columns["step"]]}
    return columns, offset


@lru_cache(maxsize=2)
def _logged(path: Path, size: int, changed_ns: int) -> tuple[Columns, int]:
    """The columns of a log as it is. A page asks twice for them: for its HTML, and for its script. Rows are read a
    piece at a time, since a hundred thousand of them as objects would take a quarter of a gigabyte."""
    pieces, offset, end = [], 0, -1
    while offset != end and offset < MOST_BYTES:
        end = offset
        rows, offset = rows_since(path, offset, _PIECE_BYTES)
        pieces.append(columns_of(rows))
    return {name: values[-MOST_ROWS:] for name, values in _joined(pieces).items()}, offset


def _joined(pieces: Sequence[Columns]) -> Columns:
    names = [name for name in COLUMNS if any(name in piece for piece in pieces)]
    return {name: [v for p in pieces for v in p.get(name) or [None] * len(p["step"])] for name in names}


def size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns of one length, null where a row says nothing; rows without any measure are left out."""
    kept = [row for row in rows if "loss" in row or "eval_loss" in row]
    found: Columns = {}
    for column in COLUMNS:
        values = _column(kept, _KEYS[column])
        if column == "step" or any(value is not None for value in values):
            found[column] = values
    return found


def _column(rows: Sequence[Mapping[str, Any]], keys: tuple[str, ...]) -> list[Any]:
    """One value per row. Numbers whose sum is finite, as nearly all are, pass without a look at each of them."""
    values: list[Any] = [row.get(keys[0]) for row in rows]
    missing = [index for index, value in enumerate(values) if value is None] if None in values else []
    for index in missing:
        values[index] = next((v for key in keys[1:] if (v := rows[index].get(key)) is not None), None)
    if set(map(type, values)) <= {int, float, type(None)}:
        with suppress(OverflowError):
            if math.isfinite(sum(value for value in values if value is not None)):
                return values
    return list(map(_as_said, values))


def _as_said(value: Any) -> Any:
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


def small_picture(folder: Path) -> str:
    """``picture`` for a list of runs: of a long log, rows at some places of the file, so that it is not read whole."""
    path, (size, _) = folder / LOG, size_and_time(folder / LOG)
    if size <= _LONG_LOG_BYTES:
        return picture(series(folder)[0])
    rows: list[Mapping[str, Any]] = []
    with suppress(OSError), path.open("rb") as file:
        for place in range(_PLACES):
            file.seek(place * size // _PLACES)
            lines = map(whole_row, file.read(_LOOK_BYTES).split(b"\n")[1 if place else 0 : -1])
            rows += [row for row in lines if row is not None and "loss" in row][:1]
    rows += [row for row in tail_lines(path, _LOOK_BYTES) if "loss" in row][-1:]
    return picture(columns_of(rows))
