"""Completions of a rollout run, read from the end of ``completions.jsonl``.

In: a run's folder. Out: its steps and records, newest first, and the rows of one of them. A row has ``step``,
``record``, ``sample``, ``prompt``, ``completion``, ``tokens``, ``ended``, ``rewards`` and ``advantage``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.serve.page.runs.files import tail_lines

COMPLETIONS = "completions.jsonl"
_TAIL_BYTES, _MOST_ROWS = 8 * 2**20, 64
_SHOWN = ("step", "record", "sample", "prompt", "images", "completion", "tokens", "ended", "rewards", "advantage")


def completions(folder: Path, step: int | None = None, record: str | None = None) -> dict[str, Any]:
    """Steps, records, and the rows of ``step`` (the newest by default) and ``record``.

    Returns:
        ``{"steps": [120, 115], "records": [{"name": "17", "steps": [120, 115]}], "rows": [...]}``: records with the
        steps that have them, the newest first; rows only if requested.
    """
    rows = [row for row in tail_lines(folder / COMPLETIONS, _TAIL_BYTES) if isinstance(row.get("step"), int)]
    steps = sorted({row["step"] for row in rows}, reverse=True)
    records: dict[str, list[int]] = {}
    for row in reversed(rows):
        of_record = records.setdefault(str(row.get("record")), [])
        if row["step"] not in of_record:
            of_record.append(row["step"])
    named = [{"name": name, "steps": some} for name, some in records.items()]
    wanted = [
        {name: row[name] for name in _SHOWN if name in row}
        for row in rows
        if row["step"] == step and (record is None or str(row.get("record")) == record)
    ]
    return {"steps": steps[:1000], "records": named[:1000], "rows": wanted[:_MOST_ROWS]}
