"""The step batches of an epoch from any loader, with a cursor for resuming.

``EpochOrder`` is the sampler of the Trainer's own loaders. The order is a function of (seed, epoch) and can start at
any position, so a resumed run reads no row twice. A user's loader is iterated unchanged. After a resume it continues
from its own state, if it has one (``stateful.py``). Otherwise the used batches are skipped, after resetting the
generators to their state at the beginning of the epoch: those of Python, numpy and torch, and those of the loader.

The position is counted in micro-batches of this rank. Every rank has the same number of them per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from burnish.checkpoint.parts import Part
from burnish.checkpoint.snapshot import rng_state, set_rng_state
from burnish.data.batches.loader import StepBatchLoader, StepPartition, order_of
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, StepBatch
from burnish.trainer import notes
from burnish.trainer.data.generators import attribute_states, generators_of, set_attribute_states, set_generators
from burnish.trainer.data.in_step import equalize_batches
from burnish.trainer.data.stateful import loader_state, stateful_stream


class EpochOrder(Sampler[int]):
    """The items of this rank in the order of their use.

    Args:
        num_items: number of items in the dataset, over all ranks.
        cut: how a step is divided; ``drop_last`` excludes items that do not fill a micro-batch of every rank.
        seed: seed of the order; ``strategy`` and ``lengths`` as in ``data.batches.loader.order_of``.
        keys: all items of a step -> the key with which the dataset is indexed for each (``keys_of_step`` of a dataset).
    """

    def __init__(
        self, num_items: int, cut: StepPartition, seed: int, strategy: str = "random",
        lengths: Sequence[int] | None = None, keys: Callable[[Sequence[int]], Mapping[int, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.num_items, self.cut, self.seed, self.keys = num_items, cut, seed, keys
        self.strategy, self.lengths = strategy, lengths
        self.epoch = 0
        self.start = 0  # number of micro-batches of the epoch to skip
        self.excluded: list[tuple[int, int, list[int]]] = []
        """(epoch, position in its order, items): these items are excluded from this position on; later items take their
        places."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of items of this rank in a whole epoch."""
        return len(self._items_of_rank(range(self._num_used(self.num_items))))

    def __iter__(self) -> Iterator[Any]:
        order, start = self.of_epoch(self.epoch), self.start
        self.start = 0
        self.epoch += 1  # for a user's own loader with this sampler, which does not set the epoch
        own_items = self._items_of_rank(order)[start * self.cut.micro_batch_size :]
        return iter(own_items) if self.keys is None else self._keys(order, own_items)

    def _keys(self, order: Sequence[int], own_items: Sequence[int]) -> Iterator[Any]:
        """The keys of this rank's items. Each key is computed from all items of its step."""
        per_step = self.across * self.cut.accumulation
        step_of = {item: place // per_step for place, item in enumerate(order)}
        for step, items in groupby(own_items, key=step_of.__getitem__):
            keys = self.keys(order[step * per_step : (step + 1) * per_step]) if self.keys else {}
            yield from (keys[item] for item in items)

    def of_epoch(self, epoch: int) -> list[int]:
        """The items of all ranks in an epoch, in order."""
        per_step = self.cut.micro_batch_size * self.cut.accumulation
        order = order_of(self.num_items, self.seed, epoch, self.strategy, self.lengths, per_step)
        for since, place, items in self.excluded:
            first = place if epoch == since else 0 if epoch > since else len(order)
            order = order[:first] + [item for item in order[first:] if item not in items]
        return order[: self._num_used(len(order))]

    def num_batches(self, epoch: int = 0) -> int:
        """Number of micro-batches of this rank in an epoch; the same on every rank."""
        return -(-(len(self.of_epoch(epoch)) if self.excluded else self._num_used(self.num_items)) // self.across)

    @property
    def across(self) -> int:
        """Number of items of a micro-batch over all ranks."""
        return self.cut.micro_batch_size * self.cut.world_size

    def _num_used(self, num_items: int) -> int:
        return num_items - (num_items % self.across if self.cut.drop_last else 0)

    def _items_of_rank(self, order: Sequence[int]) -> list[int]:
        return [item for part in self.cut.micro_batches(order) for item in part]


class BatchesOfRank(Sampler[list[int]]):
    """This rank's batches of a script's own batch sampler: every ``world_size``-th batch.

    Every rank iterates over all ``batches``, which must therefore have the same order everywhere.
    """

    def __init__(self, batches: Iterable[list[int]], world_size: int, rank: int) -> None:
        self.batches, self.world_size, self.rank = batches, world_size, rank

    def __len__(self) -> int:
        return len(range(self.rank, self.num_batches, self.world_size))

    @property
    def num_batches(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.rank, None, self.world_size)

    def set_epoch(self, epoch: int) -> None:
        listeners: list[Any] = [self.batches, getattr(self.batches, "sampler", None)]
        for listener in listeners:
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)


class RowsOfRank(IterableDataset[Any]):
    """This rank's rows of a set without length, divided as in ``EpochOrder``; each row goes to one rank."""

    def __init__(self, dataset: Any, batch_size: int, world_size: int, rank: int) -> None:
        self.dataset, self.batch_size, self.world_size, self.rank = dataset, batch_size, world_size, rank
        self.number = self.start = self.skipped = 0  # rows read; row to continue from; rows before this one are used

    def __iter__(self) -> Iterator[Any]:
        (first, skipped), self.start, self.skipped = (self.start, self.skipped), 0, 0
        for number, row in enumerate(self.dataset, first):
            self.number = number + 1
            if number // self.batch_size % self.world_size == self.rank and number >= skipped:
                yield row

    def state_dict(self) -> dict[str, Any]:
        """The state of rank 0. Other ranks load it as well and skip rows of completed steps."""
        return {"number": self.number, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        across = self.batch_size * self.world_size
        self.start, self.skipped = state["number"], -(-state["number"] // across) * across
        self.dataset.load_state_dict(state["dataset"])

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class PaddingBatch(dict[str, Any]):
    """A batch without items, for a rank that has no more rows while the others do, because all ranks must sync
    gradients.
    """


class GeneratorsOfRank:
    """The generators of a rank's loader as a part of a checkpoint."""

    def __init__(self, loader: TorchLoader) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.generator_states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_generator_states(state)


class TorchLoader(StepBatchLoader):
    """The step batches of a loader.

    Args:
        loader: yields batches; may have a length or not.
        accumulation: micro-batches per step.
        total: micro-batches per epoch: ``len(loader)``; without a length, those of the whole run.
        count: batch -> (rows, tokens) for the meter.
        on_empty: called if an epoch of a loader without length has no batches.
        parallel: backend of the run.
        pad: converts a batch to one without items.
        take: (batches, number) -> the micro-batches of a step. Default: the next ones.
    """

    def __init__(
        self, loader: Any, accumulation: int, total: int, count: Callable[[Batch], tuple[int, int]],
        on_empty: Callable[[], None], parallel: Parallel, pad: Callable[[Batch], PaddingBatch],
        take: Callable[[Iterator[Batch], int], list[Batch]] | None = None,
    ) -> None:  # fmt: skip
        self.parallel = parallel
        self.take = take or (lambda batches, number: list(islice(batches, number)))
        self.loader, self.accumulation, self.total, self.count = loader, accumulation, total, count
        self.on_empty, self.pad = on_empty, pad
        self.drawn = 0  # number of micro-batches read from the loader
        self.generator_at_start: Tensor | None = None
        self.generators_at_start: dict[str, Any] | None = None
        self.own_generators: list[Tensor] = []  # loaded states of ``generators_of``, until an epoch begins with them
        self.attribute_states: dict[str, Any] = {}  # loaded ones of collator and dataset, until reading continues
        self.source = stateful_stream(loader, parallel.world_size)
        self.source_state: Any = None  # state of the source at ``position``, until reading continues from there

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the step batches from the cursor to the end of the epoch."""
        start, used, total = self.position, self.position, self.length
        self.drawn = start
        batches = iter(()) if start >= total else self._count_batches(self._batches())
        while used < total:
            before = used
            micro_batches = self.take(batches, min(self.accumulation, total - used))
            used = self.drawn
            if not micro_batches:
                break
            counts = [(0, 0) if isinstance(batch, PaddingBatch) else self.count(batch) for batch in micro_batches]
            is_last = used >= total
            yield StepBatch(
                micro_batches,
                cursor={"epoch": self.epoch, "position": used},
                epoch=self.epoch + min(used / total, 1.0),
                indices=RowIndicesOfStep(order_in(self.loader), self.epoch, before, used),
                num_rows=sum(rows for rows, _ in counts),
                num_tokens=sum(tokens for _, tokens in counts),
            )
            if is_last:
                return
        if used == start == 0:
            self.on_empty()
        self.position = total

    def _count_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.drawn += 1
            yield batch

    @property
    def length(self) -> int:
        """Number of micro-batches of this epoch, without excluded items."""
        order = order_in(self.loader)
        return order.num_batches(self.epoch) if order is not None and order.excluded else self.total

    def exclude(self, indices: Sequence[int]) -> None:
        order = order_in(self.loader)
        assert order is not None  # runs with other loaders do not roll back
        order.excluded.append((self.epoch, self.position * order.across, list(indices)))

    @property
    def parts(self) -> Mapping[str, Part]:
        """The random generators of each rank, if there are several. ``state_dict`` contains those of rank 0, with which
        a run with another number of ranks continues."""
        if self.parallel.world_size == 1:
            return {}
        return {"loader_rng": Part(GeneratorsOfRank(self), "loader_rng", on_each_rank=True)}

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), **self.generator_states()}
        order = order_in(self.loader)
        if order is not None and order.excluded:
            state["left_out"] = order.excluded
        if self.source is not None and 0 < self.position == self.drawn < self.length:
            state["source"] = loader_state(self.source)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.load_generator_states(state)
        self.source_state = state.get("source")
        order, left_out = order_in(self.loader), [tuple(entry) for entry in state.get("left_out", ())]
        if order is not None and len(left_out) > len(order.excluded):  # a run that rolls back knows later ones, too
            order.excluded = left_out

    def generator_states(self) -> dict[str, Any]:
        """The states of the random generators of this rank's loader, now and at the beginning of the epoch."""
        states: dict[str, Any] = {"generator": self.generator_at_start}
        if self.generators_at_start is not None:
            states["generators"] = self.generators_at_start
        if own := [generator.get_state() for generator in generators_of(self.loader)]:
            states["own_generators"] = own
        if attributes := attribute_states(self.loader):
            states["attributes"] = attributes
        return states

    def load_generator_states(self, states: Mapping[str, Any]) -> None:
        """Keep saved states until an epoch is read from its cursor."""
        self.generator_at_start = states.get("generator")
        self.generators_at_start, self.own_generators = states.get("generators"), states.get("own_generators", [])
        self.attribute_states = states.get("attributes", {})

    def _batches(self) -> Iterator[Batch]:
        """Yield the loader's batches from the cursor on.

        Creating an iterator draws from the global generator (torch's loaders draw the seed of their workers from it,
        and ``RandomSampler`` its order). When an epoch is resumed, all generators are set to their states at the
        beginning of the epoch for this. The global ones are restored afterwards, so that dropout is the same as without
        the interruption.
        """
        set_epoch(self.loader, self.epoch)
        order = order_in(self.loader)
        if order is not None:
            order.start = self.position
        own, self.own_generators = self.own_generators, []
        attributes, self.attribute_states = self.attribute_states, {}
        if self.position == 0:
            set_generators(self.loader, own)
            set_attribute_states(self.loader, attributes)
            self.generator_at_start = torch.get_rng_state()
            if order is None:
                states = [generator.get_state() for generator in generators_of(self.loader)]
                self.generators_at_start = {**rng_state(), "own": states, "attributes": attribute_states(self.loader)}
            return self._with_padding_batches(self._in_step(iter(self.loader)))
        now = rng_state()
        if self.generators_at_start is not None:
            set_rng_state(self.generators_at_start)
            set_generators(self.loader, self.generators_at_start["own"])
            set_attribute_states(self.loader, self.generators_at_start.get("attributes", {}))
        elif self.generator_at_start is not None:
            torch.set_rng_state(self.generator_at_start)
        is_resuming = self._restore_state()
        rest = self._in_step(iter(self.loader))
        if order is None and not is_resuming:
            notes.warn(
                f"The first {self.position} micro-batches of the epoch are loaded and skipped. To avoid this, "
                "implement state_dict and load_state_dict in the dataset or data loader."
            )
            for _ in islice(rest, self.position):
                pass
        set_rng_state(now)
        if is_resuming:  # the dataset or loader has set its own generators, but not those of the collator
            attributes = {path: state for path, state in attributes.items() if path.startswith("collate_fn.")}
        set_attribute_states(self.loader, attributes)
        return self._with_padding_batches(rest)

    def _restore_state(self) -> bool:
        """Restore the state of the loader or its dataset. Returns False if it has to be read from the beginning."""
        state, self.source_state = self.source_state, None
        if state is None or self.source is None:
            return False
        self.source.load_state_dict(state)
        self.drawn = self.position
        return True

    def _in_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a loader without length, the same number on every rank."""
        if self.parallel.world_size == 1 or num_batches(self.loader) is not None:
            return batches
        return (batch if is_own else self.pad(batch) for batch, is_own in equalize_batches(batches, self.parallel))

    def _with_padding_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield ``batches``, and padding batches if this rank has none of the last rows of an epoch."""
        num_batches, last = self.position, None
        for last in batches:
            num_batches += 1
            yield last
        if is_divided_by_rank(self.loader):
            for _ in range(self.length - num_batches):
                last = self.loader.collate_fn([self.loader.dataset[0]]) if last is None else last
                yield self.pad(last)


class RowIndicesOfStep(Sequence[int]):
    """The rows of a step over all ranks, by their index in the set. Empty for a script's own loader.

    They are computed on demand, once, which happens after a failed step.
    """

    def __init__(self, order: EpochOrder | None, epoch: int, first: int, end: int) -> None:
        self.order, self.epoch, self.first, self.end = order, epoch, first, end

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._indices[index]

    @cached_property
    def _indices(self) -> list[int]:
        if self.order is None:
            return []
        return self.order.of_epoch(self.epoch)[self.first * self.order.across : self.end * self.order.across]


def is_divided_by_rank(loader: Any) -> bool:
    """Whether burnish divides the rows of ``loader`` between ranks, so that each rank knows its number of
    micro-batches.
    """
    return order_in(loader) is not None or isinstance(getattr(loader, "batch_sampler", None), BatchesOfRank)


def order_in(loader: Any) -> EpochOrder | None:
    """The ``EpochOrder`` of one of the Trainer's own loaders; None for others."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, EpochOrder) else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch in every part of a loader that has ``set_epoch``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None),
             getattr(loader, "dataset", None)]  # fmt: skip
    listeners = {id(part): part for part in parts if hasattr(part, "set_epoch")}
    for listener in listeners.values():
        listener.set_epoch(epoch)


def num_batches(loader: Any) -> int | None:
    """Number of micro-batches of this rank in an epoch; None if unknown."""
    order = order_in(loader)
    if order is not None:
        return order.num_batches()
    if is_divided_by_rank(loader):
        partitioned: BatchesOfRank = loader.batch_sampler
        return -(-partitioned.num_batches // partitioned.world_size)
    try:
        return len(loader)
    except TypeError:
        return None
