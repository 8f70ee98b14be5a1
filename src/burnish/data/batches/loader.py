"""Data loader for training: the step batches of an epoch, in an order that depends on (seed, epoch) only.

The order is global, and a step takes ``rows_per_step`` items of it. If lengths are known, items are distributed over
the ranks so that each has about the same number of tokens. Otherwise micro-batch ``m`` of rank ``r`` takes the items
from ``(m * world_size + r) * micro_batch_size`` on, like accelerate's ``BatchSamplerShard``. A run that resumes with
another number of ranks therefore sees the same items in the same steps, and its position is two numbers: epoch and
position.

A rank without items in the last, incomplete step gets a blank batch with ``num_items`` 0. When streaming, a micro-batch
whose examples all give no row (None) is blank too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any

import torch

from burnish.checkpoint.parts import Stateful
from burnish.config.checks import notes
from burnish.config.options import option
from burnish.data.batches.budget import Budget
from burnish.data.options import DataOptions
from burnish.loop.protocols import Loader
from burnish.loop.types import IGNORE_INDEX, Batch, Row, StepBatch
from burnish.utils.sequences import LazySequence


def ignore_signals(worker: int) -> None:
    """Ignore the signals that stop a run, in a data loader worker. Terminals and schedulers send them to all processes,
    but the main process needs its workers to complete the current step before it saves a checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass
class LoaderOptions:
    """Data order and data loader workers."""

    train_sampling_strategy: str = option(
        "random", "Order of the examples within an epoch.", choices=("random", "sequential", "group_by_length")
    )
    group_by_length: bool = option(
        False, "Group examples of similar length; same as train_sampling_strategy: group_by_length."
    )
    disable_shuffling: bool = option(
        False, "Keep the order of the examples; same as train_sampling_strategy: sequential."
    )
    max_tokens_per_batch: int | None = option(
        None,
        "Maximum number of tokens per micro-batch; each image patch counts as one token. The examples of each step are "
        "split into as few micro-batches as possible; the gradient does not change.", unit="tokens", ge=1,
    )  # fmt: skip
    dataloader_num_workers: int = option(
        0, "Number of worker processes that collate batches in advance. 0: collate in the main process.", ge=0
    )
    dataloader_prefetch_factor: int | None = option(None, "Number of batches that each worker prefetches.", ge=1)
    dataloader_pin_memory: bool = option(True, "Use pinned memory for transfers to a GPU.")
    dataloader_persistent_workers: bool = option(
        False, "Keep worker processes alive between epochs.", ignored="worker processes are started for each epoch."
    )


class ReadAheadChoices(LoaderOptions, DataOptions):
    """Options that control worker processes and prefetching."""


@notes
def loader_notes(options: ReadAheadChoices) -> Iterator[str]:
    """Yield notes on options that have no effect or are reduced."""
    requested, cores = options.dataloader_num_workers, os.cpu_count() or 1
    if options.dataloader_prefetch_factor is not None and not requested:
        yield '"dataloader_prefetch_factor" has no effect without dataloader_num_workers.'
        return
    if options.streaming and requested:
        yield '"dataloader_num_workers" has no effect when streaming: the main process tokenizes and collates.'
        return
    if requested <= cores:
        return
    yield f'"dataloader_num_workers" is reduced from {requested} to {cores}, the number of CPU cores.'


@dataclass(frozen=True)
class StepPartition:
    """Division of an order into steps, micro-batches and ranks.

    Args:
        micro_batch_size: items per micro-batch of one rank.
        accumulation: micro-batches per step.
        world_size: number of ranks.
        drop_last: drop the last items if they do not fill a micro-batch on every rank.
        budget: divides a rank's items of a step into micro-batches, instead of ``micro_batch_size``.
    """

    micro_batch_size: int
    accumulation: int
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    budget: Budget | None = None

    @property
    def rows_per_step(self) -> int:
        return self.micro_batch_size * self.accumulation * self.world_size

    def micro_batches(
        self, chosen: Sequence[int], lengths: Sequence[int] | None = None, patches: Sequence[int] | None = None
    ) -> list[Sequence[int]]:
        """Return this rank's micro-batches of one step; every rank has the same number. Missing items give empty ones.

        Args:
            lengths: tokens of each item, for the budget and for balancing the ranks.
            patches: image patches of each item, for the budget.
        """
        if lengths is None or (self.world_size == 1 and self.budget is None):
            return self._every_nth_micro_batch(chosen)
        if self.world_size == 1:
            return self._split_share(list(chosen), lengths, patches) or [[]]
        shares = [
            self._split_share(share, lengths, patches) for share in balance_over_ranks(chosen, lengths, self.world_size)
        ]
        most = max(1, *map(len, shares))
        own_share = shares[self.rank]
        return [*own_share, *([[]] * (most - len(own_share)))]

    def _every_nth_micro_batch(self, chosen: Sequence[int]) -> list[Sequence[int]]:
        """Return every ``world_size``-th micro-batch, in the order of the items."""
        across = self.micro_batch_size * self.world_size
        starts = range(self.rank * self.micro_batch_size, max(1, -(-len(chosen) // across)) * across, across)
        return [chosen[start : start + self.micro_batch_size] for start in starts]

    def _split_share(
        self, share: Sequence[int], lengths: Sequence[int], patches: Sequence[int] | None
    ) -> list[Sequence[int]]:
        if self.budget is not None:
            return [*self.budget.micro_batches(share, lengths, patches)]
        return [share[start : start + self.micro_batch_size] for start in range(0, len(share), self.micro_batch_size)]


def balance_over_ranks(chosen: Sequence[int], lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Distribute the items of one step over ranks, with about equal numbers of tokens and at most one item difference.

    From longest to shortest, each item goes to the rank with the fewest tokens that has room (Graham 1969, longest
    processing time first, https://doi.org/10.1137/0117039). Each rank's items are sorted from long to short, so that
    micro-batches computed at the same time have similar sizes.
    """
    room = -(-len(chosen) // world_size)
    full_ranks = len(chosen) - (room - 1) * world_size  # ranks that get one more item than the others
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for item in sorted(chosen, key=lambda item: lengths[item], reverse=True):
        may_fill = sum(len(share) == room for share in shares) < full_ranks
        open_ranks = [rank for rank in range(world_size) if len(shares[rank]) < room - (not may_fill)]
        rank = min(open_ranks, key=lambda rank: tokens[rank])
        shares[rank].append(item)
        tokens[rank] += lengths[item]
    return shares


def idle_fraction(steps: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int) -> float:
    """Return the fraction of time that ranks wait for each other, if time is proportional to tokens.

    Args:
        steps: items of each step.
        lengths: tokens of each item.
        world_size: number of ranks.
    """
    num_tokens = num_slots = 0
    for chosen in steps:
        totals = [sum(lengths[item] for item in share) for share in balance_over_ranks(chosen, lengths, world_size)]
        num_tokens += sum(totals)
        num_slots += world_size * max(totals)  # tokens that all ranks compute in the time of the slowest
    return 1 - num_tokens / num_slots if num_slots else 0.0


def order_of(num_items: int, seed: int, epoch: int, strategy: str = "random", lengths: Sequence[int] | None = None,
             items_per_step: int = 1, buffer_size: int | None = None) -> list[int]:  # fmt: skip
    """Return the order of one epoch.

    Args:
        num_items: number of items.
        seed: seed of the run.
        epoch: index of the epoch.
        strategy: "random", "sequential" or "group_by_length".
        lengths: tokens of each item, for "group_by_length".
        items_per_step: items of a step on one rank, for "group_by_length".
        buffer_size: shuffle within blocks of this many consecutive items only.

    "random" is torch's permutation with seed ``seed + epoch``, which is the order that accelerate's
    ``SeedableRandomSampler`` gives a transformers ``Trainer``.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    if strategy == "sequential":
        return list(range(num_items))
    if buffer_size is not None:
        blocks = (range(num_items)[start : start + buffer_size] for start in range(0, num_items, buffer_size))
        shuffled = ((block, torch.randperm(len(block), generator=generator).tolist()) for block in blocks)
        return [block[place] for block, places in shuffled for place in places]
    order: list[int] = torch.randperm(num_items, generator=generator).tolist()
    if strategy == "group_by_length" and lengths is not None:
        return _group_by_length(order, lengths, items_per_step)
    return order


def _group_by_length(order: list[int], lengths: Sequence[int], items_per_step: int) -> list[int]:
    """Group items of similar length: split the shuffled items into blocks of up to 50 batches and sort each block.

    The longest item comes first, so that a run that does not fit into memory fails at once (transformers,
    ``get_length_grouped_indices``).
    """
    block_size = max(1, min(len(order) // (items_per_step * 4), 50)) * items_per_step
    blocks = [order[start : start + block_size] for start in range(0, len(order), block_size)]
    blocks = [sorted(block, key=lambda item: lengths[item], reverse=True) for block in blocks]
    longest = max(range(len(blocks)), key=lambda index: lengths[blocks[index][0]], default=0)
    if blocks:
        blocks[0][0], blocks[longest][0] = blocks[longest][0], blocks[0][0]
    return [item for block in blocks for item in block]


class StepBatchLoader(Loader):
    """Base class: the step batches of an epoch and the position in it, which can be saved and restored.

    Subclasses define ``step_batches``, ``length`` and ``exclude``.
    """

    epoch = 0
    position = 0  # within this epoch, in units of ``length``
    is_in_epoch = is_ended_early = has_short_epochs = False

    @property
    def parts(self) -> Mapping[str, Stateful]:
        return {}

    @property
    def length(self) -> int:
        """Number of items or micro-batches of the current epoch."""
        raise NotImplementedError

    def advance(self, step_batch: StepBatch) -> None:
        self.is_in_epoch = True
        if step_batch.cursor is not None:
            self.epoch, self.position = step_batch.cursor["epoch"], step_batch.cursor["position"]

    @property
    def is_exhausted(self) -> bool:
        return self.position >= self.length

    def end_epoch(self) -> None:
        self.epoch, self.position, self.is_ended_early = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "position": self.position, "is_in_epoch": self.is_in_epoch,
            "is_ended_early": self.is_ended_early, "has_short_epochs": self.has_short_epochs,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        for name in ("is_in_epoch", "is_ended_early", "has_short_epochs"):
            setattr(self, name, state.get(name, False))  # missing in checkpoints of earlier versions


class RowLoader(StepBatchLoader):
    """The step batches of a training set of known length.

    Args:
        items: rows or packs.
        collate: collates items of one micro-batch into a batch on the CPU.
        cut: division of a step into micro-batches and ranks.
        seed: seed of the order.
        options: data loader options.
        lengths: tokens of each item, for "group_by_length" and for a budget.
        patches: image patches of each item, for a budget.
        num_examples: examples in each item, if items are packs.
        keys: all items of a step -> the key of each in ``items``, if a row depends on the others of its step.
        blank_row: the row of a blank micro-batch, with the columns that ``collate`` needs.
        ahead: yields the rows of micro-batches unchanged, and prepares images of later ones in the background.
    """

    def __init__(
        self, items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch], cut: StepPartition, *, seed: int,
        options: LoaderOptions | None = None, lengths: Sequence[int] | None = None, buffer_size: int | None = None,
        keys: Callable[[Sequence[int]], Mapping[int, Any]] | None = None, blank_row: Row | None = None,
        ahead: Callable[[Iterator[Any]], Iterator[Any]] | None = None, patches: Sequence[int] | None = None,
        num_examples: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.items = items
        self.patches = patches
        self.num_examples = num_examples
        self.ahead = ahead
        self.buffer_size = buffer_size
        self.cut = cut
        self.seed = seed
        self.options = options or LoaderOptions()
        self.keys = keys
        self.blank_row = blank_row or BLANK_ROW
        self.collate = collate
        self.lengths = lengths
        self.excluded: frozenset[int] = frozenset()  # skipped items, which keep their places in the order

    @property
    def length(self) -> int:
        """The number of items used in an epoch."""
        across = self.cut.micro_batch_size * self.cut.world_size
        return len(self.items) - (len(self.items) % across if self.cut.drop_last else 0)

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the step batches from the current position to the end of the epoch."""
        epoch, size, across = self.epoch, self.length, self.cut.micro_batch_size * self.cut.world_size
        order = self.order(epoch)[:size]
        starts = range(self.position, size, self.cut.rows_per_step)

        # A generator: without workers, the micro-batches of a long epoch are never in memory at once.
        steps, again = tee(self._partition(order[start : start + self.cut.rows_per_step]) for start in starts)
        batches = self._batches(part or order[:1] for group in again for part in group)
        for start, group in zip(starts, steps, strict=True):
            end = min(start + self.cut.rows_per_step, size)
            indices = self._without_excluded(order[start:end])
            micro_batches = [_without_labels(next(batches)) if not part else next(batches) for part in group]
            if not indices:  # all rows of the step are skipped, so there is no step
                self.position = end
                continue
            yield StepBatch(
                micro_batches,
                cursor={"epoch": epoch, "position": end},
                epoch=epoch + -(-end // across) / -(-size // across),  # an incomplete micro-batch counts as one
                indices=indices,
                num_rows=sum(self._examples_in(part) for part in group),
                num_tokens=sum(num_tokens(batch) for batch, part in zip(micro_batches, group, strict=True) if part),
            )

    def _batches(self, micro_batches: Iterator[Sequence[Any]]) -> Iterator[Batch]:
        """Return the batch of each micro-batch, collated here or by worker processes."""
        items = self.items
        if self.options.dataloader_num_workers == 0 or getattr(items, "is_streamed", False):
            read = (
                items.__getitems__ if isinstance(items, LazySequence) else lambda some: [items[index] for index in some]
            )
            rows: Iterator[Any] = (read(each) for each in micro_batches)
            rows = rows if self.ahead is None else self.ahead(rows)
            return (collate_present(some, self.collate, self.blank_row) for some in rows)
        from torch.utils.data import DataLoader

        return iter(
            DataLoader(
                items,  # type: ignore[arg-type]
                batch_sampler=list(micro_batches),  # type: ignore[arg-type]
                collate_fn=self.collate,
                num_workers=min(self.options.dataloader_num_workers, os.cpu_count() or 1),
                prefetch_factor=self.options.dataloader_prefetch_factor,
                pin_memory=self.options.dataloader_pin_memory and torch.cuda.is_available(),
                generator=torch.Generator(),  # a separate one, which leaves the global random state unchanged
                worker_init_fn=ignore_signals,
            )
        )

    def _partition(self, step: list[int]) -> list[Sequence[Any]]:
        """Return this rank's micro-batches of a step: items, or their keys if a row depends on its step."""
        chosen = self._without_excluded(step)
        micro_batches: list[Sequence[Any]] = self.cut.micro_batches(chosen, self.lengths, self.patches)
        if self.keys is None:
            return micro_batches
        keys = self.keys(chosen)
        return [[keys[item] for item in each] for each in micro_batches]

    def _examples_in(self, part: Sequence[Any]) -> int:
        return len(part) if self.num_examples is None else sum(self.num_examples[item] for item in part)

    def _without_excluded(self, chosen: list[int]) -> list[int]:
        return [item for item in chosen if item not in self.excluded] if self.excluded else chosen

    def order(self, epoch: int) -> list[int]:
        """Return the items of an epoch in order of use; the same on every rank."""
        per_step = self.cut.micro_batch_size * self.cut.accumulation
        strategy = "group_by_length" if self.options.group_by_length else self.options.train_sampling_strategy
        strategy = "sequential" if self.options.disable_shuffling else strategy
        return order_of(len(self.items), self.seed, epoch, strategy, self.lengths, per_step, self.buffer_size)

    def exclude(self, indices: Sequence[int]) -> None:
        self.excluded |= frozenset(indices)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"left_out": sorted(self.excluded)} if self.excluded else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.exclude(state.get("left_out", ()))


BLANK_ROW: Row = {"input_ids": [0, 0], "labels": [IGNORE_INDEX, 0]}
"""The row of a blank micro-batch, whose ``num_items`` is set to 0.

One position has a label, because every rank must take part in the backward pass, which needs a loss.
"""


def collate_present(
    rows: Sequence[Row | None], collate: Callable[[Sequence[Any]], Batch], blank_row: Row = BLANK_ROW
) -> Batch:
    """Collate the rows that are not None. Return a blank micro-batch if there are none."""
    present = [row for row in rows if row is not None]
    return collate(present) if present else _without_labels(collate([blank_row]))


class EvalBatches:
    """The batches of an evaluation set, in row order, divided between ranks. It can be iterated repeatedly."""

    def __init__(
        self, items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch], batch_size: int,
        world_size: int = 1, rank: int = 0, budget: Budget | None = None, lengths: Sequence[int] | None = None,
        patches: Sequence[int] | None = None, num_examples: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.items = items
        self.collate = collate
        cut = StepPartition(batch_size, 1, world_size, rank, budget=budget)
        starts = range(0, len(items), cut.rows_per_step)
        steps = (range(start, min(start + cut.rows_per_step, len(items))) for start in starts)
        self.micro_batches = [each for chosen in steps for each in cut.micro_batches(chosen, lengths, patches)]
        self.num_rows = len(items) if num_examples is None else sum(num_examples)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        for chosen in self.micro_batches:
            batch = self.collate([self.items[index] for index in chosen or [0]])
            yield batch if chosen else _without_labels(batch)


def num_tokens(batch: Batch) -> int:
    """Return the number of tokens of a batch on the CPU, without padding. A shared prefix counts once per row."""
    if "num_tokens" in batch:
        return int(batch["num_tokens"])
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.ne(0).sum())
    ids = batch.get("input_ids")
    return 0 if ids is None else ids.numel()


def _without_labels(batch: Batch) -> Batch:
    """Return a batch of the same shape without labels to train on, including nested batches."""
    blank = {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    for name, value in batch.items():
        if isinstance(value, dict) and "labels" in value:
            blank[name] = _without_labels(value)
    return blank | {"items": torch.zeros_like(batch["items"])} if "items" in batch else blank
