"""Prepare raw datasets for ``SFTTrainer``: convert them to rows.

In: a ``datasets.Dataset`` or ``IterableDataset`` of texts, prompts with completions, conversations, or token ids. Out:
the same dataset with ``input_ids`` and ``labels``, truncated to ``max_length``, or packed.

    formatting_func -> records -> examples -> rows (``prepared.py``) -> packs -> shuffle
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from burnish.config.errors import UserError
from burnish.data.batches.batching import pack
from burnish.data.chat.plain import PlainOptions, PlainTemplate
from burnish.data.images.family import Family
from burnish.data.sets.trl import trl_layout
from burnish.loop.types import IGNORE_INDEX
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.notes import logger
from burnish.trainer.trl.prepared import (
    EncodeRecords,
    column_names,
    first_row,
    hashable_by_class,
    prepare_dataset,
    refuse_transform,
)
from burnish.trainer.trl.sft.config import SFTConfig
from burnish.trainer.trl.vision import MEDIA_READER, refuse_image_columns, with_encoded_images

_ROWS = ("input_ids", "labels")
_MASKS = ("completion_mask", "assistant_masks")


@dataclass
class Preparation:
    """Prepares the training set and all evaluation sets in the same way.

    Args:
        tokenizer: with its EOS token and chat template set.
        args: ``SFTConfig``.
        completion_only: train completions only.
        formatting_func: row -> text, used instead of the row's columns.
        family: family of a vision model, if the datasets contain images.
    """

    tokenizer: Any
    args: SFTConfig
    completion_only: bool
    formatting_func: Callable[[Any], Any] | None = None
    family: Family | None = None

    def __post_init__(self) -> None:
        args = self.args
        options = PlainOptions(
            args.max_length, args.truncation_mode, train_on_prompt=not self.completion_only,
            assistant_only=args.assistant_only_loss,
        )  # fmt: skip
        self.template = PlainTemplate(options, self.tokenizer, self.family)
        self.names = _ROWS if self.family is None else (*_ROWS, "images")
        if args.assistant_only_loss and (note := self.template.note()) is not None:
            logger.warning(note)

    def __call__(self, dataset: Any, name: str, packing: bool) -> Any:
        """Prepare a dataset. Token ids and packs are kept."""
        refuse_transform(dataset)
        if packing and self.args.max_length is None:
            raise ValueError("Packing requires `max_length`. Received: None.")
        dataset = dataset if self.family is None else with_encoded_images(dataset)
        columns = column_names(dataset)
        if self.family is None:
            refuse_image_columns(columns, name)
        if "seq_lengths" in columns or (self.family is not None and {*self.names} <= {*columns}):
            return dataset
        dataset = prepare_dataset(
            dataset, name, self._encode(dataset, name, columns, packing), self.args, self._kept_columns(columns)
        )
        if packing:
            return self._pack(dataset, name)
        limit = self.args.max_length
        if limit is not None and is_datasets_set(dataset) and len(dataset) and not has_labels_in_any_row(dataset):
            raise UserError(
                f"No example of the {name} dataset has a token to predict. Received: max_length={limit}.",
                remedy="Increase max_length, or check the labels.",
            )
        return dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset

    def _encode(self, dataset: Any, name: str, columns: list[str], packing: bool) -> EncodeRecords:
        sample, formatting = first_row(dataset), self._formatting(dataset, name, columns)
        if formatting is not None:
            sample = {self.args.dataset_text_field: ""}
        truncate = not packing and self.args.max_length is not None
        is_known = hashable_by_class(self.tokenizer)
        return EncodeRecords(
            trl_layout("texts", sample, self.args.dataset_text_field, None if self.family is None else MEDIA_READER),
            partial(self.template.encode_arrays, truncate=truncate), self.names,
            f"{self.template.fingerprint} {truncate}" if is_known else None, formatting=formatting,
        )  # fmt: skip

    def _kept_columns(self, columns: list[str]) -> list[str]:
        """The script's columns, which its own collator may read."""
        if self.formatting_func is not None or self.family is not None:
            return []
        return [c for c in columns if c not in (*_ROWS, *_MASKS)]

    def _formatting(self, dataset: Any, name: str, columns: list[str]) -> Callable[[Any], str] | None:
        if self.formatting_func is None:
            return None
        if "input_ids" in columns:
            logger.warning(f"`formatting_func` is ignored: the {name} dataset is already tokenized (input_ids).")
            return None
        takes_batches = formats_batches(self.formatting_func, first_row(dataset))
        if takes_batches:
            logger.warning(
                "`formatting_func` that takes a batch and returns a list of texts is deprecated. It should take one "
                "example and return its text."
            )
        return Formatting(self.formatting_func, takes_batches)

    def _pack(self, dataset: Any, name: str) -> Any:
        limit, strategy = self.args.max_length, self.args.packing_strategy
        assert limit is not None
        if drop := [column for column in column_names(dataset) if column not in _ROWS]:
            dataset = dataset.remove_columns(drop)
        num_kept = limit if strategy == "bfd" else None  # number of tokens kept of a row
        if is_datasets_set(dataset) and not any(has_labels(row["labels"][:num_kept]) for row in dataset):
            raise UserError(f"No examples of the {name} dataset are left to train on. Increase `max_length`.")
        if self.args.shuffle_dataset:
            dataset = dataset.shuffle(seed=self.args.seed)
        dataset = Pack(limit, strategy).over(dataset)
        return dataset.shuffle(seed=self.args.seed) if self.args.shuffle_dataset else dataset


@dataclass
class Formatting:
    """A script's function, record -> text; or, as in earlier versions of TRL, batch -> list of texts."""

    function: Callable[[Any], Any]
    takes_batches: bool = False

    def __call__(self, row: Any) -> str:
        text = self.function(_in_batch(row))[0] if self.takes_batches else self.function(row)
        if not isinstance(text, str):
            what = f"formatting_func must return the text of the example as a string. Received: {type(text).__name__}."
            raise UserError(what)
        return text


def formats_batches(function: Callable[[Any], Any], row: Any) -> bool:
    """Return whether a ``formatting_func`` is batched: called with a batch of two rows, it returns two texts.

    A function of one example that returns a list would also return one text for a batch, with lists in it.
    """
    if isinstance(_result_or_none(function, row), str):
        return False
    returned = _result_or_none(function, _in_batch(row, size=2))
    return isinstance(returned, list) and len(returned) == 2 and all(isinstance(text, str) for text in returned)


def _result_or_none(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception:  # any error of a script's function; it is raised when the dataset is prepared
        return None


def _in_batch(row: Any, size: int = 1) -> dict[str, list[Any]]:
    return {name: [value] * size for name, value in row.items()}


@dataclass
class Pack:
    """Packs rows. A row that is longer than a pack is truncated (bfd) or split (bfd_split). "wrapped" concatenates all
    rows to blocks without document boundaries, in which documents attend to each other, as in TRL."""

    BLOCK: ClassVar[int] = 1000  # rows that are packed together, as in TRL
    limit: int
    strategy: str

    def over(self, dataset: Any) -> Any:
        """Return the packs of a dataset; those of a stream are created on access."""
        if not is_datasets_set(dataset):
            return dataset.map(self, batched=True, batch_size=self.BLOCK, remove_columns=[*_ROWS])
        datasets = sys.modules["datasets"]  # already imported by the code that created the dataset
        types = {**dataset.features, "seq_lengths": dataset.features["input_ids"]}  # by default, 64 bits per number
        features = datasets.Features({name: types[name] for name in self.names})
        blocks = [datasets.Dataset.from_dict(self(columns), features) for columns in dataset.iter(self.BLOCK)]
        return datasets.concatenate_datasets(blocks)

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(_ROWS, pair, strict=True)) for pair in zip(*(columns[name] for name in _ROWS), strict=True)]
        rows = [row for row in rows if row["input_ids"]]
        if self.strategy == "bfd":
            rows = [{name: row[name][: self.limit] for name in _ROWS} for row in rows]
        packs: Any = pack(rows, self.limit, self.strategy)
        return {name: [row[name] for row in packs] for name in self.names}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of packs."""
        return _ROWS if self.strategy == "wrapped" else (*_ROWS, "seq_lengths")


def has_labels_in_any_row(dataset: Any) -> bool:
    """Whether a row has a label at a token that is predicted: any but its first."""
    return any(has_labels(row["labels"][1:]) for row in dataset if row.get("labels") is not None)


def has_labels(labels: list[int]) -> bool:
    return any(label != IGNORE_INDEX for label in labels)
