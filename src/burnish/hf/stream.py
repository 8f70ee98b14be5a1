"""What comes next, from any loader: the groups of an epoch, with a cursor that resumes.

``EpochOrder`` is the sampler of the Trainer's own loaders: the order is a function of (seed, epoch), and it starts
anywhere, so that a resumed run reads no row twice. A loader that a user made is gone through as it comes; on resume the
batches that were used are passed over, with the generator where it stood when the epoch began.

Position is counted in micro-batches of this rank: every rank has as many in an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from burnish.core.types import IGNORE_INDEX, Batch, Group
from burnish.data.stream import Cut, order_of


class EpochOrder(Sampler[int]):
    """The items of this rank in the order of their use.

    Args:
        num_items: in the data set, over all ranks.
        cut: how a step is cut and dealt; ``drop_last`` leaves out what does not fill a micro-batch of every rank.
        seed: of the order; ``strategy`` and ``lengths`` as in ``data.stream.order_of``.
    """

    def __init__(
        self, num_items: int, cut: Cut, seed: int, strategy: str = "random", lengths: Sequence[int] | None = None
    ) -> None:
        self.num_items, self.cut, self.seed = num_items, cut, seed
        self.strategy, self.lengths = strategy, lengths
        self.epoch = 0
        self.start = 0  # micro-batches of the epoch that are passed over

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def initial_seed(self) -> int:
        return self.seed

    def __len__(self) -> int:
        """Items of this rank in a whole epoch."""
        return len(self._mine(range(self._used)))

    def __iter__(self) -> Iterator[int]:
        per_step = self.cut.batch_size * self.cut.accumulation
        order = order_of(self.num_items, self.seed, self.epoch, self.strategy, self.lengths, per_step)
        mine, start = self._mine(order[: self._used]), self.start
        self.start = 0
        self.epoch += 1  # unless it is told, as where a user's own loader goes through this one
        return iter(mine[start * self.cut.batch_size :])

    @property
    def _used(self) -> int:
        across = self.cut.batch_size * self.cut.world_size
        return self.num_items - (self.num_items % across if self.cut.drop_last else 0)

    def _mine(self, order: Sequence[int]) -> list[int]:
        return [item for part in self.cut.micro_batches(order) for item in part]


class LoaderStream:
    """The groups of a loader.

    Args:
        loader: gives batches; may have a length, or none.
        accumulation: micro-batches in a group.
        total: micro-batches in an epoch: ``len(loader)``, or for an endless one those of the whole run.
        count: batch -> (rows, tokens) for the meter.
        on_empty: called where an epoch of a loader without length gives nothing at all.
    """

    def __init__(
        self, loader: Any, accumulation: int, total: int, count: Callable[[Batch], tuple[int, int]],
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.loader, self.accumulation, self.total, self.count = loader, accumulation, total, count
        self.on_empty = on_empty
        self.epoch, self.position = 0, 0
        self.generator_at_start: Tensor | None = None

    def groups(self) -> Iterator[Group]:
        """From the cursor to the end of the epoch."""
        start = used = self.position
        batches = iter(()) if self.is_used_up else self._batches()
        while used < self.total:
            group = list(islice(batches, min(self.accumulation, self.total - used)))
            if not group:
                break
            used += len(group)
            counts = [self.count(batch) for batch in group]
            is_last = used >= self.total
            yield Group(
                group,
                cursor={"epoch": self.epoch, "position": used},
                epoch=self.epoch + min(used / self.total, 1.0),
                num_rows=sum(rows for rows, _ in counts),
                num_tokens=sum(tokens for _, tokens in counts),
            )
            if is_last:
                return
        if used == start == 0:
            self.on_empty()
        self.position = self.total

    def advance(self, group: Group) -> None:
        self.epoch, self.position = group.cursor["epoch"], group.cursor["position"]

    @property
    def is_used_up(self) -> bool:
        return self.position >= self.total

    def end_epoch(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "generator": self.generator_at_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.generator_at_start = state.get("generator")

    def _batches(self) -> Iterator[Batch]:
        """The loader's batches from the cursor on.

        To make an iterator draws from the global generator (torch's loaders take the seed of their workers from it, and
        ``RandomSampler`` its order). Where an epoch goes on, it is drawn from as it stood when the epoch began, and put
        back, so that dropout after a resume is what it would have been.
        """
        set_epoch(self.loader, self.epoch)
        order = order_in(self.loader)
        if order is not None:
            order.start = self.position
        if self.position == 0:
            self.generator_at_start = torch.get_rng_state()
            return self._filled(iter(self.loader))
        now = torch.get_rng_state()
        if self.generator_at_start is not None:
            torch.set_rng_state(self.generator_at_start)
        rest = iter(self.loader)
        if order is None:
            for _ in islice(rest, self.position):
                pass
        torch.set_rng_state(now)
        return self._filled(rest)

    def _filled(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """``batches``, and blanks where the last rows of an epoch did not reach this rank."""
        made, last = self.position, None
        for last in batches:
            made += 1
            yield last
        order = order_in(self.loader)
        if order is not None and last is not None:
            for _ in range(self.total - made):
                yield {**last, "labels": torch.full_like(last["labels"], IGNORE_INDEX)}


def order_in(loader: Any) -> EpochOrder | None:
    """The ``EpochOrder`` that a loader goes by, if it is one of the Trainer's own."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, EpochOrder) else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell everything in a loader that asks for it which epoch begins."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    listeners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None),
                 getattr(loader, "dataset", None)]  # fmt: skip
    seen: set[int] = set()
    for listener in listeners:
        if hasattr(listener, "set_epoch") and id(listener) not in seen:
            seen.add(id(listener))
            listener.set_epoch(epoch)


def num_batches(loader: Any) -> int | None:
    """Micro-batches of this rank in an epoch; None where the loader cannot say."""
    order = order_in(loader)
    if order is not None:
        across = order.cut.batch_size * order.cut.world_size
        return -(-order._used // across)
    try:
        return len(loader)
    except TypeError:
        return None
