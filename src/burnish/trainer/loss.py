"""The Trainer's loss: combines the loss of a model or a script into the mean of the step.

As in the loop, a loss is a sum over items that is divided by the number of items of the whole step. burnish's own
losses are sums until the backward pass. A model returns a mean over its micro-batch, which ``Trainer._loss`` multiplies
by its number of items.

Scripts that override ``compute_loss`` or ``training_step``, or pass ``compute_loss_func``, use means, as in
transformers. ``compute_loss`` gets ``num_items_in_batch``, the number of items of the micro-batch, so a sum divided by
it equals a plain mean. ``training_step`` multiplies it by the micro-batch's share of the step. So gradient
accumulation, batches of different sizes and the number of processes never change the gradient. A subclass with
``loss_is_scaled_for_ga = True`` divides by itself: it gets the number of items of the whole step, and its loss is used
unchanged.
"""

# B sequences, T tokens per sequence

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import find_batch_size

from burnish.config.errors import UserError
from burnish.loop.types import IGNORE_INDEX, Batch, Loss, Metric, Sum
from burnish.trainer.data.in_step import tensors_by_name
from burnish.trainer.inspection import base_model, is_causal_lm


@dataclass
class StepInProgress:
    """The current step.

    Args:
        weight: () number of items over all its micro-batches and processes; None outside of a step.
        sums: metrics of the current micro-batch, as in ``Loss.sums``; ``compute_loss`` may add to it.
    """

    weight: Tensor | None = None
    sums: dict[str, Metric] = field(default_factory=dict)

    def share(self, weight: Tensor) -> Tensor:
        """() the share of a micro-batch with ``weight`` () items in the step's mean; 1 outside of a step."""
        return torch.ones_like(weight) if self.weight is None else weight / self.weight


def weighted_by_zero(loss: Loss) -> Loss:
    """Loss and metrics of a padding batch, multiplied by 0. The graph is kept so that ranks can sync gradients."""
    sums = {
        name: Sum(each.total * 0, each.count * 0, each.reduction) if isinstance(each, Sum) else each * 0
        for name, each in loss.sums.items()
    }
    return Loss(loss.total * 0, sums)


def num_items_of(inputs: Batch, shifts_labels: bool, device: torch.device) -> Tensor:
    """() number of items of a micro-batch: its labels, or its rows if it has none.

    Args:
        inputs: the micro-batch.
        shifts_labels: whether the first label of a row has no loss.
        device: device of the result.
    """
    tensors = tensors_by_name(inputs)
    labels = tensors.get("shift_labels", tensors.get("labels"))
    if not isinstance(labels, Tensor):
        rows = find_batch_size(inputs)
        return torch.tensor(float(1 if rows is None else rows), device=device)
    if shifts_labels and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    return labels.ne(IGNORE_INDEX).sum().float()


def without_gradient(value: Tensor, device: torch.device) -> Tensor:
    """() the detached loss returned by ``training_step``. ValueError if it is on another type of device than the
    run."""
    if value.device.type != device.type:
        raise ValueError(
            f"Calculated loss must be on the original device: {device} but device in use is {value.device}"
        )
    return value.detach()


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The loss in a model's outputs."""
    if not isinstance(outputs, dict):
        return outputs[0]
    if "loss" not in outputs:
        raise ValueError(
            f"The model did not return a loss from the inputs, only the following keys: {','.join(outputs)}. "
            f"For reference, the inputs it received are {','.join(inputs)}."
        )
    return outputs["loss"]


def refuse_empty(inputs: Any, columns: Sequence[str] | None) -> None:
    if isinstance(inputs, Sized) and len(inputs) == 0:
        raise ValueError(
            "The batch received was empty, your model won't be able to train on it. Double-check that your "
            f"training dataset contains keys expected by the model: {','.join(columns or [])}."
        )


@contextmanager
def explain_index_errors(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Context that explains an IndexError of torch: which ids or labels exceed the model's vocabulary.

    Raises:
        UserError: for ids or labels that are too large. Other errors are passed on.
    """
    try:
        yield
    except IndexError as error:
        inside: Any = base_model(model)
        tensors, config = tensors_by_name(inputs), getattr(inside, "config", None)
        embedding = inside.get_input_embeddings() if hasattr(inside, "get_input_embeddings") else None
        if (largest := _largest(tensors.get("input_ids"))) >= (size := getattr(embedding, "num_embeddings", math.inf)):
            what = f"input_ids must be below {size}, the size of the model's embedding. Received: {largest}."
            remedy = "If tokens were added, call model.resize_token_embeddings(len(tokenizer))."
            raise UserError(what, remedy=remedy) from error
        labels, classes = tensors.get("labels"), getattr(config, "num_labels", math.inf)
        if isinstance(labels, Tensor) and not is_causal_lm(model) and (largest := _largest(labels)) >= classes:
            what = f"labels must be below {classes}, the model's num_labels. Received: {largest}."
            remedy = f"Load the model with num_labels={largest + 1}, or use class indices from 0."
            raise UserError(what, remedy=remedy) from error
        raise


def _largest(ids: Any) -> int:
    return int(ids.max()) if isinstance(ids, Tensor) and ids.numel() and not ids.is_floating_point() else -1


def refuse_no_loss(loss: Any) -> None:
    """Raise UserError if ``compute_loss`` or ``compute_loss_func`` did not return a tensor."""
    if not isinstance(loss, Tensor):
        what = f"The loss must be a scalar tensor with a gradient. Received: {type(loss).__name__}."
        remedy = "The outputs passed to compute_loss_func contain no loss: compute it from logits and labels."
        raise UserError(what, remedy=remedy)


def accepting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``method``, called without the argument ``name`` if its signature does not have it (older overrides)."""
    function = getattr(method, "__func__", method)
    return method if _has_parameter(function, name) else functools.partial(_without, method, name)


def _without(method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(name, None)
    return method(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
