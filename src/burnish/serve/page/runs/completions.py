"""Completions of a rollout run, read from the end of ``completions.jsonl``.

In: a run's folder. Out: its steps and records, newest first, and the rows of one of them. A row has ``step``,
``record``, ``sample``, ``prompt``, ``completion``, ``tokens``, ``ended``, ``rewards`` and ``advantage``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from burnish.serve.page.runs.files import tail_lines

COMPLETIONS = "completions.jsonl"
_TAIL_BYTES, _MOST_ROWS = 8 * 2**20, 64
_SHOWN = ("step", "record", "sample", "prompt", "images", "completion", "tokens", "ended", "rewards", "advantage")


def completions(
    folder: Path, step: int | None = None, record: str | None = None, order: str = "sample", offset: int = 0
) -> dict[str, Any]:
    """Steps and records with completions; with a step, some rows of it.

    Args:
        step: of the rows. None: no rows are returned.
        record: of the rows. None: all records of the step.
        order: ``"sample"``, or by advantage ``"best"`` or ``"worst"`` first.
        offset: number of rows in this order that are left out before the returned ones.
    Returns:
        ``{"steps": [120, 115], "records": [{"name": "17", "steps": [120, 115]}], "rows": [...], "count": 200,
        "is_part": false}``: records with the steps that have them, the newest first; up to 64 rows of ``count``.
        ``is_part``: the file is larger than the part of it that is read, its end.
    """
    file = folder / COMPLETIONS
    rows = [row for row in tail_lines(file, _TAIL_BYTES) if isinstance(row.get("step"), int)]
    steps = sorted({row["step"] for row in rows}, reverse=True)
    records: dict[str, list[int]] = {}
    for row in reversed(rows):
        of_record = records.setdefault(str(row.get("record")), [])
        if row["step"] not in of_record:
            of_record.append(row["step"])
    named = [{"name": name, "steps": some} for name, some in records.items()]
    wanted = [row for row in rows if row["step"] == step and (record is None or str(row.get("record")) == record)]
    wanted.sort(key=lambda row: _number(row.get("sample")))
    if order != "sample":
        wanted.sort(key=lambda row: _number(row.get("advantage")), reverse=order == "best")
    shown = [{name: row[name] for name in _SHOWN if name in row} for row in wanted[offset : offset + _MOST_ROWS]]
    return {"steps": steps[:1000], "records": named[:1000], "rows": shown, "count": len(wanted),
            "is_part": file.is_file() and file.stat().st_size > _TAIL_BYTES}  # fmt: skip


def _number(value: object) -> float:
    """A value to sort by: files of other programs may contain anything."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else 0.0
