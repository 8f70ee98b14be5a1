"""Data streams with a state: an ``IterableDataset`` of ``datasets``, a script's own set, or a loader.

In: the training loader. Out: the object whose ``state_dict`` is saved in checkpoints, so that a resumed run does not
read used rows again; or None. Also None if the state would not reproduce the rows: it does not include a shuffle buffer
of ``datasets``, nor the position of worker processes. Rows are then read from the beginning of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from burnish.checkpoint.parts import Stateful
from burnish.checkpoint.snapshot import split
from burnish.trainer import notes


def stateful_stream(loader: Any, world_size: int) -> Stateful | None:
    """The loader, or else its set, if it has a state. With several processes only a set that each of them reads from
    the beginning (``RowsOfRank``), because the first process saves the state for all.
    """
    if world_size == 1 and _has_state(loader):
        return loader  # type: ignore[no-any-return]
    dataset = getattr(loader, "dataset", None)
    rows = getattr(dataset, "dataset", None) if world_size > 1 else dataset
    if not _has_state(dataset) or not _has_state(rows) or getattr(loader, "num_workers", None):
        return None
    if not isinstance(rows, IterableDataset) or any(map(_has_unsaved_buffer, _pipeline_stages(rows))):
        return None
    return dataset


def loader_state(stream: Stateful) -> Any:
    """Its state. None, with a warning, if it cannot be saved."""
    try:
        state = stream.state_dict()
        split(state, copy=False)
    except (TypeError, AttributeError) as error:
        notes.warn(
            f"The state of {type(stream).__name__} cannot be saved: {str(error).rstrip('.')}. When the run is resumed, "
            "the dataset restarts from the beginning."
        )
        return None
    return state


def _has_state(stream: Any) -> bool:
    return callable(getattr(stream, "state_dict", None)) and callable(getattr(stream, "load_state_dict", None))


def _pipeline_stages(dataset: Any) -> Iterator[Any]:
    """The stages of an ``IterableDataset`` of ``datasets``, last one first. Empty for other sets."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if stage is not None:
            yield stage
            waiting += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]


def _has_unsaved_buffer(stage: Any) -> bool:
    """Whether a stage buffers rows outside of its state (``IterableDataset.state_dict``, datasets 5.2)."""
    reads_tables = getattr(getattr(stage, "formatting", None), "is_table", False)
    return type(stage).__name__ == "BufferShuffledExamplesIterable" or (reads_tables and hasattr(stage, "function"))
