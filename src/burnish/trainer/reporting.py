"""Log lines of the Trainer before training and evaluation, and the count of rows and tokens."""

from __future__ import annotations

import torch
from transformers.trainer_pt_utils import find_batch_size

from burnish.data.batches.loader import num_tokens
from burnish.loop.schedule import StepPlan
from burnish.loop.types import Batch
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.data.in_step import tensors_by_name
from burnish.trainer.notes import logger


class Count:
    """Counts rows and tokens of a batch.

    Args:
        how: "no", "all" or "non_padding" tokens.
        main_input: name of the ids in a batch.
        padding: id of the padding token, or None.
    """

    def __init__(self, how: str, main_input: str, padding: int | None) -> None:
        self.how, self.main_input, self.padding = how, main_input, padding
        self._has_warned = False

    def __call__(self, batch: Batch) -> tuple[int, int]:
        tensors = tensors_by_name(batch)
        rows, ids = find_batch_size(batch) or 0, tensors.get(self.main_input)
        if "cu_seq_lens_q" in tensors:  # a padding-free batch is one row of several sequences
            rows = len(tensors["cu_seq_lens_q"]) - 1
        if self.how == "no" or not isinstance(ids, torch.Tensor):
            return rows, 0
        return rows, self._without_padding(batch, ids) if self.how == "non_padding" else ids.numel()

    def _without_padding(self, batch: Batch, ids: torch.Tensor) -> int:
        """Count tokens by the mask, or by the padding id. Without either all tokens are counted, with one warning."""
        if "attention_mask" in batch or "num_tokens" in batch:
            return num_tokens(batch)
        if self.padding is not None:
            return int(ids.ne(self.padding).sum())
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Non-padding tokens cannot be counted, so all tokens are counted: the batches have no attention_mask, "
                "and the processing class has no pad_token_id."
            )
        return ids.numel()


def announce_training(args: TrainingArguments, plan: StepPlan, num_rows: int, per_step: int, trainable: int) -> None:
    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {num_rows:,}")
    logger.info(f"  Num Epochs = {plan.num_train_epochs:,}")
    logger.info(f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}")
    logger.info(f"  Total train batch size (w. parallel, distributed & accumulation) = {per_step:,}")
    logger.info(f"  Gradient Accumulation steps = {args.gradient_accumulation_steps}")
    logger.info(f"  Total optimization steps = {plan.max_steps:,}")
    logger.info(f"  Number of trainable parameters = {trainable:,}")


def announce_evaluation(description: str, num_rows: int | str, batch_size: int) -> None:
    logger.info(f"\n***** Running {description} *****")
    logger.info(f"  Num examples = {num_rows}")
    logger.info(f"  Batch size = {batch_size}")
