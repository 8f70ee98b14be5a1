"""The methods of a ``Trainer`` for evaluation and prediction; see ``trainer/evaluation.py``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    has_length,
)

from burnish.loop.loop import set_optimizer_mode
from burnish.parallel.precision import full_eval_dtype
from burnish.trainer import evaluation, reporting
from burnish.trainer.data.in_step import in_step, mark_last
from burnish.trainer.loss import (
    accepting,
    explain_index_errors,
)
from burnish.trainer.methods.data import DataMethods


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
                together |= self.evaluate(name if is_own else one, ignore_keys, f"{metric_key_prefix}_{name}")
            return together
        self._memory_tracker.start()
        only_loss = True if self.compute_metrics is None else None
        loader = self.get_eval_dataloader(eval_dataset)
        output = self._measured(loader, "Evaluation", only_loss, ignore_keys, metric_key_prefix)
        metrics = cast("dict[str, float]", output.metrics)
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a set, with labels and metrics if the set has labels."""
        self._memory_tracker.start()
        loader = self.get_test_dataloader(test_dataset)
        output = self._measured(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        self._tell("on_predict", metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _measured(
        self, loader: Any, description: str, only_loss: bool | None, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """Run ``evaluation_loop`` and add its runtime to the metrics."""
        started, at_once = time.time(), self.args.eval_batch_size * self._parallel.world_size
        output = self.evaluation_loop(loader, description, only_loss, ignore_keys, prefix)
        num_rows = cast(int, output.num_samples)
        cast("dict[str, float]", output.metrics).update(evaluation.rates(prefix, started, num_rows, at_once))
        return output

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
        self.callback_handler.parts["eval_dataloader"] = dataloader
        keeps_all = description == "Prediction"
        gathered = evaluation.Gathered(args, self._parallel, self.accelerator.gather, self.compute_metrics, keeps_all)
        main = getattr(self.model, "main_input_name", "input_ids")
        for inputs, is_own, is_last in mark_last(in_step(self._read_ahead(dataloader, only_loss), self._parallel)):
            weight = self._num_items(self._prepare_input(inputs))
            loss, logits, labels = self.prediction_step(model, inputs, only_loss, ignore_keys=ignore_keys)
            main_inputs = self._prepare_input(inputs[main]) if "inputs" in args.include_for_metrics else None
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            gathered.add(weight, loss, logits, labels, inputs, main_inputs, is_own, is_last)
            self._tell("on_prediction_step")
        return gathered.output(dataloader, metric_key_prefix)

    def _read_ahead(self, dataloader: Any, only_loss: bool) -> Iterable[Any]:
        """The batches of an evaluation. A subclass may process several of them ahead."""
        yield from dataloader

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict one batch without gradients.

        Returns:
            () the mean loss or None, the logits or None, the labels or None; tuples if there are several.
        """
        has_loss = evaluation.has_loss(inputs, self.label_names, self.can_return_loss)
        inputs = self._prepare_inputs(inputs)
        labels = evaluation.labels_in(inputs, self.label_names) if has_loss else None
        compute = accepting(self.compute_loss, "num_items_in_batch")
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager(), explain_index_errors(self.model, inputs):
            if has_loss:
                items = self._items(inputs, self._num_items(inputs))
                if prediction_loss_only and type(self).compute_loss is EvaluationMethods.compute_loss:
                    return compute(model, inputs, num_items_in_batch=items).detach().mean(), None, None
                loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        ignored = evaluation.ignored_outputs(self.model) if ignore_keys is None else ignore_keys
        return loss, evaluation.logits_of(outputs, ignored, has_loss), labels

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
