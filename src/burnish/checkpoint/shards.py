"""Save and load sharded tensors, of which each rank holds a contiguous piece. Any number of ranks can load them.

A sharded part of a checkpoint consists of one safetensors file per rank, ``<stem>-00001-of-00004.safetensors``, and an
index, ``<stem>.shards.json``, with the shape of every tensor and the file of each piece of the flattened tensor:

    {"tensors": {"lm_head.weight": {"dtype": "F32", "shape": [320, 32], "pieces": [[file, begin, count], ...]}}}

Contiguous pieces of flattened tensors describe all kinds of sharding: rows of a matrix (FSDP) as well as a slice of one
vector of all weights (ZeRO). So one backend can read the files of another.

Each rank reports, in a temporary file in the checkpoint folder, the sizes and hashes of its written files, or its
error. Files are used because the writing threads may not use the collectives of the training thread. Rank 0 waits for
all reports before it writes the manifest. If a rank dies, its report is missing, and the folder never becomes a
checkpoint.

Refuses an index whose pieces do not cover its tensors. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.checkpoint.manifest import flushed_file_entry
from burnish.config.errors import UserError
from burnish.utils.json_files import write_json

_POLL_INTERVAL_S = 0.02
_REPORT_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class LocalShard:
    """The piece of a tensor that this rank holds.

    Args:
        tensor: any shape; its elements in order are the piece. Empty if the rank holds nothing of the tensor.
        begin: position of its first element in the flattened tensor.
        shape: shape of the whole tensor.
    """

    tensor: Tensor
    begin: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def detach(self) -> LocalShard:
        return replace(self, tensor=self.tensor.detach())


class Shards(Protocol):
    """Converts between the state of a part and this rank's pieces of it. Implemented by a backend."""

    def state_dict(self, held: Any) -> Mapping[str, Any]:
        """The state of ``held``, with a ``LocalShard`` for each sharded tensor."""
        ...

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        """Load this rank's pieces of ``state``, which contains ``ShardedTensor`` objects."""
        ...


class ShardedTensor:
    """A tensor of a checkpoint that is read piece by piece.

    Args:
        shape: shape of the whole tensor.
        pieces: (begin, (count,) elements) in order; together they cover the tensor.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[int, Tensor]]) -> None:
        self.shape, self.dtype, self.pieces = torch.Size(shape), dtype, pieces

    @classmethod
    def of(cls, tensor: Tensor) -> ShardedTensor:
        return cls(tensor.shape, tensor.dtype, [(0, tensor.reshape(-1))])

    def slice_of(self, begin: int, count: int) -> Tensor:
        """(count,) elements of the flattened tensor from ``begin`` on, as a new tensor."""
        found = torch.empty(count, dtype=self.dtype)
        for first, elements in self.pieces:
            low, high = max(begin, first), min(begin + count, first + elements.numel())
            if low < high:
                found[low - begin : high - begin] = elements[low - first : high - first]
        return found

    def full_tensor(self) -> Tensor:
        return self.slice_of(0, prod(self.shape)).reshape(self.shape)


def shard_name(stem: str, rank: int, world_size: int) -> str:
    return f"{stem}-{rank + 1:05}-of-{world_size:05}.safetensors"


def index_name(stem: str) -> str:
    return f"{stem}.shards.json"


def write_shard(path: Path, tensors: Mapping[str, Tensor | LocalShard], is_first: bool) -> None:
    """Write this rank's file. A tensor that is the same on all ranks is written by rank 0 only.

    The header stores the position of each piece and the shape of its tensor, from which the index is created.
    """
    from safetensors.torch import save_file

    pieces = {
        name: value if isinstance(value, LocalShard) else LocalShard(value, 0, tuple(value.shape))
        for name, value in tensors.items()
        if is_first or isinstance(value, LocalShard)
    }
    held = {name: piece for name, piece in pieces.items() if piece.tensor.numel() or not piece.tensor.dim()}
    places = {name: [piece.begin, list(piece.shape)] for name, piece in held.items()}
    flat = {name: piece.tensor.reshape(-1).contiguous() for name, piece in held.items()}
    save_file(flat, path, metadata={"format": "pt", "pieces": json.dumps(places)})


def write_index(folder: Path, stem: str, world_size: int) -> None:
    """Write the index, created from the headers of all ranks' files."""
    from safetensors import safe_open

    tensors: dict[str, dict[str, Any]] = {}
    for rank in range(world_size):
        name = shard_name(stem, rank, world_size)
        with safe_open(folder / name, framework="pt") as file:
            for key, (begin, shape) in json.loads(file.metadata()["pieces"]).items():
                slice_of = file.get_slice(key)
                entry = tensors.setdefault(key, {"dtype": slice_of.get_dtype(), "shape": shape, "pieces": []})
                entry["pieces"].append([name, begin, slice_of.get_shape()[0]])
    for entry in tensors.values():
        entry["pieces"].sort(key=lambda piece: piece[1])
    write_json(folder / index_name(stem), {"tensors": tensors}, indent=1, sort_keys=True)


def read_sharded(folder: Path, stem: str) -> dict[str, ShardedTensor]:
    """Open the tensors of a sharded part. Files are memory-mapped, so only the pieces that are used are read.

    Raises:
        UserError: if pieces are missing or inconsistent.
    """
    from safetensors.torch import load_file

    index = json.loads((folder / index_name(stem)).read_text(encoding="utf-8"))
    names = {name for entry in index["tensors"].values() for name, _, _ in entry["pieces"]}
    files = {name: load_file(folder / name) for name in names}
    found = {}
    for key, entry in index["tensors"].items():
        pieces = [(begin, files[name][key]) for name, begin, _ in entry["pieces"]]
        ends = [0, *(begin + elements.numel() for begin, elements in pieces)]
        if [begin for begin, _ in pieces] != ends[:-1] or ends[-1] != prod(entry["shape"]):
            raise UserError(
                f"the shards of {key} do not add up to the full tensor: one is missing or they overlap.",
                where=str(folder / index_name(stem)),
            )
        found[key] = ShardedTensor(entry["shape"], pieces[0][1].dtype, pieces)
    return found


# --- reports between the ranks that write -----------------------------------------------------------------------------


@contextmanager
def report_files(folder: Path, rank: int, names: Sequence[str]) -> Iterator[None]:
    """Report the files ``names`` of this rank after the block has written them, or the error."""
    try:
        yield
        report: dict[str, Any] = {"files": {name: flushed_file_entry(folder / name) for name in names}}
    except Exception as error:
        _write_report(folder, rank, {"error": f"{type(error).__name__}: {error}"})
        raise
    _write_report(folder, rank, report)


def gather_reports(folder: Path, world_size: int, longest_s: float = _REPORT_TIMEOUT_S) -> dict[str, Any]:
    """Wait for the reports of all ranks except rank 0.

    Args:
        folder: the temporary folder of the checkpoint.
        world_size: number of ranks.
        longest_s: seconds to wait for a report.

    Returns:
        file name -> size and hash.

    Raises:
        OSError: if a rank failed, or did not report within ``longest_s``.
    """
    files: dict[str, Any] = {}
    until = time.monotonic() + longest_s
    for rank in range(1, world_size):
        path = _report_path(folder, rank)
        while not path.is_file():
            if time.monotonic() > until:
                raise OSError(f"Rank {rank} did not write its shard of {folder.name} within {longest_s:.0f} s.")
            time.sleep(_POLL_INTERVAL_S)
        report = json.loads(path.read_text(encoding="utf-8"))
        if "error" in report:
            raise OSError(f"Rank {rank} could not write its shard of {folder.name}: {report['error']}")
        files |= report["files"]
        path.unlink()
    return files


def _write_report(folder: Path, rank: int, what: dict[str, Any]) -> None:
    marker = folder / f".rank-{rank}.begun"
    marker.write_text(json.dumps(what), encoding="utf-8")
    os.replace(marker, _report_path(folder, rank))


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f".rank-{rank}.json"
