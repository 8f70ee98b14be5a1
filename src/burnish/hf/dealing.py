"""Division of a script's own loader between processes: ``accelerator.prepare(DataLoader(...))``.

In: a loader over all rows, the same in every process. Out: one over this process's rows, so that each row goes to one
process; the order is common to all. A single process keeps its loader.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from burnish.core.protocols import Engine
from burnish.data.batches.stream import StepPartition
from burnish.hf.stream import DealtBatches, DealtRows, EpochOrder, is_dealt


class TrainerLoader(DataLoader[Any]):
    """torch's loader, with the property that accelerate's adds."""

    world_size = 1

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all processes."""
        return (self.batch_size or 0) * self.world_size


def dealt_to(loader: DataLoader[Any], engine: Engine, seed: int) -> DataLoader[Any]:
    """The loader of this process.

    Args:
        seed: of a random order; the same in every process.
    """
    if engine.world_size == 1 or is_dealt(loader) or isinstance(loader.dataset, DealtRows):
        return loader
    dealt = TrainerLoader(**_as_it_was(loader), **_rows_of(loader, engine, seed))
    dealt.world_size = engine.world_size
    return dealt


def _as_it_was(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a loader, without its rows and their order."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers", "in_order",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}


def _rows_of(loader: DataLoader[Any], engine: Engine, seed: int) -> dict[str, Any]:
    dataset, size, who = loader.dataset, loader.batch_size, (engine.world_size, engine.rank)
    if isinstance(dataset, IterableDataset):
        dealt = DealtRows(dataset, size or 1, *who)
        return {"dataset": dealt, "batch_size": size, "drop_last": loader.drop_last}
    strategy = _ORDERS.get(type(loader.sampler))
    if size is not None and strategy is not None and type(loader.batch_sampler) is BatchSampler:
        cut = StepPartition(size, 1, *who, loader.drop_last)
        order = EpochOrder(len(dataset), cut, seed, strategy)  # type: ignore[arg-type]
        return {"dataset": dataset, "batch_size": size, "sampler": order, "drop_last": loader.drop_last}
    batches: Any = loader.batch_sampler if loader.batch_sampler is not None else [[n] for n in loader.sampler]
    return {"dataset": dataset, "batch_sampler": DealtBatches(batches, *who)}


_ORDERS = {RandomSampler: "random", SequentialSampler: "sequential"}
"""torch's samplers whose order can be computed without them; of others, every process takes its share of batches."""
