"""Responses that a run has written to ``generated_predictions*.jsonl``, some at a time.

In: a run's folder, a file and a place in it. Out: rows with ``prompt``, ``predict``, ``label`` and ``images`` (paths),
or with the scores of a pair. The files are untrusted: invalid lines are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.serve.page.runs.files import foreign_row
from burnish.utils.files import open_regular_file_inside

STEM = "generated_predictions"
_MOST_ROWS, _MOST_BYTES, _MOST_LETTERS, _MOST_IMAGES = 20, 4 * 2**20, 20_000, 16
_TEXTS, _NUMBERS = ("prompt", "predict", "label"), ("record", "chosen", "rejected")


def prediction_files(folder: Path) -> list[str]:
    """Names of the files with responses, in alphabetical order."""
    try:
        names = [path.name for path in folder.glob(f"{STEM}*.jsonl")]
    except OSError:
        return []
    return sorted(name for name in names if not name.endswith(".partial.jsonl"))[:100]


def predictions(folder: Path, name: str = "", offset: int = 0) -> dict[str, Any]:
    """Rows of one file.

    Args:
        name: of the file; the first one by default, also for a name that is not listed.
        offset: the byte at which a line begins; ``next`` of the rows before.
    Returns:
        ``{"files": [...], "file": "...", "rows": [...], "next": 4096}``; ``next`` is null at the end.
    """
    files = prediction_files(folder)
    chosen = name if name in files else next(iter(files), "")
    rows: list[dict[str, Any]] = []
    end = None
    try:
        with open_regular_file_inside(folder / chosen) as file:
            file.seek(offset)
            lines = file.read(_MOST_BYTES).splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            for line in whole[:_MOST_ROWS]:
                offset += len(line)
                rows += [_shorten_row(row)] if (row := foreign_row(line)) is not None else []
            file.seek(offset)
            end = offset if whole and file.read(1) else None
    except OSError:
        pass
    return {"files": files, "file": chosen, "rows": rows, "next": end}


def _shorten_row(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: row[name][:_MOST_LETTERS] for name in _TEXTS if isinstance(row.get(name), str)}
    numbers = {name: row[name] for name in _NUMBERS if isinstance(row.get(name), int | float)}
    paths = row.get("images")
    images = [path for path in paths if isinstance(path, str)][:_MOST_IMAGES] if isinstance(paths, list) else []
    return {**texts, **numbers, **({"images": images} if images else {})}
