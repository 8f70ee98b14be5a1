"""The Trainer's loss: what a model or a user computes, made into a part of the step's mean.

The rule is the loop's: sum over items, divided by the items of the whole step. A model gives a mean over its
micro-batch; ``compute_loss`` is handed ``num_items_in_batch``, the items of that micro-batch, so that a loss divided by
it and a plain mean are the same number; ``training_step`` then gives it the micro-batch's share of the step. So
accumulation, ragged batches and processes never change the gradient, whoever computed the loss.

A subclass that sets ``loss_is_scaled_for_ga = True`` takes the division into its own hands: it gets the items of the
whole step, and its loss is used as it is.
"""

# B sequences, T tokens per sequence

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size
from transformers.utils import logging

from burnish.core.types import IGNORE_INDEX, Batch, Loss, Run
from burnish.hf.face import Face
from burnish.hf.loaders import base_model, to_device
from burnish.hf.needed import allows_needed_only, has_plain_loss, needed_of
from burnish.hf.sft_loss import sums_of_flat
from burnish.ops.cross_entropy import TokenLoss
from burnish.ops.probe import Head, causal_lm, find_head

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class LossMethods(Face):
    """Loss and one micro-batch of training."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            num_items_in_batch: () the items of the whole step, where the loss is a mean over labels.
        Returns:
            () what the micro-batch adds to the loss of the step, detached. An override goes backward by itself
            (``self.accelerator.backward``); both its gradient and what it returns are used as they are.
        """
        model.train()
        switch = getattr(self.optimizer, "train", None)
        if callable(switch):
            switch()
        inputs = self._prepare_inputs(inputs)
        weight = self._weight(inputs)
        share = torch.ones_like(weight) if self._step_weight is None else weight / self._step_weight
        items = self._items(inputs, weight)
        if self.loss_is_scaled_for_ga:
            share, items = torch.ones_like(weight), num_items_in_batch
        with self.compute_loss_context_manager():
            loss = takes(self.compute_loss, "num_items_in_batch")(model, inputs, num_items_in_batch=items)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self.accelerator.free_memory()
        loss = loss * (share * self._engine.world_size)  # the engine averages over processes; a sum is wanted
        self.accelerator.backward(loss)
        detached: Tensor = loss.detach()
        return detached

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a micro-batch: the model's own, smoothed, or ``compute_loss_func``'s.

        Args:
            num_items_in_batch: () the labels of this micro-batch, which models and functions divide their sum by.
        Returns:
            () the loss, or (loss, outputs).
        """
        own = self.label_smoother is not None or self.compute_loss_func is not None
        is_plain = not own and not return_outputs and has_plain_loss(self.model)
        needed = self._needed(inputs) if is_plain else None
        head = None if needed is None else self._head()
        if needed is not None and head is not None:
            sums = sums_of_flat(model, needed, head, TokenLoss(softcap=head.softcap))
            items = needed["labels"][:, 1:].ne(IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
            return sums.total / items
        labels = inputs.pop("labels") if own and "labels" in inputs else None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None:
            # Before transformers 5.16 it counts the labels by itself.
            smoothed = takes(self.label_smoother.__call__, "num_items_in_batch")
            shifts = self._is_causal_lm(model)
            loss = smoothed(outputs, labels, shift_labels=shifts, num_items_in_batch=num_items_in_batch)
        else:
            loss = loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _needed(self, inputs: Batch) -> Batch | None:
        """The micro-batch laid flat, without tokens that no loss depends on; None where it has to stay as it is."""
        wanted = self.args.needed_tokens_only
        if wanted is None:
            wanted = self._engine.device.type == "cpu" and not self.args.torch_compile
        if not wanted or self.neftune_noise_alpha is not None:
            return None
        if self.model not in self._allows_needed:
            self._allows_needed[self.model] = allows_needed_only(self.model)
        return needed_of(inputs) if self._allows_needed[self.model] else None

    def _head(self) -> Head | None:
        """How the model makes its logits, asked once for each model; None where they have to be made whole."""
        if self.model not in self._heads:
            self._heads[self.model] = find_head(causal_lm(self.model))
            if self._heads[self.model] is None:
                logger.info("The model's head is not a plain linear layer; its logits are made whole.")
        head: Head | None = self._heads[self.model]
        return head

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Around a forward pass: the autocast of the run."""
        return self._engine.precision()

    autocast_smart_context_manager = compute_loss_context_manager

    def _is_causal_lm(self, model: nn.Module) -> bool:
        name = type(base_model(self.accelerator.unwrap_model(model))).__name__
        return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device. Override it to change what the model is given."""
        inputs = self._prepare_input(inputs)
        if len(inputs) == 0:
            raise ValueError(
                "The batch received was empty, your model won't be able to train on it. Double-check that your "
                f"training dataset contains keys expected by the model: {','.join(self._signature_columns or [])}."
            )
        return inputs

    def _prepare_input(self, data: Any) -> Any:
        return to_device(data, self._engine.device)

    # --- the rule -----------------------------------------------------------------------------------------------------

    def _weight(self, inputs: Batch) -> Tensor:
        """() the items of a micro-batch that share the step's mean: its labels, or its rows where it has none."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            rows = find_batch_size(inputs)
            return torch.tensor(float(1 if rows is None else rows), device=self._engine.device)
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(IGNORE_INDEX).sum().float()

    def _items(self, inputs: Batch, weight: Tensor) -> Tensor | None:
        """() ``num_items_in_batch``: at least 1, so that a micro-batch without labels adds 0 and not 0/0."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return weight.clamp(min=1) if counts and isinstance(inputs.get("labels"), Tensor) else None

    def _microstep(self, run: Run, batch: Batch, share: Tensor, is_last: bool) -> Loss:
        """``training_step`` as the loop's microstep."""
        self._step_weight, self._sums = whole_inverse(share), {}
        items = None if self._items(batch, share) is None else self._step_weight
        run.state.total_flos += float(self.floating_point_ops(batch))
        with run.engine.microbatch(run.model, last=is_last):
            value = takes(self.training_step, "num_items_in_batch")(run.model, batch, num_items_in_batch=items)
        self._step_weight = None
        if value.device.type != self._engine.device.type:
            raise ValueError(
                f"Calculated loss must be on the original device: {self._engine.device} but device in use is "
                f"{value.device}"
            )
        return Loss(value.detach() / (share * run.engine.world_size), self._sums)

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward, for ``total_flos``: 6 x tokens x parameters without embeddings."""
        main = getattr(self.model, "main_input_name", "input_ids")
        if main not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        if self._num_parameters is None:
            model: Any = self.model
            self._num_parameters = int(model.num_parameters(exclude_embeddings=True))
        return 6 * int(inputs[main].numel()) * self._num_parameters

    _num_parameters: int | None = None


class TrainerObjective:
    """The Trainer as the loop's ``Objective``: it weighs a micro-batch."""

    def __init__(self, trainer: LossMethods) -> None:
        self.trainer = trainer

    def weight(self, batch: Batch) -> Tensor:
        return self.trainer._weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Never asked: ``run.microstep`` and ``run.evaluate`` are the Trainer's own."""
        raise NotImplementedError


def whole_inverse(share: Tensor) -> Tensor:
    """() 1 / share; the whole number it is within rounding of, where there is one. So that a micro-batch which is the
    whole step has a share of exactly 1, and its gradient is the model's own to the bit."""
    items = 1 / share
    nearest = items.round()
    return torch.where((items - nearest).abs() <= 1e-6 * nearest, nearest, items)


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The loss among a model's outputs."""
    if not isinstance(outputs, dict):
        return outputs[0]
    if "loss" not in outputs:
        raise ValueError(
            f"The model did not return a loss from the inputs, only the following keys: {','.join(outputs)}. "
            f"For reference, the inputs it received are {','.join(inputs)}."
        )
    return outputs["loss"]


def takes(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``method``, called without the argument ``name`` where it was written before there was one."""
    function = getattr(method, "__func__", method)
    return method if _has_parameter(function, name) else functools.partial(_without, method, name)


def _without(method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(name, None)
    return method(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
