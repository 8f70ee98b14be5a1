"""The manifest of a checkpoint: size and hash of each file, and the fingerprints of the run.

A folder without a valid manifest is not a checkpoint. The manifest is written after all other files are flushed, and
the folder is renamed afterwards, so a folder with the name of a checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.utils.json_files import read_object, write_json

MANIFEST_NAME = "manifest.json"
FORMAT = 1


def write_manifest(
    folder: Path, step: int, fingerprints: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> None:
    """Flush every file of ``folder`` to the disk, then write the manifest with their sizes and hashes.

    Args:
        folder: the temporary folder of the checkpoint.
        step: number of completed steps.
        fingerprints: what the run depends on.
        known: files that other ranks have flushed: name -> result of ``flushed_file_entry``.
    """
    files = dict(known or {})
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST_NAME):
        name = path.relative_to(folder).as_posix()
        if name not in files:
            files[name] = flushed_file_entry(path)
    manifest = {"format": FORMAT, "global_step": step, "files": files, "fingerprints": fingerprints}
    manifest["sha256"] = manifest_sha256(manifest)
    target = folder / MANIFEST_NAME
    write_json(target, manifest, sort_keys=True)
    _flush(target)


def flushed_file_entry(path: Path) -> dict[str, Any]:
    """Flush a file, and return its size and hash."""
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest. Raises ValueError with the reason if it is missing or damaged."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"it has no {MANIFEST_NAME}, so it is incomplete or was not written by burnish")
    try:
        manifest = read_object(path, needs=[("files", dict), ("global_step", int), ("fingerprints", dict)])
    except UserError as error:
        raise ValueError(f"its {MANIFEST_NAME} is corrupted ({error.problems[0].what.rstrip('.')})") from error
    if manifest.get("sha256") != manifest_sha256(manifest):
        raise ValueError(f"its {MANIFEST_NAME} is corrupted (checksum mismatch)")
    if not all(map(_is_entry, manifest["files"].items())):
        raise ValueError(f"its {MANIFEST_NAME} is invalid (it lists files that are not in this folder)")
    return manifest


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest without its own hash. It protects the fingerprints like the files."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()


def _is_entry(item: tuple[str, Any]) -> bool:
    """Whether ``item`` is an entry such as ``("optimizer.json", {"bytes": 12, "sha256": "..."})`` of a file in the
    folder.
    """
    name, value = item
    is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return is_inside and isinstance(value, dict) and {"bytes", "sha256"} <= value.keys()


def integrity_errors(folder: Path, contents: bool = True) -> list[str]:
    """Reasons why a checkpoint is damaged, as clauses; empty if every byte is as it was written.

    Args:
        folder: the checkpoint.
        contents: compare the hashes as well as the sizes.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    found = []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif contents and sha256_of(path) != expected["sha256"]:
            found.append(f"{name} is corrupted (checksum mismatch)")
    return found


def flush_folders(folders: Iterable[Path]) -> None:
    """Flush these folders, so that renames and new files survive a power failure."""
    for folder in folders:
        _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
