"""Mix several datasets into one, and split one into two: selection and order of row indices.

For the same seed, the order of interleaved datasets, the rows of a split and the rows of a sample equal those that
LLaMA-Factory gets from datasets 5.2 (``interleave_datasets``, ``Dataset.train_test_split``) and numpy. The algorithms
are reimplemented with numpy's generators, so that examples need not be converted to a table. Tests compare them with
datasets itself.
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
    """Return an iterator over (dataset, row) of the mixed dataset, in order.

    Args:
        lengths: number of rows of each dataset.
        strategy: concat: one dataset after the other. interleave_under: stop when the first dataset is exhausted.
            interleave_over: stop when all rows were used, repeating the shorter datasets.
            interleave_once: each row once; exhausted datasets are skipped.
        probabilities: probability of drawing from each dataset, or None to take turns.
        seed: seed of the draws.
    """
    if strategy == "concat" or len(lengths) < 2:
        return ((index, row) for index, length in enumerate(lengths) for row in range(length))
    if probabilities is None:
        return _in_turn(lengths, strategy)
    return _draw(lengths, strategy, probabilities, seed)


def _in_turn(lengths: Sequence[int], strategy: str) -> Iterator[tuple[int, int]]:
    rounds = min(lengths) if strategy == "interleave_under" else max(lengths)
    for row in range(rounds):
        for index, length in enumerate(lengths):
            if row < length or strategy != "interleave_once":
                yield index, row % length


def _draw(
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
    # numpy requires a sum closer to 1 than that of three times 0.3333333.
    normalized = [probability / sum(probabilities) for probability in probabilities]
    while True:
        yield from generator.choice(len(probabilities), size=_BLOCK, p=normalized).tolist()


def split_rows(num_rows: int, val_size: float, seed: int) -> tuple[list[int], list[int]]:
    """Return (training rows, held-out rows) of a random split.

    Args:
        num_rows: number of rows.
        val_size: a fraction below 1, rounded up to whole rows, or a number of rows.
        seed: seed of the permutation.

    Raises:
        UserError: if no row would be left for training.
    """
    import numpy

    held_out = ceil(val_size * num_rows) if val_size < 1 else int(val_size)
    if held_out >= num_rows:
        what = f"val_size {val_size:g} holds out {held_out} of {num_rows} examples and leaves none for training."
        raise UserError(
            what, remedy="Set a smaller fraction, such as 0.1, or a smaller number of examples.", option="val_size"
        )
    order = numpy.random.default_rng(seed).permutation(num_rows).tolist()
    return order[held_out:], order[:held_out]


def sample_rows(num_rows: int, num_samples: int, generator: RandomState) -> list[int]:
    """Draw ``num_samples`` rows at random: without replacement, then with replacement if there are too few.

    One ``generator``, seeded with the run's seed, serves all datasets of a run. LLaMA-Factory draws from numpy's global
    state; the rows are the same if nothing else has drawn from it.
    """
    chosen: list[int] = generator.permutation(num_rows)[:num_samples].tolist()
    if len(chosen) < num_samples:
        chosen += generator.choice(num_rows, num_samples - len(chosen)).tolist()
    return chosen
