"""Untrusted files of runs: strictly parsed JSON, JSON lines, and the logs of other trainers.

In: a run's folder. Out: plain values; nothing if a file is missing, truncated, too large, or a link out of the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from burnish.loop.state import STATE_NAME
from burnish.report.jsonl import LOG_NAME
from burnish.report.metadata import RUN_YAML
from burnish.utils.files import open_regular_file_inside

LOG, STATE = LOG_NAME, STATE_NAME
_TAIL_BYTES = 64 * 1024


def object_in(path: Path) -> dict[str, Any]:
    """A JSON object; empty if it is missing or truncated."""
    try:
        if path.stat().st_size > 2**20:
            return {}
        with open_regular_file_inside(path) as file:
            value = foreign_json(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def run_yaml_text(folder: Path, most: int = 2**16) -> str:
    """The text of a run's ``run.yaml``; "" if there is none in its folder."""
    try:
        with open_regular_file_inside(folder / RUN_YAML) as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def foreign_json(text: bytes) -> Any:
    """Parse untrusted JSON. Numbers that are not JSON, or larger than a float, become strings: ``"NaN"``,
    ``"Infinity"``. Python's parser would return floats that other JSON parsers reject.

    Raises:
        ValueError, RecursionError: for text that is not JSON.
    """
    if _ODD_NUMBER.search(text) is None:
        return json.loads(text)  # ten times as fast
    return json.loads(text, parse_constant=str, parse_float=_finite, parse_int=_finite)


_ODD_NUMBER = re.compile(rb"(?<![.0-9])[0-9]{17}|[0-9][eE][+-]?[0-9]{3}|NaN|Infinity")
"""Found in any text with a number that is not finite or has many digits."""


def _finite(text: str) -> int | float | str:
    if len(text) < 17 and text.lstrip("-").isdecimal():
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"


def foreign_row(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None for anything else."""
    try:
        row = foreign_json(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_broken(path: Path) -> bool:
    """Whether a file is invalid: not a regular file, or not JSON of the expected form."""
    if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
        return False
    try:
        with open_regular_file_inside(path) as file:
            text = file.read(2**20)
    except OSError:
        return True
    if path.name == LOG:
        return b"\n" in text and foreign_row(text.split(b"\n")[0]) is None
    found = foreign_row(text)
    return found is None or (path.name == STATE and not isinstance(found.get("log_history"), list))


def has_unreadable_history(path: Path) -> bool:
    """Whether a state file of another trainer has entries in its log, of which none can be read."""
    try:
        with open_regular_file_inside(path) as file:
            found = foreign_row(file.read(2**20))
    except OSError:
        return False
    rows = found.get("log_history") if found else None
    return isinstance(rows, list) and bool(rows)


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The objects on the last complete lines of a file of any size."""
    try:
        with open_regular_file_inside(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            data = file.read(size)
    except OSError:
        return []
    lines = data.split(b"\n")[1 if end > size else 0 : -1]  # the last one is not whole yet, or is empty
    return [row for row in map(foreign_row, lines) if row is not None]


def history(folder: Path) -> list[dict[str, Any]]:
    """The log of other trainers, from their state file; for an active run, from its latest checkpoint."""
    places = [folder / STATE, *(folder / f"checkpoint-{step}" / STATE for step in sorted(checkpoints(folder))[-1:])]
    for path in places:
        try:
            if path.stat().st_size > 64 * 2**20:
                continue
            with open_regular_file_inside(path) as file:
                state = json.loads(file.read(), parse_constant=str)  # long, and few of its numbers are looked at
        except (OSError, ValueError, RecursionError):
            continue
        rows = state.get("log_history") if isinstance(state, dict) else None
        if isinstance(rows, list):
            total = state.get("max_steps", 0)
            return [{**row, "max_steps": total} for row in rows if isinstance(row, dict)]
    return []


def checkpoints(folder: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(int(name[11:]) for name in names if is_checkpoint(name))


def is_checkpoint(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint."""
    return bool(re.fullmatch(r"checkpoint-[0-9]{1,15}", name))
