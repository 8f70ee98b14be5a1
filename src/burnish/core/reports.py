"""Reports between the ranks that write one checkpoint: files beside the checkpoint's own, since the threads that write
may not use the ways of the thread that trains.

Each rank says that its files are on the disk, with their sizes and hashes, or why not; rank 0 waits for all of them
before it writes the manifest. A rank that is gone never reports, and the folder never becomes a checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.core.manifest import measured

_LOOKS_EVERY_S = 0.02
_LONGEST_S = 3600.0


@contextmanager
def reporting(folder: Path, rank: int, names: Sequence[str]) -> Iterator[None]:
    """Report the files ``names`` of this rank once they are written, or that they could not be."""
    try:
        yield
        said: dict[str, Any] = {"files": {name: measured(folder / name) for name in names}}
    except Exception as error:
        _say(folder, rank, {"error": f"{type(error).__name__}: {error}"})
        raise
    _say(folder, rank, said)


def gather_reports(folder: Path, world_size: int, longest_s: float = _LONGEST_S) -> dict[str, Any]:
    """Wait for the reports of all ranks but the first.

    Returns:
        name -> size and hash, of all their files.
    Raises:
        OSError: where one of them failed, or says nothing for ``longest_s``.
    """
    files: dict[str, Any] = {}
    until = time.monotonic() + longest_s
    for rank in range(1, world_size):
        path = _path(folder, rank)
        while not path.is_file():
            if time.monotonic() > until:
                raise OSError(f"Rank {rank} did not write its part of {folder.name} within {longest_s:.0f} s.")
            time.sleep(_LOOKS_EVERY_S)
        said = json.loads(path.read_text(encoding="utf-8"))
        if "error" in said:
            raise OSError(f"Rank {rank} could not write its part of {folder.name}: {said['error']}")
        files |= said["files"]
        path.unlink()
    return files


def _say(folder: Path, rank: int, what: dict[str, Any]) -> None:
    begun = folder / f".rank-{rank}.begun"
    begun.write_text(json.dumps(what), encoding="utf-8")
    os.replace(begun, _path(folder, rank))


def _path(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.json"
