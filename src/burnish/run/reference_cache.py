"""Log-probabilities of the reference model, computed once before the first step, and their cache on disk.

The reference is a second model, the model without its adapter, or the policy before training, which then needs no copy.
Each row is evaluated once without gradients; training steps need no reference model.

The cache key is a hash of everything they depend on: every token of the batches, weights and config of the reference,
dtype and device, patches to the model's code, and versions. They are computed again if any of these has changed, or if
the cached file is damaged. An entry is a folder of rows (``data/rows/store.py``) in the cache. Until it is complete,
each rank appends the values of its batches to a file beside it, from which an interrupted pass continues.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import burnish
from burnish.config.errors import NotSavedError, UserError
from burnish.data.rows.encode import atomic_replace, create_row_folder, folder_lock
from burnish.data.rows.row_set import RowSet, RowsOver
from burnish.data.rows.store import RowWriter, open_rows
from burnish.kernels.probe import unwrap_peft
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Row
from burnish.losses.reference import DisabledAdapter
from burnish.losses.responses import AnswersObjective
from burnish.run.partial_results import PartialResults
from burnish.utils.files import cache_home
from burnish.utils.patching import patch_summary
from burnish.utils.work import progress, track

_PARTIAL = ".partial.jsonl"


class RowsWithReference(RowsOver):
    """Rows with one reference value per completion, after ``fill`` or ``restore``.

    Args:
        rows: encoded rows; None for an example without a row.
    """

    def __init__(self, rows: RowSet[Any]) -> None:
        super().__init__(rows)
        self.columns: dict[str, array[float]] = {}

    def item(self, index: int) -> Row | None:
        row = self.rows[index]
        completed: Any = None if row is None else {**row, **self.numbers(index)}
        return completed  # type: ignore[no-any-return]

    def numbers(self, index: int) -> dict[str, float]:
        """Return column name -> the row's reference value; NaN for rows that were not evaluated."""
        return {name: of[index] for name, of in self.columns.items()}

    def restore(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Restore the ``numbers`` of all rows from a saved list."""
        for name in numbers[0] if numbers else ():
            self.columns[name] = array("d", [one[name] for one in numbers])

    def batches(self, objective: AnswersObjective, size: int) -> Iterator[Batch]:
        """Yield every batch that ``fill`` evaluates, on the CPU."""
        for part in self._parts(size):
            if rows := [row for row in self.rows.__getitems__(part) if row is not None]:
                yield objective.collate(rows)

    def _parts(self, size: int) -> list[range]:
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def fill(
        self, objective: AnswersObjective, module: nn.Module, parallel: Parallel, size: int, finished: PartialResults
    ) -> None:  # fmt: skip
        """Evaluate the reference on all rows, in batches of ``size`` that are distributed over the ranks.

        Args:
            objective: objective whose reference is evaluated.
            module: the policy, as prepared by the backend.
            parallel: processes and devices of the run.
            size: rows per batch.
            finished: values of batches that this rank has evaluated earlier; those of further batches are added.
        """
        parts = self._parts(size)
        known = set(chain.from_iterable(parallel.gather_objects(list(finished.results))))
        missing = [number for number in range(len(parts)) if number not in known]
        mine = missing[parallel.rank :: parallel.world_size]
        with progress("Reference", sum(len(parts[number]) for number in missing)) as advance:
            for at in range(-(-len(missing) // parallel.world_size)):
                number = mine[at] if at < len(mine) else missing[0]  # equal count on all ranks: each may hold a shard
                part = parts[number]
                rows = {n: row for n, row in zip(part, self.rows.__getitems__(part), strict=True) if row is not None}
                columns = objective.reference_columns(module, list(rows.values()), parallel) if rows else {}
                if at < len(mine):
                    finished.add(number, {"rows": list(rows), "columns": columns})
                advance(len(part) * parallel.world_size)
        for results in parallel.gather_objects(finished.results):
            for result in results.values():
                self._add(result["rows"], result["columns"])

    def _add(self, rows: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Add the values of some rows, by column."""
        for name, values in columns.items():
            column = self.columns.setdefault(name, array("d", [float("nan")] * len(self)))
            for number, value in zip(rows, values, strict=True):
                column[number] = value


def fill(
    rows: RowsWithReference,
    objective: AnswersObjective,
    module: nn.Module,
    parallel: Parallel,
    size: int,
    ignores_cache: bool = False,
) -> list[str]:
    """Fill in the reference log-probabilities of ``rows``. Returns notes for the user.

    Args:
        rows: rows to fill.
        objective: objective whose reference is evaluated.
        module: the policy, as prepared by the backend.
        parallel: processes and devices of the run.
        size: rows per batch.
        ignores_cache: ignore the cache.
    """
    folder = cache_home() / "reference" / key_of(rows, objective, module, parallel, size)
    cached = None if ignores_cache else _read_cache(folder)
    if all(parallel.gather_objects(cached is not None)):
        rows.restore(cached or [])
        return [f"Reference log-probabilities of {len(rows):,} examples were loaded from the cache: {folder}."]
    with suppress(UserError):
        create_row_folder(folder.parent)
    if ignores_cache:
        _remove_partial_results(folder)
        parallel.barrier()
    partial = folder.with_name(f".{folder.name}.{parallel.rank}{_PARTIAL}")
    with PartialResults(partial, folder.name, is_optional=True) as finished:
        rows.fill(objective, module, parallel, size, finished)
    notes = [] if parallel.rank else _write_cache(rows, folder)
    parallel.barrier()
    _remove_partial_results(folder)
    return notes


def _remove_partial_results(folder: Path) -> None:
    """Remove the files of all ranks with values of an entry that is not complete."""
    with suppress(OSError):
        for path in folder.parent.glob(f".{folder.name}.*{_PARTIAL}"):
            path.unlink(missing_ok=True)


def _read_cache(folder: Path) -> list[Row] | None:
    """Return cached numbers, or None if there are none or they are damaged."""
    try:
        return list(open_rows(folder))
    except UserError:
        return None


def _write_cache(rows: RowsWithReference, folder: Path) -> list[str]:
    try:
        create_row_folder(folder.parent)
        with folder_lock(folder), atomic_replace(folder) as partial:
            writer = RowWriter(partial)
            for number in range(len(rows)):
                writer.add(number, rows.numbers(number))
            writer.close()
    except (UserError, NotSavedError, OSError) as error:
        return [f"Reference log-probabilities cannot be cached: {error}"]
    return []


def key_of(
    rows: RowsWithReference, objective: AnswersObjective, module: nn.Module, parallel: Parallel, size: int
) -> str:
    """Return a hash of everything that the numbers depend on. It is the same on every rank and for any world size."""
    assert objective.reference is not None
    hashed = blake2b(digest_size=16)
    is_base = isinstance(objective.reference, DisabledAdapter)
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad and is_base}
    with objective.reference.answering(module) as answering:
        bare: Any = parallel.unwrap(answering)
        model = unwrap_peft(bare.model)
        facts = {
            "burnish": burnish.__version__, "libraries": [version(name) for name in ("torch", "transformers")],
            "model": [type(model).__name__, model.config.to_json_string()], "patches": patch_summary(model),
            "attention": model.config._attn_implementation, "format": str(parallel.dtype),
            "device": parallel.device.type, "rows": len(rows),
        }  # fmt: skip
        hashed.update(json.dumps(facts, sort_keys=True).encode())
        for name, tensor in bare.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and id(tensor) not in trained:
                _update_hash(hashed, name, parallel.full_tensor(tensor))
    for batch in track(rows.batches(objective, size), "Looking for cached reference values", "batches"):
        for name, tensor in tensors_of(batch):
            _update_hash(hashed, name, tensor)
    return hashed.hexdigest()


def tensors_of(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch and of nested batches, ordered by name."""
    for name in sorted(batch):
        if isinstance(batch[name], Mapping):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in tensors_of(batch[name]))
        elif isinstance(batch[name], Tensor):
            yield name, batch[name]


def _update_hash(hashed: Any, name: str, tensor: Tensor) -> None:
    hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    hashed.update(values)
