"""Training and evaluation by several processes with different numbers of batches.

In: the batches of this rank. Out: the same number on every rank, because a forward pass may need all ranks (with
sharded weights) and gathering always does. A rank that has run out is lent a batch, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from burnish.core.protocols import Engine


def in_step(batches: Iterable[Any], engine: Engine) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is this rank's own and counts). No batch is drawn before it is asked for."""
    iterator, lent, is_there = iter(batches), None, True
    while True:
        batch = next(iterator, None) if is_there else None
        is_there = batch is not None
        num_ranks = engine.sum(torch.tensor(float(is_there), device=engine.device))
        if not num_ranks > 0:
            return
        if lent is None and num_ranks < engine.world_size:  # fewer rows than ranks: a rank never had a batch of its own
            lent = next(one for one in engine.gather_objects(batch) if one is not None)
        lent = batch if is_there else lent
        yield lent, is_there


def with_last(batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool, bool]]:
    """Yield what ``in_step`` yields, and whether all ranks are at their last batch."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        yield *current, following is None
        current = following


def each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change the tensors in a value, also those in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(each_tensor(item, change) for item in value)
    if hasattr(value, "items"):
        return type(value)({name: each_tensor(item, change) for name, item in value.items()})
    return value


def no_rows_of(values: Any) -> Any:
    """Remove the rows of tensors, for a batch that does not count."""
    return each_tensor(values, lambda tensor: tensor[:0] if tensor.dim() else tensor.new_empty(0))
