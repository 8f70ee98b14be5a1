"""Iterate over batches on several processes that have different numbers of batches.

In: the batches of this rank. Out: the same number on every rank, because forward passes (with sharded weights) and
gathering are collective operations. A rank without further batches gets a padding batch, which does not count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from burnish.loop.protocols import Parallel


def equalize_batches(batches: Iterable[Any], parallel: Parallel) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is this rank's own and counts). Batches are only drawn on demand."""
    iterator, padding, is_there = iter(batches), None, True
    while True:
        batch = next(iterator, None) if is_there else None
        is_there = batch is not None
        num_ranks = parallel.sum(torch.tensor(float(is_there), device=parallel.device))
        if not num_ranks > 0:
            return
        if padding is None and num_ranks < parallel.world_size:  # fewer rows than ranks: a rank never had its own batch
            padding = next(one for one in parallel.gather_objects(batch) if one is not None)
        padding = batch if is_there else padding
        yield padding, is_there


def mark_last(batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool, bool]]:
    """Yield the items of ``equalize_batches`` with a third value: whether all ranks are at their last batch."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        yield *current, following is None
        current = following


def map_tensors(value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Apply ``change`` to the tensors in a value, including those in tuples, lists and mappings, whose classes are
    kept.

    Args:
        value: a tensor, container or other value.
        change: applied to tensors.
        other: applied to all other values.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, CONTAINERS):
        return map_items(value, lambda item: map_tensors(item, change, other))
    return other(value)


CONTAINERS = (list, tuple, Mapping)
"""Classes of values whose items are tensors or further containers."""


def map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the items of a tuple, list or mapping, whose class is kept."""
    if not isinstance(value, Mapping):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):  # a copy, because its class may have another constructor than dict
        changed = copy.copy(value)
        for name, item in value.items():
            changed[name] = change(item)
        return changed
    return type(value)({name: change(item) for name, item in value.items()})  # type: ignore[call-arg]


def tensors_by_name(batch: Any) -> Mapping[str, Any]:
    """The named values of a batch; empty if a script's collator returns a tuple or custom object."""
    return batch if isinstance(batch, Mapping) else {}


def drop_rows(values: Any) -> Any:
    """Remove the rows of tensors, for a batch that does not count."""
    return map_tensors(values, lambda tensor: tensor[:0] if tensor.dim() else tensor.new_empty(0))
