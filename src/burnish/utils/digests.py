"""SHA-256 of large files, kept in the cache so that each file is read once.

In: paths. Out: 32 bytes per file. A kept digest belongs to a path, size, inode, and times of change to the nanosecond;
the time of the last change of the inode (ctime) cannot be set by copying tools. A digest is not kept for a file that
was changed within the last seconds, because a later change might have the same times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from burnish.utils.files import cache_home, temporary_path
from burnish.utils.work import progress

_PIECE_BYTES = 2**22
_MAX_THREADS = 8
_SETTLED_S = 2.0
_SHOWN_BYTES = 2**32
"""Progress is shown if more than this has to be read, which takes some seconds."""


def file_digests(paths: Sequence[Path]) -> list[bytes]:
    """Return the digest of the content of each file."""
    known = [_cached_content(path) for path in paths]
    unread = [path for path, digest in zip(paths, known, strict=True) if digest is None]
    total = sum(path.stat().st_size for path in unread)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        if total > _SHOWN_BYTES:
            with progress("Hashing the weights", len(unread), "files") as advance:
                read = []
                for digest in pool.map(_read, unread):
                    read.append(digest)
                    advance(1)
        else:
            read = list(pool.map(_read, unread))
    found = iter(read)
    return [next(found) if digest is None else digest for digest in known]


def _read(path: Path) -> bytes:
    """Read a whole file. hashlib releases Python's lock, so several files are read at once."""
    digest, before = hashlib.sha256(), _identity(path)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    is_settled = time.time_ns() - max(before[2:]) > _SETTLED_S * 1e9
    if is_settled and _identity(path) == before:
        _keep(path, before, digest.hexdigest())
    return digest.digest()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _place(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_home() / "digests" / f"{name}.json"


def _cached_content(path: Path) -> bytes | None:
    try:
        found = json.loads(_place(path).read_text(encoding="utf-8"))
        return bytes.fromhex(found["sha256"]) if found["identity"] == _identity(path) else None
    except (OSError, ValueError, TypeError, KeyError):  # missing or damaged
        return None


def _keep(path: Path, identity: list[int], digest: str) -> None:
    """Write a digest. Nothing is lost if that fails: the file is read again."""
    place = _place(path)
    temporary = temporary_path(place)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"identity": identity, "sha256": digest}), encoding="utf-8")
        os.replace(temporary, place)
