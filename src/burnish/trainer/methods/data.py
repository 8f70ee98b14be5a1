"""The methods of a ``Trainer`` for data; see ``data/loaders.py`` and ``data/torch_loader.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import RemoveColumnsCollator

from burnish.trainer import inspection, training
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.data import loaders
from burnish.trainer.data.in_step import tensors_by_name
from burnish.trainer.methods.loss import LossMethods
from burnish.trainer.notes import logger


class DataMethods(LossMethods):
    """Loaders of training and evaluation, their rows and steps."""

    @property
    def _accumulation(self) -> int:
        """Micro-batches per step. More of them if the micro-batch size was reduced, so that the rows per step stay
        the same."""
        rows: int = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return -(-rows // self._train_batch_size)

    _inner_steps = 1
    """Optimizer steps per step batch (``Objective.inner_steps``)."""

    @property
    def _rows_per_step(self) -> int:
        return self._train_batch_size * self._accumulation * self._parallel.world_size

    def get_train_dataloader(self) -> Any:
        """Batches of the training set. Override it to return your own loader, which is used unchanged."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self._get_dataloader(
            dataset=self.train_dataset, description="Training", batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler, is_training=True,
        )  # fmt: skip

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of an evaluation set: the given one, the one of that name, or the Trainer's own."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self._eval_dataloaders and self.args.dataloader_persistent_workers:
            return self._eval_dataloaders[key]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        loader = self._get_dataloader(
            dataset=dataset, description="Evaluation", batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler, dataloader_key=key,
        )  # fmt: skip
        if self.args.dataloader_persistent_workers:
            self._eval_dataloaders[key] = loader
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._get_dataloader(
            dataset=test_dataset, description="test", batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
        )  # fmt: skip

    def _loader_of(self, get_dataloader: Callable[..., Any], *dataset: Any) -> Any:
        """The loader that ``train``, ``evaluate`` or ``predict`` reads. A subclass may use other batches than those of
        the loaders that a script asks for."""
        return get_dataloader(*dataset)

    @property
    def _collate_for_loader(self) -> Callable[[list[Any]], Any]:
        return self.data_collator

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Batches of a dataset. ``dataloader_key`` has no effect: ``get_eval_dataloader`` keeps the loaders."""
        collate = self._collate_for_loader
        if loaders.is_datasets_set(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        sampled = sampler_fn is not None and not isinstance(dataset, torch.utils.data.IterableDataset)
        sampler = call_with_accepted(sampler_fn, dataset) if sampled else None
        return loaders.make_loader(dataset, collate, batch_size, self.args, self._parallel, sampler, is_training)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The sampler for training. A subclass may return another one."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        strategy = self.args.train_sampling_strategy
        return self._sampler_for(dataset, strategy, self._train_batch_size, self._accumulation)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """The sampler for an evaluation set: sequential, or by length if training is."""
        by_length = self.args.train_sampling_strategy == "group_by_length"
        strategy = "group_by_length" if by_length else "sequential"
        return self._sampler_for(eval_dataset, strategy, self.args.eval_batch_size, 1)

    def _sampler_for(self, dataset: Any, strategy: str, batch_size: int, accumulation: int) -> Any:
        return loaders.order_of_rows(
            dataset, strategy, batch_size, accumulation, self.args, self._parallel, self.processing_class
        )

    def num_examples(self, dataloader: Any) -> int:
        """Number of rows of a loader's set; if unknown, its batches times the batch size."""
        return loaders.num_rows_of(dataloader, self.args.per_device_train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Number of rows per step, over its micro-batches and all processes."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._parallel.world_size)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int, int]:
        """The numbers of steps and rows of a training over ``dataloader`` (``loaders.training_numbers``)."""
        plan = training.steps_of_loader(dataloader, self.args, self._accumulation, self._inner_steps)
        rows = self.get_total_train_batch_size(args)
        return loaders.training_numbers(dataloader, plan, args, rows, self.num_examples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and () the number of their labels over all processes, or None without labels.

        An override may take other batches from the iterator, or count differently: a loss that uses
        ``num_items_in_batch`` is divided by the returned number.
        """
        samples = list(islice(epoch_iterator, num_batches))
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None) -> Any:
        """() the number of labels of micro-batches over all processes, or None without labels."""
        if not batch_samples or not isinstance(tensors_by_name(batch_samples[0]).get("labels"), Tensor):
            return None
        return self._parallel.sum(
            torch.stack([self._num_items(self._prepare_input(one)) for one in batch_samples]).sum()
        )

    def _scripted_batch_samples(self, batches: Iterator[Any], num_batches: int) -> list[Any]:
        """The micro-batches of the next step, using an override of ``get_batch_samples``."""
        device = self._parallel.device
        samples: list[Any]
        samples, self._scripted_num_items = call_with_accepted(self.get_batch_samples, batches, num_batches, device)
        return samples

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = inspection.model_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A ``datasets.Dataset`` without the columns that the model does not accept. ValueError if none is left."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return loaders.without_unused(dataset, self._signature_columns or [], type(self.model).__name__, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """A collator that drops the columns that the model does not accept from each row."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        columns, name = self._signature_columns or [], type(self.model).__name__
        return RemoveColumnsCollator(data_collator, columns, logger, name, description)


def call_with_accepted(method: Callable[..., Any], *args: Any) -> Any:
    """Call ``method`` with those of the arguments that it takes. Overrides for earlier versions take fewer."""
    signature = inspect.signature(method)
    for number in range(len(args), -1, -1):
        try:
            signature.bind(*args[:number])
        except TypeError:
            continue
        return method(*args[:number])
    return method(*args)
