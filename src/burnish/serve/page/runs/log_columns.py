"""A run's log as columns, for a few new lines or a hundred thousand.

In: ``trainer_log.jsonl``, which a run may be writing. Out: ``{"step": [1, 2], "loss": [2.3, 2.1], ...}``, and the
    offset after the last complete line. NaN and infinity become the strings "NaN" and "Infinity", because JSON has no
    such numbers and null would hide them.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from burnish.loop.state import RATES
from burnish.serve.page.runs.files import foreign_row
from burnish.utils.files import open_regular_file_inside

_KEYS: Mapping[str, tuple[str, ...]] = {
    "step": ("current_steps", "step"), "loss": ("loss",), "eval_loss": ("eval_loss",), "lr": ("lr", "learning_rate"),
    "grad_norm": ("grad_norm",), "rate": ("tokens_per_second",),
    "tokens_per_s": ("throughput",), "memory_bytes": ("memory_bytes",),
    "epoch": ("epoch",), "time": ("time",), "tokens": ("total_tokens", "num_tokens", "num_input_tokens_seen"),
}  # fmt: skip
_KNOWN = {"total_steps", "percentage", "elapsed_time", "remaining_time", "step_seconds", "total_flos", "waiting",
          "accuracy"}.union(*_KEYS.values())  # fmt: skip
_METRIC = re.compile(r"[A-Za-z][\w./@-]{0,63}")
_MOST_METRICS = 80
MOST_ROWS = 200_000
MOST_BYTES, _PIECE_BYTES = 64 * 2**20, 2**20
_LONG_LOG_BYTES, _TAIL_BYTES, _KEPT_S = 4 * 2**20, 1024, 10.0
_LARGEST = 1e300
Columns: TypeAlias = dict[str, list[Any]]


def rows_since(path: Path, offset: int, most_bytes: int = MOST_BYTES) -> tuple[list[dict[str, Any]], int]:
    """The complete rows after ``offset``, and the offset after them."""
    data = _whole_lines(path, offset, most_bytes)
    rows = (foreign_row(line) for line in data.split(b"\n") if line)
    return [row for row in rows if row is not None], offset + len(data)


def _whole_lines(path: Path, offset: int, most_bytes: int) -> bytes:
    try:
        with open_regular_file_inside(path) as file:
            file.seek(offset)
            data = file.read(most_bytes)
    except OSError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _rows_of(data: bytes) -> list[dict[str, Any]]:
    """The objects on complete lines. They are parsed at once, which takes two thirds of the time, or one by one if a
    line is damaged."""
    lines = [line for line in data.split(b"\n") if line]
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(row.__class__ is dict for row in rows):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return [row for row in map(foreign_row, lines) if row is not None]


# --- rows as columns --------------------------------------------------------------------------------------------------


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns of equal length, with null for missing values; rows without metrics are omitted."""
    selected = [row for row in rows if "loss" in row or any(map(is_evaluation, row))]
    found: Columns = {}
    for column, keys in {**_KEYS, **_metrics(selected)}.items():
        values = _column(selected, keys)
        if column == "step" or any(value is not None for value in values):
            found[column] = values
    return found


def is_evaluation(name: str) -> bool:
    """Whether a metric is the loss of an evaluation: ``eval_loss``, or ``eval_<set>_loss`` for one of several sets."""
    return name.startswith("eval_") and name.endswith("_loss")


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Columns of the other metrics, by their names in the log: ``rewards/margins``, ``eval_kl``.
    LLaMA-Factory's ``accuracy`` is TRL's ``rewards/accuracies``, except in the log of a reward model, which also has
    ``margin``."""
    names: set[str] = set().union(*rows)
    found = sorted(name for name in names - _KNOWN if _METRIC.fullmatch(name) and not name.endswith(RATES))
    if "accuracy" in names:
        found.append("accuracy" if "rewards/accuracies" not in names and "margin" in names else "rewards/accuracies")
    return {
        name: (name, "accuracy") if name == "rewards/accuracies" else (name,)
        for name in dict.fromkeys(found[:_MOST_METRICS])
    }


def _column(rows: Sequence[Mapping[str, Any]], keys: tuple[str, ...]) -> list[Any]:
    """One value per row. If the sum is finite, the values are not checked individually."""
    values: list[Any] = [row.get(keys[0]) for row in rows]
    missing = [index for index, value in enumerate(values) if value is None] if None in values else []
    for index in missing:
        values[index] = next((v for key in keys[1:] if (v := rows[index].get(key)) is not None), None)
    if set(map(type, values)) <= {int, float, type(None)}:
        with suppress(OverflowError):
            if math.isfinite(sum(value for value in values if value is not None)):
                return values
    return list(map(_json_number, values))


def _json_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else None
    if value != value:
        return "NaN"
    return value if abs(value) < _LARGEST else "Infinity" if value > 0 else "-Infinity"


def _join_columns(pieces: Sequence[Columns]) -> Columns:
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {name: [v for p in pieces for v in p.get(name) or [None] * len(p["step"])] for name in names}


# --- a whole log ------------------------------------------------------------------------------------------------------


def log_columns(path: Path) -> tuple[Columns, int]:
    """All rows of a log as columns, and the offset up to which they were read.

    They are read in chunks, because a hundred thousand rows as objects would take a quarter of a gigabyte. The columns
    of a long log are kept for some seconds: the page of a run and its script ask for them one after the other.
    """
    kept = _kept if _kept is not None and _kept.is_of(path) else _KeptColumns(path)
    pieces, offset = [kept.columns], kept.offset
    while offset < MOST_BYTES and (data := _whole_lines(path, offset, _PIECE_BYTES)):
        pieces.append(columns_of(_rows_of(data)))
        offset += len(data)
    columns = {name: values[-MOST_ROWS:] for name, values in _join_columns(pieces).items()}
    if offset > _LONG_LOG_BYTES:
        _keep(_KeptColumns(path, columns, offset, _tail(path, offset)))
    return columns, offset


@dataclass(frozen=True)
class _KeptColumns:
    """Columns of the first ``offset`` bytes of a log, which end with ``tail``."""

    path: Path
    columns: Columns = field(default_factory=lambda: {"step": []})
    offset: int = 0
    tail: bytes = b""

    def is_of(self, path: Path) -> bool:
        """Whether the log still begins with these rows. A resumed run removes rows after its checkpoint."""
        return path == self.path and _tail(path, self.offset) == self.tail


_kept: _KeptColumns | None = None


def _keep(columns: _KeptColumns) -> None:
    """Keep the columns of one log for ``_KEPT_S`` seconds."""
    global _kept
    _kept = columns
    Thread(target=_forget_later, args=[columns], daemon=True).start()


def _forget_later(columns: _KeptColumns) -> None:
    global _kept
    time.sleep(_KEPT_S)
    if _kept is columns:
        _kept = None


def _tail(path: Path, offset: int) -> bytes:
    """The last bytes before an offset; they contain the time of the last row."""
    try:
        with open_regular_file_inside(path) as file:
            file.seek(max(0, offset - _TAIL_BYTES))
            return file.read(min(offset, _TAIL_BYTES))
    except OSError:
        return b""
