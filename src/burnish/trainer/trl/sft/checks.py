"""Checks of ``SFTTrainer``, with TRL's messages where scripts expect them."""

from __future__ import annotations

from typing import Any

from burnish.data.sets.trl import has_turns
from burnish.trainer import notes
from burnish.trainer.data.loaders import is_datasets_set, is_streamed_set
from burnish.trainer.notes import logger
from burnish.trainer.trl.sft.config import SFTConfig


def check_sft_sets(train_dataset: Any) -> None:
    if train_dataset is None:
        raise ValueError("`train_dataset` is required")
    if not is_datasets_set(train_dataset) and not is_streamed_set(train_dataset):
        name = type(train_dataset).__name__
        remedy = _DATASET_OF.get(name, "Use `Dataset.from_list` or `IterableDataset.from_generator`.")
        raise TypeError(f"`train_dataset` must be a `Dataset` or `IterableDataset`. Received: `{name}`. {remedy}")


_DATASET_OF = {
    "DatasetDict": 'Pass one of its splits, such as `dataset["train"]`.',
    "IterableDatasetDict": 'Pass one of its splits, such as `dataset["train"]`.',
    "dict": "Use `Dataset.from_dict(columns)`.",
    "list": "Use `Dataset.from_list(rows)`.",
}
"""Class of another dataset -> how to get a ``Dataset`` from it."""


def check_objective(
    args: SFTConfig, sample: dict[str, Any], data_collator: Any, compute_loss_func: Any, formatting_func: Any,
    has_images: bool = False,
) -> None:  # fmt: skip
    """Raise for arguments that contradict each other or the data."""
    if has_images and (args.packing or args.eval_packing):
        raise ValueError("Packing is not supported for datasets with images. Set `packing=False`.")
    if has_images and formatting_func is not None and (data_collator is None or not skips_preparation(args)):
        raise ValueError(
            "`formatting_func` returns text, so the images of the dataset would be left out. Write the messages to a "
            "column of the dataset, or remove the images."
        )
    is_padding_free = args.padding_free or (args.packing and args.packing_strategy != "wrapped")
    packs_evals = args.eval_packing and args.packing_strategy != "wrapped"
    if (is_padding_free or packs_evals) and data_collator is not None:
        raise ValueError("A custom data collator is not supported with padding-free batches.")
    if args.padding_free and args.per_device_train_batch_size == 1 and not args.packing:
        logger.warning(
            "`padding_free` has no effect with a per_device_train_batch_size of 1, since no padding is needed."
        )
    if args.assistant_only_loss and not any(map(has_turns, sample.values())):
        raise ValueError(
            "You set `assistant_only_loss=True`, but the dataset is not conversational. This option is only supported "
            "for conversational datasets."
        )
    if is_padding_free and not args.packing and args.max_length is not None:
        raise ValueError(
            "With `padding_free=True` and without packing, `max_length` is not enforced. Set `packing=True`, or "
            "truncate the inputs and set `max_length=None`."
        )
    if args.loss_type not in ("nll", "dft"):
        raise ValueError(f"`loss_type` must be nll or dft. Received: {args.loss_type!r}.")
    if args.loss_type == "dft" and compute_loss_func is not None:
        raise ValueError(
            "You passed a `compute_loss_func` together with `loss_type='dft'` to the `SFTTrainer`, but both define "
            "the loss. Remove one of them."
        )
    if formatting_func is not None and learns_completions(args, sample) and not skips_preparation(args):
        raise ValueError(
            "`formatting_func` and `completion_only_loss=True` cannot be combined: formatted text has no separate "
            "completion. Apply the function to the dataset beforehand, or set `completion_only_loss=False`."
        )

    has_completions = {"completion", "completion_mask", "labels"} & sample.keys() or formatting_func is not None
    if args.completion_only_loss and not has_completions and not args.assistant_only_loss:
        notes.warn(
            "`completion_only_loss=True` has no effect: the dataset has no column `completion`. For conversations, set "
            "`assistant_only_loss=True` to train on the responses only."
        )


def learns_completions(args: SFTConfig, sample: dict[str, Any]) -> bool:
    """Whether only completions are trained: as set; by default if rows have a prompt and a completion."""
    if args.completion_only_loss is None:
        return "prompt" in sample and "completion" in sample
    return args.completion_only_loss


def skips_preparation(args: SFTConfig) -> bool:
    return bool(isinstance(args.dataset_kwargs, dict) and args.dataset_kwargs.get("skip_prepare_dataset"))
