"""What comes next: the groups of an epoch, in an order that depends on (seed, epoch) and on nothing else.

The order is global. A step takes ``rows_per_step`` items of it; micro-batch ``m`` of rank ``r`` takes the items from
``(m * world_size + r) * batch_size`` on, as accelerate's ``BatchSamplerShard`` deals them. So a run that goes on with
another number of ranks sees the same items in the same steps, and to resume is to set two numbers: epoch, position.

In:  items (rows or packs) that can be indexed, a function that collates some of them.
Out: ``Group``s. A rank that the last, incomplete group leaves without items gets a blank batch, which weighs nothing.
     So does a micro-batch all of whose examples give no row (None), where rows are encoded while the loop runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from burnish.core.options import option
from burnish.core.types import IGNORE_INDEX, Batch, Group, Row
from burnish.data.budget import Budget


@dataclass
class StreamOptions:
    """In which order the rows come, and who collates them."""

    train_sampling_strategy: str = option(
        "random", "The order of the rows within an epoch.", choices=("random", "sequential", "group_by_length")
    )
    group_by_length: bool = option(False, "Rows of similar length beside each other: that sampling strategy.")
    max_tokens_per_batch: int | None = option(
        None, "Cut the rows of a step into as few micro-batches as there can be of at most this many tokens; what a "
        "step learns stays the same.", unit="tokens", ge=1,
    )  # fmt: skip
    dataloader_num_workers: int = option(0, "Processes that collate ahead of the loop; 0 collates in the loop.", ge=0)
    dataloader_prefetch_factor: int | None = option(None, "Micro-batches each of them keeps ready.", ge=1)
    dataloader_pin_memory: bool = option(True, "Page-locked memory for the way to a GPU.")
    dataloader_persistent_workers: bool = option(
        False, "Keep those processes between epochs.", ignored="each epoch is dealt to processes of its own."
    )


def stream_notes(options: Any) -> list[str]:
    """What is done other than asked."""
    asked, cores = options.dataloader_num_workers, os.cpu_count() or 1
    if options.dataloader_prefetch_factor is not None and not asked:
        return ['"dataloader_prefetch_factor" has no effect without dataloader_num_workers.']
    if asked <= cores or options.streaming or options.encode_ahead is True:  # those have none: ahead_notes
        return []
    return [f'"dataloader_num_workers" is {asked}; this machine has {cores} cores, so {cores} are used.']


@dataclass(frozen=True)
class Cut:
    """How the order is cut into groups and dealt to ranks.

    Args:
        budget: how a rank cuts its share of a step, instead of every ``batch_size`` items.
    """

    batch_size: int  # items in a micro-batch of one rank
    accumulation: int  # micro-batches in a group
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    budget: Budget | None = None

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    def micro_batches(self, chosen: Sequence[int], lengths: Sequence[int] | None = None) -> list[Sequence[int]]:
        """This rank's share of the items of one step; empty ones where the items do not reach.

        Args:
            lengths: tokens of every item, for the budget.
        """
        across = self.batch_size * self.world_size
        starts = range(self.rank * self.batch_size, max(1, -(-len(chosen) // across)) * across, across)
        dealt = [chosen[start : start + self.batch_size] for start in starts]
        if self.budget is None or lengths is None:
            return dealt
        return [*self.budget.micro_batches([item for part in dealt for item in part], lengths)] or [[]]


def order_of(num_items: int, seed: int, epoch: int, strategy: str = "random", lengths: Sequence[int] | None = None,
             batch_size: int = 1, buffer_size: int | None = None) -> list[int]:  # fmt: skip
    """The order of one epoch.

    Args:
        buffer_size: items that lie together and are shuffled among each other, instead of all.

    "random" is torch's permutation under ``seed + epoch``, which is the order that accelerate's
    ``SeedableRandomSampler`` gives a transformers ``Trainer``.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    if strategy == "sequential":
        return list(range(num_items))
    if buffer_size is not None:
        lying_together = (range(num_items)[start : start + buffer_size] for start in range(0, num_items, buffer_size))
        shuffled = ((part, torch.randperm(len(part), generator=generator).tolist()) for part in lying_together)
        return [part[place] for part, places in shuffled for place in places]
    order: list[int] = torch.randperm(num_items, generator=generator).tolist()
    if strategy == "group_by_length" and lengths is not None:
        return _grouped_by_length(order, lengths, batch_size)
    return order


def _grouped_by_length(order: list[int], lengths: Sequence[int], batch_size: int) -> list[int]:
    """Similar lengths beside each other: the shuffled items in stretches of up to 50 batches, each stretch sorted.

    The longest item of all comes first, so that a run which does not fit into memory fails at once
    (transformers, ``get_length_grouped_indices``).
    """
    stretch = max(1, min(len(order) // (batch_size * 4), 50)) * batch_size
    stretches = [order[start : start + stretch] for start in range(0, len(order), stretch)]
    stretches = [sorted(part, key=lambda item: lengths[item], reverse=True) for part in stretches]
    longest = max(range(len(stretches)), key=lambda index: lengths[stretches[index][0]], default=0)
    if stretches:
        stretches[0][0], stretches[longest][0] = stretches[longest][0], stretches[0][0]
    return [item for part in stretches for item in part]


class RowStream:
    """The groups of a training set that has a length.

    Args:
        items: rows or packs.
        collate: items of one micro-batch -> batch, on the CPU.
        cut: how a step is cut and dealt.
        seed: of the order.
        buffer_size: see ``order_of``.
        lengths: tokens of each item, for "group_by_length" and for a budget.
    """

    def __init__(
        self, items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch], cut: Cut, *, seed: int,
        options: StreamOptions | None = None, lengths: Sequence[int] | None = None, buffer_size: int | None = None,
    ) -> None:  # fmt: skip
        self.items = items
        self.buffer_size = buffer_size
        self.collate = collate
        self.cut = cut
        self.seed = seed
        self.options = options or StreamOptions()
        self.lengths = lengths
        self.epoch = 0
        self.position = 0  # items of this epoch that have been used

    def __len__(self) -> int:
        """Items of an epoch that are used."""
        across = self.cut.batch_size * self.cut.world_size
        return len(self.items) - (len(self.items) % across if self.cut.drop_last else 0)

    def groups(self) -> Iterator[Group]:
        """From the cursor to the end of the epoch."""
        epoch, size = self.epoch, len(self)
        order = self.order(epoch)[:size]
        if isinstance(self.items, GoesAhead):
            self.items.follow(order[self.position :] + order[: self.position])
        starts = range(self.position, size, self.cut.rows_per_step)

        def dealt() -> Iterator[list[Sequence[int]]]:  # one step after the other: of a long epoch, few are made
            cut, lengths = self.cut, self.lengths
            return (cut.micro_batches(order[start : start + cut.rows_per_step], lengths) for start in starts)

        batches = self._batches(part or order[:1] for group in dealt() for part in group)
        for start, group in zip(starts, dealt(), strict=True):
            end = min(start + self.cut.rows_per_step, size)
            made = [_blank(next(batches)) if not part else next(batches) for part in group]
            yield Group(
                made,
                cursor={"epoch": epoch, "position": end},
                epoch=epoch + self._share_of_epoch(end, size),
                num_rows=sum(len(part) for part in group),
                num_tokens=sum(num_tokens(batch) for batch, part in zip(made, group, strict=True) if part),
            )

    def order(self, epoch: int) -> list[int]:
        """The items of an epoch in the order of their use; the same on every rank."""
        per_step = self.cut.batch_size * self.cut.accumulation
        strategy = "group_by_length" if self.options.group_by_length else self.options.train_sampling_strategy
        return order_of(len(self.items), self.seed, epoch, strategy, self.lengths, per_step, self.buffer_size)

    def advance(self, group: Group) -> None:
        self.load_state_dict(group.cursor)

    @property
    def is_used_up(self) -> bool:
        return self.position >= len(self)

    def end_epoch(self) -> None:
        self.load_state_dict({"epoch": self.epoch + 1, "position": 0})

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def _share_of_epoch(self, end: int, size: int) -> float:
        """In micro-batches, as transformers counts it: the last one counts whole even where it is not full."""
        across = self.cut.batch_size * self.cut.world_size
        return -(-end // across) / -(-size // across)

    def _collated(self, part: Sequence[int]) -> Batch:
        if not isinstance(self.items, GoesAhead):
            return self.collate([self.items[index] for index in part])
        return collate_present(self.items.take(part), self.collate)

    def _batches(self, parts: Iterator[Sequence[int]]) -> Iterator[Batch]:
        if self.options.dataloader_num_workers == 0 or isinstance(self.items, GoesAhead):
            return (self._collated(part) for part in parts)
        from torch.utils.data import DataLoader

        return iter(
            DataLoader(
                self.items,  # type: ignore[arg-type]
                batch_sampler=list(parts),  # type: ignore[arg-type]
                collate_fn=self.collate,
                num_workers=min(self.options.dataloader_num_workers, os.cpu_count() or 1),
                prefetch_factor=self.options.dataloader_prefetch_factor,
                pin_memory=self.options.dataloader_pin_memory and torch.cuda.is_available(),
                generator=torch.Generator(),  # its own, so that the global one is not drawn from
            )
        )


@runtime_checkable
class GoesAhead(Protocol):
    """Items that are made while the loop runs; an example that gives none is a gap."""

    def take(self, items: Sequence[int], /) -> list[Row | None]: ...
    def follow(self, order: Sequence[int], /) -> None:
        """The order in which they will be wanted."""
        ...


_NOTHING: Row = {"input_ids": [0, 0], "labels": [IGNORE_INDEX, 0]}
"""What stands in a micro-batch without rows; blanked. One position has a label, since nothing is to be computed of
nothing, and every rank has to take part in a backward pass."""


def collate_present(rows: Sequence[Row | None], collate: Callable[[Sequence[Any]], Batch]) -> Batch:
    """A micro-batch of the rows that are there; a blank one where none is."""
    present = [row for row in rows if row is not None]
    return collate(present) if present else _blank(collate([_NOTHING]))


class EvalBatches:
    """An evaluation set in batches, in its own order, dealt to ranks; can be gone through again and again."""

    def __init__(
        self, items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch], batch_size: int,
        world_size: int = 1, rank: int = 0, budget: Budget | None = None, lengths: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.items = items
        self.collate = collate
        cut = Cut(batch_size, 1, world_size, rank, budget=budget)
        starts = range(0, len(items), cut.rows_per_step)
        steps = (range(start, min(start + cut.rows_per_step, len(items))) for start in starts)
        self.parts = [part for chosen in steps for part in cut.micro_batches(chosen, lengths)]
        self.num_rows = len(items)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Batch]:
        for part in self.parts:
            batch = self.collate([self.items[index] for index in part or [0]])
            yield batch if part else _blank(batch)


def num_tokens(batch: Batch) -> int:
    """Tokens of the rows of a batch on the CPU, padding not counted; what rows share counts for each of them."""
    if "num_tokens" in batch:
        return int(batch["num_tokens"])
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.ne(0).sum())
    ids = batch.get("input_ids")
    return 0 if ids is None else ids.numel()


def _blank(batch: Batch) -> Batch:
    """A batch of the same shape from which nothing is learned."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
