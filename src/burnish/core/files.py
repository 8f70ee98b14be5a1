"""Files and folders as they lie on a disk: taken away without following links, and known for what they are."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISDIR, "a folder"),
)  # fmt: skip


def remove(path: Path) -> None:
    """Take away a file, a folder with all in it, or a link without what it leads to; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def odd_kind(path: Path) -> str:
    """Name what ``path`` is if it is there and no regular file: a reader of it may wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return "" if stat.S_ISREG(mode) else next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")


def broken_link(path: Path) -> Path | None:
    """Return ``path``, or the nearest of the folders that it lies in, if it is a link that leads nowhere."""
    for place in (path, *path.absolute().parents):
        if os.path.islink(place) and not os.path.exists(place):
            return place
    return None
