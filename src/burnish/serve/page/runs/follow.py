"""New messages of runs since a cursor, for event streams and for polling clients.

A cursor is a string: for each run, the offsets in its log, events and console output, and a hash of its last reported
state. The server keeps no state of clients, so no message is lost or repeated, even after a restart. A file that became
shorter (a resumed run truncates its log) is reported as ``resync``.
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
from burnish.report.console import RUN_LOG
from burnish.report.metadata import EVENTS
from burnish.serve.page.runs.files import LOG
from burnish.serve.page.runs.listing import facts
from burnish.serve.page.runs.log_columns import columns_of, rows_since
from burnish.serve.page.runs.runs import FoundRun, KnownRuns, read_if_changed
from burnish.utils.files import open_regular_file_inside

CONSOLE = "console.log"
MOST_RUNS = 100
"""Maximum number of runs in a cursor."""
MOST_ROWS_BYTES, MOST_LOG_BYTES, _LOOK_BACK_BYTES = 512 * 1024, 16 * 1024, 512
LOG_BYTES, _SEARCH_BYTES, _MOST_MATCHES = 256 * 1024, 4 * 2**20, 200
_CURSOR_PART = re.compile(r"([0-9a-f]{12}):(\d{1,15}):(\d{1,15}):(\d{1,15}):([0-9a-f]{0,8})")


@dataclass(frozen=True)
class FilePosition:
    """Position of a reader in the files of one run."""

    rows: int = 0
    events: int = 0
    console: int = 0
    mark: str = ""


Cursor = Mapping[str, FilePosition]


def read_cursor(text: str) -> dict[str, FilePosition]:
    """Parse the cursor of a client; an invalid one means the beginning."""
    found = {}
    for part in text.split(",", MOST_RUNS)[:MOST_RUNS]:
        if match := _CURSOR_PART.fullmatch(part):
            found[match[1]] = FilePosition(int(match[2]), int(match[3]), int(match[4]), match[5])
    return found


def cursor_text(cursor: Cursor) -> str:
    return ",".join(f"{id}:{p.rows}:{p.events}:{p.console}:{p.mark}" for id, p in cursor.items())


def new_events(
    id: str, folder: Path, place: FilePosition, log: bool, known: KnownRuns | None = None
) -> Iterator[tuple[str, Any, FilePosition]]:
    """(event, data, position after it) of one run, in order.

    Args:
        log: follow the console too.
        known: the runs that were read for other readers (``read_if_changed``).
    """
    if not folder.is_dir():
        yield "gone", {"run": id}, place
        return
    lengths = _size(folder / LOG), _size(console_of(folder))
    if lengths[0] < place.rows or (log and lengths[1] < place.console):
        place = replace(place, rows=min(lengths[0], place.rows), console=min(lengths[1], place.console))
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
    run = read_if_changed(folder, {} if known is None else known)
    if run is not None and (mark := state_hash(run)) != place.mark:
        place = replace(place, mark=mark)
        yield "run", facts(run), place
    if log:
        yield from _console(id, folder, place)


def console_of(folder: Path) -> Path:
    """The file with the output of a run: of the process that the web UI started, or the log of any other run."""
    return folder / (CONSOLE if (folder / CONSOLE).is_file() else RUN_LOG)


def _console(id: str, folder: Path, place: FilePosition) -> Iterator[tuple[str, Any, FilePosition]]:
    path = console_of(folder)
    size, begin = _size(path), min(place.console, _size(path))
    if size == begin:
        return
    skipped = max(0, size - begin - MOST_LOG_BYTES)
    text, end = log_text(path, begin + skipped, size)
    yield (
        "log",
        {"run": id, "from": begin + skipped, "to": end, "text": text, "skipped": skipped},
        replace(place, console=end),
    )


def matching_lines(path: Path, end: int, wanted: str) -> tuple[str, int]:
    """Search a log backwards for lines that contain a text, without regard to case.

    Only the text that is shown is searched, so a search finds no secrets.

    Args:
        path: the log.
        end: offset at which the search begins.
        wanted: the text.
    Returns:
        The last lines that contain it, in order, and the offset before which the log was not searched. It is 0 at the
        beginning of the log; otherwise there may be more lines.
    """
    wanted, found, begin = wanted.casefold(), list[str](), end
    while begin > 0 and end - begin < _SEARCH_BYTES and len(found) < _MOST_MATCHES:
        start = line_start(path, max(0, begin - LOG_BYTES), begin)
        text, _ = log_text(path, start, begin)
        found = [line for line in text.split("\n") if wanted in line.casefold()] + found
        begin = start
    return "".join(f"{line}\n" for line in found), begin


def line_start(path: Path, begin: int, end: int) -> int:
    """The offset of the first line that starts between two offsets of a log; ``begin`` if there is none."""
    if begin == 0:
        return 0
    try:
        with open_regular_file_inside(path) as file:
            file.seek(begin - 1)
            found = file.read(end - begin).find(b"\n")
    except OSError:
        return begin
    return begin + found if found >= 0 else begin


def log_text(path: Path, begin: int, end: int) -> tuple[str, int]:
    """The text of a log between two offsets, without secrets, and the offset behind it.

    Clients choose the offsets, so a secret could be split in two unrecognizable parts. Therefore the text ends with a
    complete line if possible, and is masked together with the text before it.
    """
    before = max(0, begin - _LOOK_BACK_BYTES)
    try:
        with open_regular_file_inside(path) as file:
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


def state_hash(run: FoundRun) -> str:
    """Changes whenever the displayed state of a run changes."""
    shown = [run.state, run.step, run.total, run.loss, run.eval_loss, run.checkpoint, run.sentence, run.best]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:8]


def end_of(folder: Path, run: FoundRun | None) -> FilePosition:
    """The position at the end of all current messages."""
    return FilePosition(
        _size(folder / LOG), _size(folder / EVENTS), _size(console_of(folder)), state_hash(run) if run else ""
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
