"""The methods of a ``Trainer`` for evaluation and prediction: results of batches, and metrics of the whole set.

``eval_loss`` is the mean over the items of the set for any batch size (docs/decisions/0003): the mean of each batch is
weighted by its number of labels. Predictions and labels are gathered as in transformers, padded with -100, and passed
to ``compute_metrics`` once, or per batch with ``batch_eval_metrics``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

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

from burnish.loop.loop import set_optimizer_mode
from burnish.loop.protocols import Parallel
from burnish.parallel.precision import full_eval_dtype
from burnish.trainer import reporting
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.data.in_step import drop_rows, equalize_batches, mark_last, tensors_by_name
from burnish.trainer.methods.data import DataMethods
from burnish.trainer.methods.loss import call_accepting, explain_index_errors


class EvaluationMethods(DataMethods):
    """Evaluation and prediction."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a set, or on each set of a dict, log the metrics and call the callbacks.

        Returns:
            The metrics, with names that start with ``metric_key_prefix``, and the epoch.
        """
        is_own = eval_dataset is None
        dataset = self.eval_dataset if is_own else eval_dataset
        if isinstance(dataset, dict):
            together: dict[str, float] = {}
            for name, one in dataset.items():
                together |= self.evaluate(
                    eval_dataset=name if is_own else one, ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )  # fmt: skip
            return together
        self._memory_tracker.start()
        loader = self._loader_of(self.get_eval_dataloader, dataset)
        only_loss = True if self.compute_metrics is None else None
        output = self._run_evaluation_loop(
            loader, "Evaluation", ignore_keys, metric_key_prefix, prediction_loss_only=only_loss
        )
        metrics = cast("dict[str, float]", output.metrics)
        self.log(metrics)
        self._call_event("on_evaluate", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a set, with labels and metrics if the set has labels."""
        self._memory_tracker.start()
        loader = self._loader_of(self.get_test_dataloader, test_dataset)
        output = self._run_evaluation_loop(loader, "Prediction", ignore_keys, metric_key_prefix)
        self._call_event("on_predict", metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _run_evaluation_loop(
        self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str, **choices: bool | None
    ) -> EvalLoopOutput:
        """Run ``evaluation_loop`` and add its runtime to the metrics. ``choices``: further arguments of it."""
        started, at_once = time.time(), self.args.eval_batch_size * self._parallel.world_size
        output = self.evaluation_loop(
            loader, description=description, ignore_keys=ignore_keys, metric_key_prefix=prefix, **choices
        )
        num_rows = cast(int, output.num_samples)
        num_examples = self._examples_in_packs(loader) or num_rows
        rates = speed_metrics(prefix, started, num_samples=num_examples, num_steps=math.ceil(num_rows / at_once))
        cast("dict[str, float]", output.metrics).update(rates)
        return output

    def _examples_in_packs(self, loader: Any) -> int | None:
        """Number of examples in a set of packs; None if its rows are no packs."""
        return None

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Iterate over a loader once. Used by ``evaluate`` and ``predict``; labels are optional."""
        args = self.args
        only_loss = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._model_for_evaluation()
        num_rows = self.num_examples(dataloader) if has_length(dataloader) else "Unknown"
        reporting.announce_evaluation(description, num_rows, args.eval_batch_size)
        self.callback_handler.arguments["eval_dataloader"] = dataloader
        keeps_all = description == "Prediction"
        gathered = EvaluationResults(args, self._parallel, self.accelerator.gather, self.compute_metrics, keeps_all)
        main = getattr(self.model, "main_input_name", "input_ids")
        for inputs, is_own, is_last in mark_last(
            equalize_batches(self._read_ahead(dataloader, only_loss), self._parallel)
        ):
            num_items = self._num_items(self._prepare_input(inputs))
            loss, logits, labels = self.prediction_step(model, inputs, only_loss, ignore_keys=ignore_keys)
            main_inputs = self._prepare_input(inputs[main]) if "inputs" in args.include_for_metrics else None
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            gathered.add(num_items, loss, logits, labels, inputs, main_inputs, is_own, is_last)
            self._call_event("on_prediction_step")
        return gathered.output(dataloader, metric_key_prefix)

    def _read_ahead(self, dataloader: Any, only_loss: bool) -> Iterable[Any]:
        """Yield the batches of an evaluation. Subclasses may process several batches at once."""
        yield from dataloader

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict one batch without gradients.

        Returns:
            () the mean loss or None, the logits or None, the labels or None; tuples if there are several.
        """
        has_loss = returns_loss(inputs, self.label_names, self.can_return_loss)
        inputs = self._prepare_inputs(inputs)
        labels = labels_in(inputs, self.label_names) if has_loss else None
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager(), explain_index_errors(self.model, inputs):
            if has_loss:
                num_items = self._num_items_in_batch(inputs, self._num_items(inputs))
                if prediction_loss_only and type(self).compute_loss is EvaluationMethods.compute_loss:
                    return self.compute_loss(model, inputs, num_items_in_batch=num_items).detach().mean(), None, None
                loss, outputs = call_accepting(
                    "num_items_in_batch", self.compute_loss, model, inputs, return_outputs=True,
                    num_items_in_batch=num_items,
                )  # fmt: skip
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        ignored = ignored_outputs(self.model) if ignore_keys is None else ignore_keys
        return loss, logits_of(outputs, ignored, has_loss), labels

    def _model_for_evaluation(self) -> nn.Module:
        """The model in evaluation mode, outside of training also in half precision if requested."""
        model, dtype = self.model_wrapped, full_eval_dtype(self.args)
        if not self.is_in_train and dtype is not None:
            model = model.to(dtype=dtype, device=self._parallel.device)
        elif not self.is_in_train and self.place_model_on_device:
            model = model.to(self._parallel.device)
        model.eval()
        set_optimizer_mode(self.optimizer, is_training=False)
        return model  # type: ignore[no-any-return]


def _as_metrics(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"compute_metrics must return a dict of metrics by name. Received: {returned!r:.80}")
    return dict(returned)


class EvaluationResults:
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
        self.loss, self.num_items = torch.zeros(2, device=parallel.device).unbind()
        self.batch_metrics: dict[str, Any] = {}
        self.num_rows = self.num_batches = 0

    def add(
        self, num_items: Tensor, loss: Tensor | None, logits: Any, labels: Any, inputs: Any, kept_inputs: Any,
        is_own: bool, is_last: bool,
    ) -> None:  # fmt: skip
        """Add one batch.

        Args:
            num_items: () number of items of the batch.
            loss: () mean over its items, or None.
            logits: predictions.
            inputs: the batch.
            kept_inputs: the part of the batch that ``include_for_metrics`` selects, on the device, or None.
            is_own: false if the batch is padding for this rank, which does not count.
            is_last: whether all ranks are at their last batch.
        """
        rows, num_items = find_batch_size(inputs) or 0 if is_own else 0, num_items * is_own
        self.num_rows, self.num_batches = self.num_rows + rows, self.num_batches + 1
        if loss is not None:
            counts = torch.isfinite(loss) if self.args.logging_nan_inf_filter else torch.ones_like(num_items)
            self.loss = self.loss + torch.where(counts.bool(), loss.detach().float() * num_items, 0)
            self.num_items = self.num_items + num_items * counts
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
            metrics = _as_metrics(self.compute_metrics(EvalPrediction(predictions, labels, **extras)))
        metrics = denumpify_detensorize(metrics)
        loss, num_items = self.parallel.sum(torch.stack([self.loss, self.num_items])).tolist()
        if num_items > 0:
            metrics[f"{prefix}_loss"] = loss / num_items
        elif self.losses.get_arrays() is not None:
            metrics[f"{prefix}_loss"] = math.nan
        named_metrics = {name: v for name, v in metrics.items() if name.startswith(f"{prefix}_")}
        named_metrics |= {f"{prefix}_{name}": v for name, v in metrics.items() if name not in named_metrics}
        dataset = getattr(dataloader, "dataset", None)
        num_rows = self.parallel.sum(torch.tensor(self.num_rows, device=self.parallel.device))
        return EvalLoopOutput(
            predictions, labels, named_metrics, len(dataset) if has_length(dataset) else int(num_rows)
        )

    def _extras(self, losses: Any, inputs: Any) -> dict[str, Any]:
        included = self.args.include_for_metrics
        return {"losses": losses if "loss" in included else None, "inputs": inputs if "inputs" in included else None}


def returns_loss(inputs: Any, label_names: list[str], can_return_loss: bool) -> bool:
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
    found = [] if config is None else list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))
    return [*found, "cache"] if "past_key_values" in found else found  # its name since transformers 5.24


def logits_of(outputs: Any, ignore_keys: list[str], has_loss: bool) -> Any:
    """The outputs of a model without the loss and ignored ones; a tuple if there are several."""
    if isinstance(outputs, dict):
        values = tuple(v for k, v in outputs.items() if k not in ignore_keys and not (has_loss and k == "loss"))
    else:
        values = outputs[1:] if has_loss else outputs
    logits = nested_detach(values)
    return logits[0] if len(logits) == 1 else logits
