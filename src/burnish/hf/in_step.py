"""Training and evaluation by several processes with different numbers of batches.

In: the batches of this rank. Out: the same number on every rank, because a forward pass may need all ranks (with
sharded weights) and gathering always does. A rank that has run out is lent a batch, which does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def no_rows_of(values: Any) -> Any:
    """Remove the rows of tensors, also in tuples, lists and dicts, for a batch that does not count."""
    if isinstance(values, Tensor):
        return values[:0] if values.dim() else values.new_empty(0)
    if isinstance(values, list | tuple):
        return type(values)(no_rows_of(value) for value in values)
    if isinstance(values, dict):
        return {name: no_rows_of(value) for name, value in values.items()}
    return values
