"""Evaluation by several processes with different numbers of batches.

In: the batches of this rank. Out: the same number on every rank, because a forward pass may need all ranks (with
sharded weights) and gathering always does. A rank that has run out is lent a batch, which does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from burnish.core.types import Engine


def in_step(batches: Iterable[Any], engine: Engine) -> Iterator[tuple[Any, bool, bool]]:
    """Yield (batch, whether it is this rank's own and counts, whether all ranks are at their last one)."""

    def is_there(batch: Any) -> Tensor:
        """() the number of ranks that have a batch, so that one without a batch knows that others go on."""
        return engine.sum(torch.tensor(float(batch is not None), device=engine.device))

    iterator = iter(batches)
    lent = current = next(iterator, None)
    num_ranks = is_there(current)
    if 0 < num_ranks < engine.world_size:  # fewer rows than ranks: a rank never had a batch of its own
        lent = next(batch for batch in engine.gather_objects(current) if batch is not None)
    while num_ranks > 0:
        following = None if current is None else next(iterator, None)
        num_ranks = is_there(following)
        yield (lent if current is None else current), current is not None, not num_ranks
        current = following
        lent = lent if following is None else following


def no_rows_of(values: Any) -> Any:
    """Remove the rows of tensors, also in tuples, lists and dicts, for a batch that does not count."""
    if isinstance(values, Tensor):
        return values[:0] if values.dim() else values.new_empty(0)
    if isinstance(values, list | tuple):
        return type(values)(no_rows_of(value) for value in values)
    if isinstance(values, dict):
        return {name: no_rows_of(value) for name, value in values.items()}
    return values
