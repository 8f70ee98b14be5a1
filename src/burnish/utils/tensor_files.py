"""Names, dtypes and shapes of the tensors in a safetensors file, read from its header.

Format: eight bytes (little endian) with the length of the header, the header as JSON, the tensors without gaps
(https://huggingface.co/docs/safetensors, "Format"). So a truncated file is recognized by its size.

In:  a file, or a folder of shards with their index.
Out: name -> ``TensorInfo``.
Refuses: a file that does not match its header, with the expected and actual number of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from burnish.config.errors import Problem, UserError, few

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors' names: "F32", "BF16", ...
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        UserError: if the file is truncated or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if size < _LENGTH_BYTES or length > _LONGEST_HEADER:
            raise UserError(_not_safetensors(path, size))
        if size < start:
            raise UserError(_cut_off(path, start, size))
        header = _header(file.read(length), path, size)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not all(map(_is_entry, entries.values())):
        raise UserError(_not_safetensors(path, size))
    expected = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != expected:
        raise UserError(_cut_off(path, expected, size))
    try:
        with safe_open(path, "np"):  # the library checks dtypes, and shapes against offsets
            pass
    except SafetensorError as error:
        raise UserError(_not_safetensors(path, size, str(error).partition(", expected")[0])) from error
    return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def read_headers(paths: Iterable[Path]) -> tuple[dict[str, TensorInfo], list[Problem]]:
    """The tensors of several files, and all problems of the files. A tensor must be in one file only: transformers
    loads it from the last one, whatever an index says."""
    found: dict[str, TensorInfo] = {}
    places: dict[str, Path] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            header = read_header(path)
        except UserError as error:
            problems.extend(error.problems)
            continue
        if twice := sorted(header.keys() & found.keys()):
            what = f"{len(twice)} of its tensors are also in {places[twice[0]].name}: {few(twice)}."
            problems.append(Problem(what, where=str(path), remedy="Download the model again."))
        found |= header
        places |= dict.fromkeys(header, path)
    return found, problems


def _header(raw: bytes, path: Path, size: int) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise UserError(_not_safetensors(path, size)) from None
    if not isinstance(header, dict):
        raise UserError(_not_safetensors(path, size))
    return header


def _is_entry(entry: Any) -> bool:
    """``{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}``"""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    lists = (entry.get("shape"), entry.get("data_offsets"))
    are_counts = all(isinstance(one, list) and all(type(n) is int and n >= 0 for n in one) for one in lists)
    return are_counts and len(entry["data_offsets"]) == 2


def _cut_off(path: Path, expected: int, size: int) -> Problem:
    return Problem(
        f"its header declares {expected:,} bytes, but the file has {size:,}.",
        where=str(path),
        why="It was truncated while it was written or downloaded."
        if size < expected
        else "It contains extra data at the end.",
        remedy="Download or copy it again.",
    )


def _not_safetensors(path: Path, size: int, why: str = "") -> Problem:
    return Problem(
        f"this is not a safetensors file ({size:,} bytes, without a readable header).",
        where=str(path),
        why=f"{why.rstrip('.')}." if why else "",
        remedy="Download or copy it again.",
    )
