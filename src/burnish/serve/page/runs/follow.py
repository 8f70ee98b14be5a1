"""News in the files of some runs since a cursor: the same messages for a stream and for a client that polls.

A cursor is text: for each run the offsets in its log, its events and its console, and a mark of what was last said of
it. So the server keeps nothing about anybody, and nothing is lost or said twice, after its own restart too. A file that
became shorter (a run that goes on cuts its log) is said as ``resync``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.config.secrets import without_secrets
from burnish.report.metadata import EVENTS
from burnish.serve.page.runs.files import LOG
from burnish.serve.page.runs.listing import facts
from burnish.serve.page.runs.log_columns import columns_of, rows_since
from burnish.serve.page.runs.runs import FoundRun, read_run
from burnish.utils.files import regular_inside

CONSOLE = "console.log"
MOST_ROWS_BYTES, MOST_LOG_BYTES, _LOOK_BACK_BYTES = 512 * 1024, 16 * 1024, 512
_PART = re.compile(r"([0-9a-f]{12}):(\d{1,15}):(\d{1,15}):(\d{1,15}):([0-9a-f]{0,8})")


@dataclass(frozen=True)
class FilePosition:
    """Position of a reader in the files of one run."""

    rows: int = 0
    events: int = 0
    console: int = 0
    mark: str = ""


Cursor = Mapping[str, FilePosition]


def read_cursor(text: str) -> dict[str, FilePosition]:
    """A cursor as a client sent it; what is no cursor is the beginning."""
    found = {}
    for part in text[:4096].split(","):
        if match := _PART.fullmatch(part):
            found[match[1]] = FilePosition(int(match[2]), int(match[3]), int(match[4]), match[5])
    return found


def cursor_text(cursor: Cursor) -> str:
    return ",".join(f"{id}:{p.rows}:{p.events}:{p.console}:{p.mark}" for id, p in cursor.items())


def news(id: str, folder: Path, place: FilePosition, log: bool) -> Iterator[tuple[str, Any, FilePosition]]:
    """(event, data, the place behind it), in order, of one run.

    Args:
        log: follow the console too.
    """
    if not folder.is_dir():
        yield "gone", {"run": id}, place
        return
    if _size(folder / LOG) < place.rows:
        place = replace(place, rows=_size(folder / LOG))
        yield "resync", {"run": id}, place
    rows, end = rows_since(folder / LOG, place.rows, MOST_ROWS_BYTES)
    if end != place.rows:
        place = replace(place, rows=end)
        columns = columns_of(rows)
        if columns["step"]:
            yield "rows", {"run": id, "columns": columns}, place
    events, end = rows_since(folder / EVENTS, min(place.events, _size(folder / EVENTS)), MOST_ROWS_BYTES)
    place = replace(place, events=end)
    for event in events:
        yield "event", {**event, "run": id}, place
    run = read_run(folder)
    if run is not None and (mark := mark_of(run)) != place.mark:
        place = replace(place, mark=mark)
        yield "run", facts(run), place
    if log:
        yield from _console(id, folder, place)


def _console(id: str, folder: Path, place: FilePosition) -> Iterator[tuple[str, Any, FilePosition]]:
    path = folder / CONSOLE
    size, begin = _size(path), min(place.console, _size(path))
    if size == begin:
        return
    skipped = max(0, size - begin - MOST_LOG_BYTES)
    text, end = log_text(path, begin + skipped, size)
    yield "log", {"run": id, "from": begin + skipped, "text": text, "skipped": skipped}, replace(place, console=end)


def log_text(path: Path, begin: int, end: int) -> tuple[str, int]:
    """The text of a log between two offsets, without secrets, and the offset behind it.

    A reader chooses the offsets, and must not be able to cut a token into parts that nobody recognizes: the text ends
    with a whole line where one ends in it, and is masked together with what stands before it.
    """
    before = max(0, begin - _LOOK_BACK_BYTES)
    try:
        with regular_inside(path) as file:
            file.seek(before)
            data = file.read(end - before)
            is_all = not file.read(1)
    except OSError:
        return "", begin
    if not is_all and (last := data.rfind(b"\n")) >= begin - before:
        data = data[: last + 1]
    whole = without_secrets(data.decode("utf-8", "replace"))
    known = without_secrets(data[: begin - before].decode("utf-8", "replace"))
    same = os.path.commonprefix([whole, known])  # noqa: RUF071  (of texts, not of paths)
    return whole[len(same) :], before + len(data)


def mark_of(run: FoundRun) -> str:
    """Changes when something that is shown of a run does."""
    shown = [run.state, run.step, run.total, run.loss, run.eval_loss, run.checkpoint, run.sentence, run.best]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:8]


def end_of(folder: Path, run: FoundRun | None) -> FilePosition:
    """The place of one who knows all that is there now."""
    return FilePosition(
        _size(folder / LOG), _size(folder / EVENTS), _size(folder / CONSOLE), mark_of(run) if run else ""
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
