"""The last file of a checkpoint: what belongs to it, byte for byte, and what the run depended on.

A folder without a valid manifest is not a checkpoint. The manifest is written after every other file has been flushed,
and the folder takes its name only then; so a checkpoint that has its name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_BLOCK_BYTES = 1 << 22


def write_manifest(folder: Path, step: int, fingerprints: Mapping[str, Any]) -> None:
    """Flush every file of ``folder`` to the disk, then write down their sizes and hashes."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME):
        _flush(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": FORMAT, "global_step": step, "files": files, "fingerprints": fingerprints}
    target = folder / MANIFEST_NAME
    target.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _flush(target)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError with what is wrong where the manifest is missing or broken."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"it has no {MANIFEST_NAME}, so it was never finished or another program wrote it")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        manifest["files"], manifest["global_step"], manifest["fingerprints"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its {MANIFEST_NAME} is damaged ({error})") from error
    return manifest


def faults(folder: Path, contents: bool = True) -> list[str]:
    """What is wrong with a checkpoint, as half sentences; empty where every byte is as it was written.

    Args:
        contents: compare the hashes too, not only the sizes.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    found = []
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != wanted["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {wanted['bytes']}")
        elif contents and _sha256(path) != wanted["sha256"]:
            found.append(f"{name} was changed after it was written (its checksum differs)")
    return found


def flush_folders(folders: Iterable[Path]) -> None:
    """Make renames and new names in these folders survive a power cut."""
    for folder in folders:
        _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
