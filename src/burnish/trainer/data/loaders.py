"""The Trainer's data: loaders for training, evaluation and prediction, and the columns that the model accepts.

The order of training rows only depends on (seed, epoch), and equals that of transformers for the same ``data_seed`` or
``seed``. A script's own loader (``accelerator.prepare(DataLoader(...))``), the same in every process, is divided
between processes, so that each row goes to one of them. A single process uses it unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import IterableDatasetShard
from transformers.trainer_utils import has_length, seed_worker

from burnish.data.batches.loader import StepPartition
from burnish.loop.protocols import Parallel
from burnish.loop.schedule import StepPlan
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.data.torch_loader import BatchesOfRank, EpochOrder, RowsOfRank, is_divided_by_rank
from burnish.trainer.notes import logger


class TrainerLoader(DataLoader[Any]):
    """torch's loader with the additional property of accelerate's."""

    world_size = 1

    @property
    def total_batch_size(self) -> int:
        """Number of rows of a batch over all processes."""
        return (self.batch_size or 0) * self.world_size


def make_loader(
    dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int, args: TrainingArguments, parallel: Parallel,
    sampler: Any = None, is_training: bool = False,
) -> TrainerLoader:  # fmt: skip
    """A loader for a set. A set without length is divided between the processes while it is read."""
    parameters: dict[str, Any] = {
        "batch_size": batch_size, "collate_fn": collate, "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and parallel.device.type != "cpu",
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor, "in_order": args.dataloader_in_order,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }  # fmt: skip
    if not isinstance(dataset, IterableDataset):
        parameters |= {"drop_last": args.dataloader_drop_last} | ({} if sampler is None else {"sampler": sampler})
        if is_training:
            parameters["worker_init_fn"] = functools.partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            )
    elif parallel.world_size > 1:
        dataset = RowsOfRank(dataset, batch_size, parallel.world_size, parallel.rank)
    loader = TrainerLoader(dataset, **parameters)
    loader.world_size = parallel.world_size
    return loader


def order_of_rows(
    dataset: Any, strategy: str, batch_size: int, accumulation: int, args: TrainingArguments, parallel: Parallel,
    tokenizer: Any,
) -> EpochOrder | None:  # fmt: skip
    """The order in which this rank reads a set. None if the set has no length.

    Args:
        strategy: "random", "sequential" or "group_by_length".
        batch_size: rows per micro-batch.
        accumulation: micro-batches per step.
        args: the arguments of the Trainer.
        parallel: for rank and world size.
        tokenizer: names the column to measure for "group_by_length".
    """
    if dataset is None or not has_length(dataset):
        return None
    if strategy == "batch_rebalance":
        raise ValueError(
            '`train_sampling_strategy="batch_rebalance"` is not supported and not needed, since batches are '
            'padding-free. Use "group_by_length" or "random".'
        )
    lengths = row_lengths(dataset, args.length_column_name, tokenizer) if strategy == "group_by_length" else None
    partition = StepPartition(batch_size, accumulation, parallel.world_size, parallel.rank, args.dataloader_drop_last)
    seed = int(args.seed if args.data_seed is None else args.data_seed)
    return EpochOrder(len(dataset), partition, seed, strategy, lengths, getattr(dataset, "keys_of_step", None))


def row_lengths(dataset: Any, column: str, tokenizer: Any) -> list[int]:
    """Number of tokens of each row: from the column that has them, or counted."""
    if is_datasets_set(dataset) and column in dataset.column_names:
        return list(dataset[column])
    names = getattr(tokenizer, "model_input_names", None) or ["input_ids"]
    first = dataset[0]
    if not hasattr(first, "keys") or names[0] not in first:
        raise ValueError(
            f"Can only automatically infer lengths for datasets whose items are dictionaries with an '{names[0]}' key."
        )
    return [len(row[names[0]]) for row in (dataset[index] for index in range(len(dataset)))]


def num_rows_of(loader: Any, batch_size: int) -> int:
    """Number of rows of a loader's set; if unknown, its batches times ``batch_size``."""
    try:
        dataset: Any = loader.dataset
        is_split = isinstance(dataset, IterableDatasetShard | RowsOfRank)
        return len(cast(Any, dataset).dataset if is_split else dataset)
    except (AttributeError, TypeError):
        return len(loader) * batch_size


def training_numbers(
    loader: Any, plan: StepPlan, args: TrainingArguments, rows_per_step: int, num_rows: Callable[[Any], int]
) -> tuple[int, int, int, int, int, int, int]:
    """transformers' tuple: epochs (rounded up), steps per epoch, rows, rows of the whole training, rows per step,
    micro-batches per epoch, steps of the whole training.
    """
    if not has_length(loader):
        rows, batches = plan.max_steps * rows_per_step, plan.max_steps * args.gradient_accumulation_steps
        return sys.maxsize, plan.max_steps, rows, rows, rows_per_step, batches, plan.max_steps
    rows = num_rows(loader)
    in_all = plan.max_steps * rows_per_step if args.max_steps > 0 else int(rows * args.num_train_epochs)
    return plan.num_train_epochs, plan.steps_per_epoch, rows, in_all, rows_per_step, len(loader), plan.max_steps


# --- a script's own loader --------------------------------------------------------------------------------------------


def loader_of_rank(loader: DataLoader[Any], parallel: Parallel, seed: int) -> DataLoader[Any]:
    """The loader of this process.

    Args:
        loader: the script's loader.
        parallel: for rank and world size.
        seed: seed of a random order; the same in every process.
    """
    if parallel.world_size == 1 or is_divided_by_rank(loader) or isinstance(loader.dataset, RowsOfRank):
        return loader
    partitioned = TrainerLoader(**_loader_settings(loader), **_rows_of(loader, parallel, seed))
    partitioned.world_size = parallel.world_size
    return partitioned


def _loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a loader, without its dataset and sampler."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers", "in_order",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}


def _rows_of(loader: DataLoader[Any], parallel: Parallel, seed: int) -> dict[str, Any]:
    dataset, size, who = loader.dataset, loader.batch_size, (parallel.world_size, parallel.rank)
    if isinstance(dataset, IterableDataset):
        partitioned = RowsOfRank(dataset, size or 1, *who)
        return {"dataset": partitioned, "batch_size": size, "drop_last": loader.drop_last}
    strategy = _ORDERS.get(type(loader.sampler))
    if size is not None and strategy is not None and type(loader.batch_sampler) is BatchSampler:
        cut = StepPartition(size, 1, *who, loader.drop_last)
        order = EpochOrder(len(dataset), cut, seed, strategy)  # type: ignore[arg-type]
        return {"dataset": dataset, "batch_size": size, "sampler": order, "drop_last": loader.drop_last}
    batches: Any = loader.batch_sampler if loader.batch_sampler is not None else [[n] for n in loader.sampler]
    return {"dataset": dataset, "batch_sampler": BatchesOfRank(batches, *who)}


_ORDERS = {RandomSampler: "random", SequentialSampler: "sequential"}
"""torch's samplers whose order can be recomputed. For others, every process takes its share of batches."""


# --- columns ----------------------------------------------------------------------------------------------------------


def without_unused(dataset: Any, columns: list[str], model_name: str, description: str | None) -> Any:
    """A ``datasets.Dataset`` without the columns that the model does not accept. ValueError if none is left."""
    ignored = [name for name in dataset.column_names if name not in columns]
    if ignored:
        logger.info(f"Columns of the {description} set ignored by {model_name}.forward: {', '.join(ignored)}.")
    if len(ignored) == len(dataset.column_names):
        raise ValueError(
            f"No columns in the dataset match the model's forward method signature: ({', '.join(columns)}). "
            f"The following columns have been ignored: [{', '.join(ignored)}]. Please check the dataset and model. "
            "You may need to set `remove_unused_columns=False` in `TrainingArguments`."
        )
    return dataset.remove_columns(ignored)


def is_datasets_set(dataset: Any) -> bool:
    """Whether it is a ``datasets.Dataset``. Does not import the library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.Dataset)


def is_streamed_set(dataset: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset``. Does not import the library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)
