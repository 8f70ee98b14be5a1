"""The Trainer's evaluation and prediction.

``eval_loss`` is the mean over the items of the set, whatever the batch size (docs/decisions/0003): each batch's mean,
weighted by its labels. Predictions and labels are gathered as transformers gathers them, padded with -100, and handed
to ``compute_metrics`` once, or batch by batch under ``batch_eval_metrics``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size, nested_detach
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
    has_length,
    speed_metrics,
)
from transformers.utils import logging

from burnish.engine.options import full_eval_dtype
from burnish.hf.face import Face
from burnish.hf.losses import LossMethods, takes

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class Gathered:
    """What an evaluation keeps of its batches: losses, predictions, labels, inputs."""

    def __init__(self, args: Any) -> None:
        self.losses, self.predictions, self.labels, self.inputs = (
            EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100) for _ in range(4)
        )

    def to_cpu(self) -> None:
        for container in (self.losses, self.predictions, self.labels, self.inputs):
            container.to_cpu_and_numpy()


class EvaluationMethods(LossMethods, Face):
    """Evaluation and prediction."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a set, on one set after the other where there is a dict of them; log; tell the callbacks.

        Returns:
            the metrics, each name beginning with ``metric_key_prefix``, and the epoch.
        """
        is_own = eval_dataset is None
        dataset = self.eval_dataset if is_own else eval_dataset
        if isinstance(dataset, dict):
            together: dict[str, float] = {}
            for name, one in dataset.items():
                together |= self.evaluate(name if is_own else one, ignore_keys, f"{metric_key_prefix}_{name}")
            return together
        self._memory_tracker.start()
        loader = self.get_eval_dataloader(eval_dataset)  # type: ignore[attr-defined]
        started = time.time()
        output = self.evaluation_loop(
            loader, "Evaluation", True if self.compute_metrics is None else None, ignore_keys, metric_key_prefix
        )
        metrics: dict[str, float] = output.metrics
        metrics.update(self._rates(metric_key_prefix, started, output.num_samples))
        self.log(metrics)  # type: ignore[attr-defined]
        self.control = self.callback_handler.call_event(
            "on_evaluate", self.args, self.state, self.control, metrics=metrics
        )
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a set, its labels where it has some, and metrics where it has labels."""
        self._memory_tracker.start()
        loader = self.get_test_dataloader(test_dataset)  # type: ignore[attr-defined]
        started = time.time()
        output = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        output.metrics.update(self._rates(metric_key_prefix, started, output.num_samples))
        self.control = self.callback_handler.call_event(
            "on_predict", self.args, self.state, self.control, metrics=output.metrics
        )
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Go through a loader once. Shared by ``evaluate`` and ``predict``; works without labels too."""
        args = self.args
        only_loss = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._model_for_evaluation(self.model_wrapped)
        self._announce(dataloader, description)
        self.callback_handler.eval_dataloader = dataloader  # type: ignore[attr-defined]
        kept, rows_seen = Gathered(args), 0
        loss_sum, weight_sum = torch.zeros(2, device=self._engine.device).unbind()
        batch_metrics: dict[str, Any] | None = None
        for step, (inputs, is_last) in enumerate(with_last(dataloader)):
            rows = find_batch_size(inputs) or 0
            rows_seen += rows
            weight = self._weight(self._prepare_input(inputs))
            loss, logits, labels = self.prediction_step(model, inputs, only_loss, ignore_keys=ignore_keys)
            if loss is not None:
                counts = torch.isfinite(loss) if args.logging_nan_inf_filter else torch.ones_like(weight)
                loss_sum = loss_sum + torch.where(counts.bool(), loss.detach().float() * weight, 0)
                weight_sum = weight_sum + weight * counts
            main = getattr(self.model, "main_input_name", "input_ids")
            given = self._prepare_input(inputs[main]) if "inputs" in args.include_for_metrics else None
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            losses = None if loss is None else self.accelerator.gather(loss.detach().repeat(max(rows, 1)))
            logits, labels, given = (self.accelerator.gather(value) for value in (logits, labels, given))
            self.control = self.callback_handler.call_event("on_prediction_step", args, self.state, self.control)
            by_batch = args.batch_eval_metrics and self.compute_metrics is not None
            if by_batch and logits is not None and labels is not None:
                prediction = EvalPrediction(logits, labels, **self._extras(losses, inputs))
                batch_metrics = self.compute_metrics(prediction, compute_result=is_last)  # type: ignore[misc]
            is_kept = not args.batch_eval_metrics or description == "Prediction"
            for container, value in zip(vars(kept).values(), (losses, logits, labels, given), strict=True):
                if is_kept and value is not None:
                    container.add(value)
            if args.eval_accumulation_steps is not None and (step + 1) % args.eval_accumulation_steps == 0:
                kept.to_cpu()
        return self._concluded(kept, loss_sum, weight_sum, batch_metrics, dataloader, rows_seen, metric_key_prefix)

    prediction_loop = evaluation_loop

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """One batch without gradients.

        Returns:
            () the mean loss or None, the logits or None, the labels or None; tuples where there are several.
        """
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        return_loss = inputs.get("return_loss")
        has_loss = has_labels or (
            not self.label_names and (self.can_return_loss if return_loss is None else return_loss)
        )
        inputs = self._prepare_inputs(inputs)
        config = getattr(self.model, "config", None)
        if ignore_keys is None:
            ignore_keys = (
                getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if config is not None else []
            )
        labels: Any = None
        if has_loss:
            labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
            labels = labels[0] if len(labels) == 1 else labels
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if has_loss:
                items = self._items(inputs, self._weight(inputs))
                compute = takes(self.compute_loss, "num_items_in_batch")
                if prediction_loss_only and type(self).compute_loss is LossMethods.compute_loss:
                    return compute(model, inputs, num_items_in_batch=items).detach().mean(), None, None
                loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = nested_detach(logits_of(outputs, ignore_keys, has_loss))
        return loss, logits[0] if len(logits) == 1 else logits, labels

    # --- what the loop above uses -------------------------------------------------------------------------------------

    def _model_for_evaluation(self, model: nn.Module) -> nn.Module:
        """Without dropout; in half precision where that is asked for, outside of training only."""
        dtype = full_eval_dtype(self.args)
        if not self.is_in_train and dtype is not None:
            model = model.to(dtype=dtype, device=self._engine.device)
        elif not self.is_in_train and self.place_model_on_device:
            model = model.to(self._engine.device)
        model.eval()
        switch = getattr(self.optimizer, "eval", None)
        if callable(switch):
            switch()
        return model

    def _announce(self, dataloader: Any, description: str) -> None:
        examples = self.num_examples(dataloader) if has_length(dataloader) else "Unknown"  # type: ignore[attr-defined]
        logger.info(f"\n***** Running {description} *****")
        logger.info(f"  Num examples = {examples}")
        logger.info(f"  Batch size = {self.args.eval_batch_size}")

    def _extras(self, losses: Any, inputs: Any) -> dict[str, Any]:
        wanted = self.args.include_for_metrics
        return {"losses": losses if "loss" in wanted else None, "inputs": inputs if "inputs" in wanted else None}

    def _concluded(
        self, kept: Gathered, loss_sum: Tensor, weight_sum: Tensor, batch_metrics: dict[str, Any] | None,
        dataloader: Any, rows_seen: int, prefix: str,
    ) -> EvalLoopOutput:  # fmt: skip
        """The metrics of the set from what was kept of its batches."""
        predictions, labels = kept.predictions.get_arrays(), kept.labels.get_arrays()
        metrics = dict(batch_metrics or {})
        has_both = predictions is not None and labels is not None
        if self.compute_metrics is not None and has_both and not self.args.batch_eval_metrics:
            extras = self._extras(kept.losses.get_arrays(), kept.inputs.get_arrays())
            metrics = dict(self.compute_metrics(EvalPrediction(predictions, labels, **extras)))
        metrics = denumpify_detensorize(metrics)
        loss_total, weight = self._engine.sum(torch.stack([loss_sum, weight_sum])).tolist()
        if weight > 0:
            metrics[f"{prefix}_loss"] = loss_total / weight
        elif kept.losses.get_arrays() is not None:
            metrics[f"{prefix}_loss"] = float(np.nan)
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return EvalLoopOutput(predictions, labels, named, self._num_rows(dataloader, rows_seen))

    def _num_rows(self, dataloader: Any, rows_seen: int) -> int:
        dataset = getattr(dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)  # type: ignore[arg-type]
        return rows_seen

    def _rates(self, prefix: str, started: float, num_rows: int) -> dict[str, float]:
        across = self.args.eval_batch_size * self._engine.world_size
        rates: dict[str, float] = speed_metrics(
            prefix, started, num_samples=num_rows, num_steps=math.ceil(num_rows / across)
        )
        return rates


def logits_of(outputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
    """Everything a model returned but its loss and what is not wanted."""
    if isinstance(outputs, dict):
        return tuple(v for k, v in outputs.items() if k not in ignore_keys and not (has_loss and k == "loss"))
    return outputs[1:] if has_loss else outputs


def with_last(batches: Any) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last; one is read ahead to know."""
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield current, False
        current = following
    yield current, True
