"""The Trainer's data: loaders for training, evaluation and prediction, and the columns that the model takes.

The order of training rows is a function of (seed, epoch) alone, and is that of transformers for the same ``data_seed``
or ``seed``. Whatever a subclass returns from ``get_train_dataloader`` is used as it comes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_pt_utils import IterableDatasetShard
from transformers.trainer_utils import RemoveColumnsCollator, has_length, seed_worker
from transformers.utils import logging

from burnish.data.stream import Cut
from burnish.hf.face import Face
from burnish.hf.stream import EpochOrder

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class TrainerLoader(DataLoader[Any]):
    """torch's loader, with the one number that accelerate's adds."""

    world_size = 1

    @property
    def total_batch_size(self) -> int:
        """Rows that all processes take together."""
        return (self.batch_size or 0) * self.world_size


class LoaderMethods(Face):
    """Data."""

    def get_train_dataloader(self) -> Any:
        """Batches of the training set. Override it to give your own; they are used as they come."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of an evaluation set: the one given, the one of that name, or the Trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        kept = self.__dict__.setdefault("_eval_dataloaders", {})
        if key in kept and self.args.dataloader_persistent_workers:
            return kept[key]
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        loader = self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler)
        if self.args.dataloader_persistent_workers:
            kept[key] = loader
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a loader's set; where it cannot say, batches times the micro-batch."""
        try:
            dataset = dataloader.dataset
            return len(dataset.dataset) if isinstance(dataset, IterableDatasetShard) else len(dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * int(self.args.per_device_train_batch_size)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step, over its micro-batches and all processes."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._engine.world_size)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, int, int, int, int]:
        """The numbers of a training over ``dataloader``; nothing is set.

        Returns:
            epochs begun, steps of an epoch, rows, rows of the whole training, rows of a step, micro-batches of an
            epoch, steps of the whole training.
        """
        plan, rows_per_step = self._plan(dataloader), self.get_total_train_batch_size(args)  # type: ignore[attr-defined]
        if not has_length(dataloader):
            rows = plan.max_steps * rows_per_step
            batches = plan.max_steps * args.gradient_accumulation_steps
            return sys.maxsize, plan.max_steps, rows, rows, rows_per_step, batches, plan.max_steps
        rows = self.num_examples(dataloader)
        in_all = plan.max_steps * rows_per_step if args.max_steps > 0 else int(rows * args.num_train_epochs)
        return (
            plan.num_train_epochs, plan.steps_per_epoch, rows, in_all, rows_per_step, len(dataloader), plan.max_steps
        )  # fmt: skip

    def num_tokens(self, train_dl: Any, max_steps: int | None = None) -> int:
        """Tokens of a loader, or of ``max_steps`` of its batches."""
        counts = (batch["input_ids"].numel() for batch in train_dl)
        if max_steps is not None:
            return int(next(counts)) * max_steps
        return int(sum(counts))

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False
    ) -> Any:
        collate = self.data_collator
        if is_datasets_set(dataset):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        args = self.args
        parameters: dict[str, Any] = {
            "batch_size": batch_size, "collate_fn": collate, "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and self._engine.device.type != "cpu",
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor, "in_order": args.dataloader_in_order,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }  # fmt: skip
        if not isinstance(dataset, IterableDataset):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            if sampler is not None:
                parameters["sampler"] = sampler
            parameters["drop_last"] = args.dataloader_drop_last
            if is_training:
                parameters["worker_init_fn"] = functools.partial(
                    seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
                )
        elif self._engine.world_size > 1:
            dataset = IterableDatasetShard(
                dataset, batch_size=batch_size, drop_last=args.dataloader_drop_last,
                num_processes=self._engine.world_size, process_index=self._engine.rank,
            )  # fmt: skip
        loader = TrainerLoader(dataset, **parameters)
        loader.world_size = self._engine.world_size
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training; a subclass may give another sampler."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        strategy = self.args.train_sampling_strategy
        if strategy == "batch_rebalance":
            raise ValueError(
                '`train_sampling_strategy="batch_rebalance"` is not part of burnish: the update does not depend on how '
                'a step is cut, and sequences are not padded against each other. Use "group_by_length" or "random".'
            )
        lengths = self._lengths(dataset) if strategy == "group_by_length" else None
        cut = Cut(
            self._train_batch_size, self._accumulation, self._engine.world_size, self._engine.rank,
            self.args.dataloader_drop_last,
        )  # fmt: skip
        return EpochOrder(len(dataset), cut, self._order_seed, strategy, lengths)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """An evaluation set's own order, or by length where training goes by length."""
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        by_length = self.args.train_sampling_strategy == "group_by_length"
        cut = Cut(
            self.args.eval_batch_size, 1, self._engine.world_size, self._engine.rank, self.args.dataloader_drop_last
        )
        strategy = "group_by_length" if by_length else "sequential"
        lengths = self._lengths(eval_dataset) if by_length else None
        return EpochOrder(len(eval_dataset), cut, self._order_seed, strategy, lengths)

    @property
    def _order_seed(self) -> int:
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _lengths(self, dataset: Any) -> list[int]:
        """Tokens of each row: the column that holds them, or counted."""
        column = self.args.length_column_name
        if is_datasets_set(dataset) and column in dataset.column_names:
            return list(dataset[column])
        names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]
        first = dataset[0]
        if not hasattr(first, "keys") or names[0] not in first:
            raise ValueError(
                "Can only automatically infer lengths for datasets whose items are dictionaries with an "
                f"'{names[0]}' key."
            )
        return [len(row[names[0]]) for row in (dataset[index] for index in range(len(dataset)))]

    # --- columns ------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = list(inspect.signature(base_model(self.model).forward).parameters)
            # Labels may be called label or label_ids: the default collator renames them.
            self._signature_columns = [*names, *dict.fromkeys(["label", "label_ids", *self.label_names])]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A ``datasets.Dataset`` without the columns that the model does not take. ValueError where none is left."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        taken = self._signature_columns or []
        ignored = [name for name in dataset.column_names if name not in taken]
        if ignored:
            name = type(self.model).__name__
            logger.info(f"{name}.forward does not take {', '.join(ignored)} of the {description} set.")
        if len(ignored) == len(dataset.column_names):
            raise ValueError(
                f"No columns in the dataset match the model's forward method signature: ({', '.join(taken)}). "
                f"The following columns have been ignored: [{', '.join(ignored)}]. Please check the dataset and model. "
                "You may need to set `remove_unused_columns=False` in `TrainingArguments`."
            )
        return dataset.remove_columns(ignored)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """A collator that drops, row by row, what the model does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return RemoveColumnsCollator(
            data_collator=data_collator, signature_columns=self._signature_columns, logger=logger,
            description=description, model_name=type(self.model).__name__,
        )  # fmt: skip


def is_datasets_set(dataset: Any) -> bool:
    """Whether it is a ``datasets.Dataset``; the library is not loaded to find out."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.Dataset)


def base_model(model: Any) -> Any:
    """The model inside a peft model, or the model itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and mappings, on ``device``; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if hasattr(value, "items"):
        return type(value)({name: to_device(item, device) for name, item in value.items()})
    return value
