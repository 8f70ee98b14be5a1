"""Mixing several data sets to one, and splitting one into two: the choice of rows and their order.

In: the numbers of rows, a seed. Out: indices; nothing here touches a row. The order of interleaved sets, the rows of a
split and of a sample are the ones that LLaMA-Factory gets from datasets 5.2 (``interleave_datasets``,
``Dataset.train_test_split``) and numpy for the same seed. The rules are written out here with numpy's generators, so
that examples need not pass through a table; tests hold them against datasets itself.

Refuses a split that leaves one side empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from numpy.random import RandomState

_BLOCK = 1000
"""Numbers drawn at a time. The order depends on it, because numpy draws a block differently from single numbers."""


def merged_order(
    lengths: Sequence[int], strategy: str, probabilities: Sequence[float] | None, seed: int
) -> Iterator[tuple[int, int]]:
    """(set, row) of the merged set, in order.

    Args:
        strategy: concat: one set after the other. interleave_under: until one of them has no rows left.
            interleave_over: until all rows of all sets were used, the shorter sets several times.
            interleave_once: each row once; sets that have no rows left are skipped.
        probabilities: of drawing from each set, instead of taking turns.
    """
    if strategy == "concat" or len(lengths) < 2:
        return ((index, row) for index, length in enumerate(lengths) for row in range(length))
    if probabilities is None:
        return _in_turn(lengths, strategy)
    return _drawn(lengths, strategy, probabilities, seed)


def _in_turn(lengths: Sequence[int], strategy: str) -> Iterator[tuple[int, int]]:
    rounds = min(lengths) if strategy == "interleave_under" else max(lengths)
    for row in range(rounds):
        for index, length in enumerate(lengths):
            if row < length or strategy != "interleave_once":
                yield index, row % length


def _drawn(
    lengths: Sequence[int], strategy: str, probabilities: Sequence[float], seed: int
) -> Iterator[tuple[int, int]]:
    taken = [0] * len(lengths)
    ends = any if strategy == "interleave_under" else all
    for index in _draws(probabilities, seed):
        if strategy == "interleave_once" and taken[index] >= lengths[index]:
            continue
        yield index, taken[index] % lengths[index]
        taken[index] += 1
        if taken[index] >= lengths[index] and ends(t >= n for t, n in zip(taken, lengths, strict=True)):
            return


def _draws(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    import numpy

    generator = numpy.random.default_rng(seed)
    while True:
        yield from generator.choice(len(probabilities), size=_BLOCK, p=list(probabilities)).tolist()


def split_rows(num_rows: int, val_size: float, seed: int) -> tuple[list[int], list[int]]:
    """(training rows, held-out rows), both in the order of the draw.

    Args:
        val_size: a share below 1, rounded up to whole rows, or a number of rows.

    Raises:
        UserError: if no row would be left on one of the sides.
    """
    import numpy

    held_out = ceil(val_size * num_rows) if val_size < 1 else int(val_size)
    if held_out >= num_rows:
        what = f"val_size {val_size:g} holds out {held_out} of {num_rows} rows and leaves none for training."
        raise UserError(
            what, remedy="Set a smaller fraction, such as 0.1, or a smaller number of examples.", option="val_size"
        )
    order = numpy.random.default_rng(seed).permutation(num_rows).tolist()
    return order[held_out:], order[:held_out]


def sampled(num_rows: int, num_samples: int, generator: RandomState) -> list[int]:
    """Draw ``num_samples`` rows at random: each once, and where there are too few, some of them again.

    ``generator`` is one for all sets of a run, seeded with the run's seed: LLaMA-Factory draws from numpy's global
    state, so the rows are the same where nothing else has drawn from it.
    """
    chosen: list[int] = generator.permutation(num_rows)[:num_samples].tolist()
    if len(chosen) < num_samples:
        chosen += generator.choice(num_rows, num_samples - len(chosen)).tolist()
    return chosen
