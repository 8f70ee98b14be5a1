"""Deleted runs: a folder is moved to ``.burnish-trash`` in its root, from where it can be moved back.

In: a run's folder inside a root. Out: an entry with an id. Moving is a rename, which takes no time and no space.
    Nothing is permanently deleted until the owner empties the trash.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from burnish.report.results import write_text_atomically
from burnish.serve.http.errors import APIError
from burnish.serve.page.runs.files import object_in
from burnish.serve.page.runs.runs import FoundRun
from burnish.utils.files import is_below

TRASH, _ENTRY = ".burnish-trash", "entry.json"


def delete(run: FoundRun, roots: Sequence[Path]) -> str:
    """Move a run to the trash of its root. Returns the id of the entry.

    Raises:
        APIError: 409 if it is still running or its folder cannot be moved.
    """
    if run.is_alive:
        raise APIError(409, "running", "The run is still running. Stop it first.")
    folder = run.folder.resolve()
    root = next((root for root in roots if folder.is_relative_to(root) and folder != root), None)
    if root is None or any(other.is_relative_to(folder) for other in roots):
        raise APIError(409, "outside", "The folder of the run is one of the web_roots and is not deleted.")
    id = secrets.token_hex(8)
    place = root / TRASH / id
    try:
        place.mkdir(parents=True)
        write_text_atomically(place / _ENTRY, json.dumps({"folder": str(folder), "name": run.name}))
        os.rename(folder, place / "run")
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise APIError(409, "not_moved", f"The folder cannot be moved to the trash: {error.strerror}.") from error
    return id


def restore(id: str, roots: Sequence[Path]) -> Path:
    """Move a run back. Returns its folder.

    Raises:
        APIError: 404 for an unknown entry, 409 if its folder exists again.
    """
    for entry, folder in _entries(roots):
        if entry.name == id:
            if os.path.lexists(folder):
                raise APIError(
                    409,
                    "folder_not_empty",
                    "A different folder now exists at the original path of the run. Rename it first.",
                )
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                os.rename(entry / "run", folder)
            except OSError as error:
                raise APIError(409, "not_moved", f"The folder cannot be moved back: {error.strerror}.") from error
            shutil.rmtree(entry, ignore_errors=True)
            return folder
    raise APIError(404, "no_entry", "The run is no longer in the trash.")


def runs_in_trash(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs in the trash: id, name, folder, and size in bytes."""
    return [
        {"id": entry.name, "name": folder.name, "folder": str(folder), "bytes": _size(entry)}
        for entry, folder in _entries(roots)
    ]


def empty(roots: Sequence[Path]) -> None:
    """Permanently delete the content of the trash."""
    for entry, _ in _entries(roots):
        shutil.rmtree(entry, ignore_errors=True)


def _entries(roots: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """(path in the trash, original folder), if the folder was inside the same root."""
    for root in roots:
        trash = root / TRASH
        if trash.is_symlink() or not trash.is_dir():
            continue
        for entry in sorted(trash.iterdir()):
            before = object_in(entry / _ENTRY).get("folder")
            if isinstance(before, str) and is_below(Path(before).parent, [root]) and is_below(Path(before), [root]):
                yield entry, Path(before)


def _size(folder: Path) -> int:
    files = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files)
