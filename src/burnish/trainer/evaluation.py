"""The Trainer's evaluation and prediction: results collected from batches, and metrics of the whole set.

``eval_loss`` is the mean over the items of the set for any batch size (docs/decisions/0003): the mean of each batch is
weighted by its number of labels. Predictions and labels are gathered as in transformers, padded with -100, and passed
to ``compute_metrics`` once, or per batch with ``batch_eval_metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size, nested_detach
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length, speed_metrics

from burnish.loop.protocols import Parallel
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.data.in_step import drop_rows, tensors_by_name


class Gathered:
    """Results of an evaluation over all ranks: losses, predictions, labels, inputs.

    Args:
        compute_metrics: ``EvalPrediction`` -> metrics; None: loss only.
        gather: concatenates the tensors of all ranks, including those in tuples, lists and dicts.
        keeps: whether predictions are kept although ``compute_metrics`` processes them per batch.
    """

    def __init__(
        self, args: TrainingArguments, parallel: Parallel, gather: Callable[[Any], Any],
        compute_metrics: Callable[..., dict[str, Any]] | None, keeps: bool,
    ) -> None:  # fmt: skip
        self.args, self.parallel, self.gather, self.compute_metrics = args, parallel, gather, compute_metrics
        self.keeps = keeps or not args.batch_eval_metrics
        self.losses, self.predictions, self.labels, self.inputs = self.containers = tuple(
            EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100) for _ in range(4)
        )
        self.loss, self.weight = torch.zeros(2, device=parallel.device).unbind()
        self.batch_metrics: dict[str, Any] = {}
        self.num_rows = self.num_batches = 0

    def add(
        self, weight: Tensor, loss: Tensor | None, logits: Any, labels: Any, inputs: Any, kept_inputs: Any,
        is_own: bool, is_last: bool,
    ) -> None:  # fmt: skip
        """Add one batch.

        Args:
            weight: () number of items of the batch.
            loss: () mean over its items, or None.
            logits: predictions.
            labels: labels.
            inputs: the batch.
            given: the part of the batch that ``include_for_metrics`` selects, on the device, or None.
            is_own: false if the batch is padding for this rank, which does not count.
            is_last: whether all ranks are at their last batch.
        """
        rows, weight = find_batch_size(inputs) or 0 if is_own else 0, weight * is_own
        self.num_rows, self.num_batches = self.num_rows + rows, self.num_batches + 1
        if loss is not None:
            counts = torch.isfinite(loss) if self.args.logging_nan_inf_filter else torch.ones_like(weight)
            self.loss = self.loss + torch.where(counts.bool(), loss.detach().float() * weight, 0)
            self.weight = self.weight + weight * counts
        values = (None if loss is None else loss.detach().repeat(max(rows, 1)), logits, labels, kept_inputs)
        losses, logits, labels, kept_inputs = (self.gather(value if is_own else drop_rows(value)) for value in values)
        if self.args.batch_eval_metrics and self.compute_metrics and logits is not None and labels is not None:
            prediction = EvalPrediction(logits, labels, **self._extras(losses, inputs))
            self.batch_metrics = self.compute_metrics(prediction, compute_result=is_last)
        for container, value in zip(self.containers, (losses, logits, labels, kept_inputs), strict=True):
            if self.keeps and value is not None:
                container.add(value)
        every = self.args.eval_accumulation_steps
        if every is not None and self.num_batches % every == 0:
            for container in self.containers:
                container.to_cpu_and_numpy()

    def output(self, dataloader: Any, prefix: str) -> EvalLoopOutput:
        """The predictions, labels and metrics of the set. Names of metrics start with ``prefix``."""
        predictions, labels = self.predictions.get_arrays(), self.labels.get_arrays()
        metrics = dict(self.batch_metrics or {})
        if self.compute_metrics and predictions is not None and labels is not None and not self.args.batch_eval_metrics:
            extras = self._extras(self.losses.get_arrays(), self.inputs.get_arrays())
            metrics = dict(self.compute_metrics(EvalPrediction(predictions, labels, **extras)))
        metrics = denumpify_detensorize(metrics)
        loss, weight = self.parallel.sum(torch.stack([self.loss, self.weight])).tolist()
        if weight > 0:
            metrics[f"{prefix}_loss"] = loss / weight
        elif self.losses.get_arrays() is not None:
            metrics[f"{prefix}_loss"] = float(np.nan)
        metrics = {name: metrics[name] for name in sorted(metrics, key=lambda name: not name.startswith(f"{prefix}_"))}
        named_metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()
        }
        dataset = getattr(dataloader, "dataset", None)
        num_rows = self.parallel.sum(torch.tensor(self.num_rows, device=self.parallel.device))
        return EvalLoopOutput(
            predictions, labels, named_metrics, len(dataset) if has_length(dataset) else int(num_rows)
        )

    def _extras(self, losses: Any, inputs: Any) -> dict[str, Any]:
        included = self.args.include_for_metrics
        return {"losses": losses if "loss" in included else None, "inputs": inputs if "inputs" in included else None}


def has_loss(inputs: Any, label_names: list[str], can_return_loss: bool) -> bool:
    """Whether a model returns a loss for a batch: all labels are present, or it needs none."""
    if label_names:
        return all(tensors_by_name(inputs).get(name) is not None for name in label_names)
    return_loss = tensors_by_name(inputs).get("return_loss")
    return bool(can_return_loss if return_loss is None else return_loss)


def labels_in(inputs: Any, label_names: list[str]) -> Any:
    """The labels of a batch; a tuple if there are several."""
    labels = nested_detach(tuple(tensors_by_name(inputs).get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def ignored_outputs(model: nn.Module) -> list[str]:
    """The outputs of a model that are not predictions."""
    config: Any = getattr(model, "config", None)
    return [] if config is None else list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))


def logits_of(outputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
    """The outputs of a model without the loss and ignored ones; a tuple if there are several."""
    if isinstance(outputs, dict):
        values = tuple(v for k, v in outputs.items() if k not in ignore_keys and not (has_loss and k == "loss"))
    else:
        values = outputs[1:] if has_loss else outputs
    logits = nested_detach(values)
    return logits[0] if len(logits) == 1 else logits


def rates(prefix: str, started: float, num_rows: int, rows_at_once: int) -> dict[str, float]:
    metrics: dict[str, float] = speed_metrics(
        prefix, started, num_samples=num_rows, num_steps=math.ceil(num_rows / rows_at_once)
    )
    return metrics
