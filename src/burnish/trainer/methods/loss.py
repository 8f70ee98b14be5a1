"""The methods of a ``Trainer`` for the loss: they combine the loss of a model or a script into the mean of the step.

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

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import find_batch_size

from burnish.config.errors import UserError
from burnish.kernels.probe import Capabilities
from burnish.loop.loop import set_optimizer_mode
from burnish.loop.types import IGNORE_INDEX, Batch, Loss, Metric, Sum
from burnish.trainer import inspection
from burnish.trainer.data.in_step import tensors_by_name
from burnish.trainer.data.outputs import float32_outputs
from burnish.trainer.data.prefix_sharing import has_plain_loss, probe_prefix_sharing, shared_prefixes_of
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.inspection import base_model, is_causal_lm, num_positions
from burnish.trainer.methods.base import TrainerBase
from burnish.trainer.trl.sft.loss import mean_of_padding_free, sum_of_padding_free


class LossMethods(TrainerBase):
    """The loss of a micro-batch, and its backward pass."""

    @property
    def loss_is_scripted(self) -> bool:
        """Whether a script computes the loss. It is then a mean until the backward pass."""
        if self.compute_loss_func is not None or self.loss_is_scaled_for_ga:
            return True
        return any(map(self._overrides, self._loss_methods))

    _loss_methods: tuple[str, ...] = (
        "compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch",
    )  # fmt: skip
    """Methods with which a script computes the loss or its divisor."""

    def _loss(self, model: nn.Module, inputs: Any) -> Loss:
        """The loss of a micro-batch as a sum over its items: computed without logits, or the model's mean times the
        number of items."""
        is_plain = self.label_smoother is None and has_plain_loss(self.model)
        flat = self._padding_free_inputs(inputs) if is_plain else None
        if flat is not None and (head := self._capabilities().head) is not None:
            return Loss(sum_of_padding_free(model, flat, head))
        num_items = self._num_items(inputs) if self._step.own_items is None else self._step.own_items
        mean = self.compute_loss(model, inputs, num_items_in_batch=self._num_items_in_batch(inputs, num_items))
        refuse_no_loss(mean)
        return Loss(mean * num_items)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            inputs: the micro-batch.
            num_items_in_batch: () number of items of the whole step, if the loss is a mean over labels.

        Returns:
            () the contribution of the micro-batch to the loss of the step, detached. An override runs the backward pass
            itself (``self.accelerator.backward``); its gradient and its return value are used unchanged.
        """
        model.train()
        set_optimizer_mode(self.optimizer, is_training=True)
        counts = not isinstance(getattr(inputs, "batch", inputs), PaddingBatch)
        own = self._num_items(inputs) * counts  # counted before ``_prepare_inputs``, like the items of the step
        inputs = self._prepare_inputs(inputs)
        share, num_items = self._step.share(own), self._num_items_in_batch(inputs, own)
        if self.loss_is_scaled_for_ga:
            share, num_items = torch.ones_like(own) * counts / self._num_averaged_losses, num_items_in_batch
        elif num_items is not None and self._scripted_num_items is not None:
            share, num_items = torch.ones_like(own), self._scripted_num_items
        with self.compute_loss_context_manager():
            loss = call_accepting("num_items_in_batch", self.compute_loss, model, inputs, num_items_in_batch=num_items)
        refuse_no_loss(loss)
        refuse_no_gradient(loss)
        self._empty_cache_if_due()
        loss = loss * (share * self._parallel.world_size)  # the backend averages over processes, but a sum is needed
        self.accelerator.backward(loss)
        detached: Tensor = loss.detach()
        return detached

    def _empty_cache_if_due(self) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self.accelerator.free_memory()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a micro-batch: the model's own, with label smoothing, or from ``compute_loss_func``.

        Args:
            inputs: the micro-batch.
            return_outputs: whether to return the model's outputs as well.
            num_items_in_batch: () number of labels of this micro-batch, by which models and functions divide their sum.

        Returns:
            () the loss, or (loss, outputs).
        """
        is_own = self.label_smoother is not None or self.compute_loss_func is not None
        flat = None if is_own or return_outputs or not has_plain_loss(self.model) else self._padding_free_inputs(inputs)
        if flat is not None and (head := self._capabilities().head) is not None:
            return mean_of_padding_free(model, flat, head, num_items_in_batch)
        labels = inputs.pop("labels") if is_own and "labels" in inputs else None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None:
            # Before transformers 5.16 it counts the labels itself.
            shifts = inspection.is_causal_lm(self.accelerator.unwrap_model(model))
            loss = call_accepting(
                "num_items_in_batch", self.label_smoother.__call__, outputs, labels, shift_labels=shifts,
                num_items_in_batch=num_items_in_batch,
            )  # fmt: skip
        else:
            loss = loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _capabilities(self) -> Capabilities:
        """Results of the probes of the model's forward pass, which run once."""
        if self._known_capabilities is None or self._known_capabilities.model is not self.model:
            found = self._find_capabilities()
            self._known_capabilities = (
                replace(found, head=None, shares_prefixes=False) if self._parallel.frees_weights else found
            )
        return self._known_capabilities

    def _find_capabilities(self) -> Capabilities:
        return probe_prefix_sharing(self.model, self._skips_tokens and has_plain_loss(self.model))

    @property
    def _skips_tokens(self) -> bool:
        """Whether tokens without influence on a loss are skipped: as set by the arguments; by default on a CPU."""
        is_requested = self.args.needed_tokens_only
        is_usual = self._parallel.device.type == "cpu" and not self.args.torch_compile
        return bool(is_usual if is_requested is None else is_requested) and self.neftune_noise_alpha is None

    def _padding_free_inputs(self, inputs: Batch) -> Batch | None:
        """The micro-batch without padding and unneeded tokens. None if this is not supported."""
        return shared_prefixes_of(inputs) if self._capabilities().shares_prefixes else None

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Context for a forward pass."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The autocast of the run. ``cache_enabled`` has no effect."""
        precision = self._parallel.precision()
        return float32_outputs(self.model, precision) if self._script_reads_outputs else precision

    @property
    def _script_reads_outputs(self) -> bool:
        """Whether a function of the script reads outputs of a forward pass under autocast."""
        reads = self.preprocess_logits_for_metrics is not None or self._overrides("prediction_step")
        return self._parallel.dtype is not None and (reads or self.loss_is_scripted)

    def _inputs_for_script(self, batch: Batch) -> Any:
        """What ``training_step`` and ``_prepare_inputs`` get for a micro-batch."""
        return batch

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move the batch to the device. Override it to change the inputs of the model. Items are counted before it, as
        in transformers."""
        inputs = self._prepare_input(inputs)
        if isinstance(inputs, Sized) and len(inputs) == 0:
            raise ValueError(
                "The batch is empty. Check that the training dataset contains columns that the model accepts: "
                f"{', '.join(self._signature_columns or [])}."
            )
        return inputs

    def _num_items(self, inputs: Batch) -> Tensor:
        """() number of items of a micro-batch: its labels, or its rows if it has none or the loss averages rows."""
        tensors = tensors_by_name(inputs)
        labels = tensors.get("shift_labels", tensors.get("labels"))
        if not isinstance(labels, Tensor) or inspection.averages_rows(self.model):
            rows = find_batch_size(inputs)
            return torch.tensor(float(1 if rows is None else rows), device=self._parallel.device)
        if "shift_labels" not in inputs and inspection.loss_shifts_labels(self.model):
            labels = labels[..., 1:]  # the first label has no loss
        return labels.ne(IGNORE_INDEX).sum().float().to(self._parallel.device)

    def _sums_of(self, batch: Batch) -> dict[str, Metric]:
        """Metrics of a micro-batch that do not depend on a script's loss, as in ``Loss.sums``."""
        return {}

    def _num_items_in_batch(self, inputs: Batch, num_items: Tensor) -> Tensor | None:
        """() the argument ``num_items_in_batch`` of ``compute_loss``; None if it is not used.

        At least 1, so that a micro-batch without labels adds 0 rather than 0/0.
        """
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return num_items.clamp(min=1) if counts and isinstance(tensors_by_name(inputs).get("labels"), Tensor) else None

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward, for ``total_flos``: 6 x tokens x parameters without embeddings."""
        main = getattr(self.model, "main_input_name", "input_ids")
        if main not in tensors_by_name(inputs) or not hasattr(self.model, "num_parameters"):
            return 0
        if self._num_parameters is None:
            self._num_parameters = int(self.model.num_parameters(exclude_embeddings=True))
        return 6 * int(inputs[main].numel()) * self._num_parameters


def weight_by_zero(loss: Loss) -> Loss:
    """Loss and metrics of a padding batch, multiplied by 0. The graph is kept so that ranks can sync gradients."""
    sums = {
        name: Sum(each.total * 0, each.count * 0, each.reduction) if isinstance(each, Sum) else each * 0
        for name, each in loss.sums.items()
    }
    return Loss(loss.total * 0, sums)


def without_gradient(value: Tensor, device: torch.device) -> Tensor:
    """() the detached loss returned by ``training_step``. ValueError if it is on another type of device than the
    run."""
    if value.device.type != device.type:
        raise ValueError(f"The loss must be on the device {device}. Received: a loss on {value.device}.")
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


@contextmanager
def explain_index_errors(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Context that explains an IndexError of torch: ids, labels or positions that the model has no embedding for.

    Raises:
        UserError: for ids or labels that are too large, and for rows that are too long. Other errors are passed on.
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
        ids, positions = tensors.get("input_ids"), num_positions(model)
        if isinstance(ids, Tensor) and positions is not None and ids.shape[-1] > positions:
            raise too_long("a batch", ids.shape[-1], positions, "Truncate the rows when tokenizing") from error
        raise


def too_long(where: str, longest: int, positions: int, remedy: str) -> UserError:
    """The error for rows that are longer than the model has positions. Args: where: the batch or dataset."""
    return UserError(
        f"The longest row of {where} has {longest:,} tokens, but the model only has embeddings for {positions:,} "
        "positions.",
        remedy=f"{remedy}, or use a model with a longer context.",
    )


def _largest(ids: Any) -> int:
    return int(ids.max()) if isinstance(ids, Tensor) and ids.numel() and not ids.is_floating_point() else -1


def refuse_no_loss(loss: Any) -> None:
    """Raise UserError if ``compute_loss`` or ``compute_loss_func`` did not return a tensor."""
    if not isinstance(loss, Tensor):
        what = f"The loss must be a scalar tensor that requires grad. Received: {type(loss).__name__}."
        remedy = "The outputs passed to compute_loss_func contain no loss: compute it from logits and labels."
        raise UserError(what, remedy=remedy)


def refuse_no_gradient(loss: Tensor) -> None:
    """Raise UserError if the loss of a training step has no gradient."""
    if not loss.requires_grad:
        raise UserError(
            "The loss does not depend on any trainable parameter.",
            remedy="Set requires_grad of the parameters to be trained, and compute the loss without torch.no_grad() "
            "and detach(). With re-entrant gradient checkpointing, call model.enable_input_require_grads() as well.",
        )


def call_accepting(optional: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``method``, without the argument ``optional`` if its signature does not have it (older overrides)."""
    if not _has_parameter(getattr(method, "__func__", method), optional):
        kwargs.pop(optional)
    return method(*args, **kwargs)


def call_training_step(method: Callable[..., Any], model: nn.Module, inputs: Any, num_items: Any) -> Any:
    """Call ``training_step`` with three positional arguments, as in transformers. Older overrides only take two."""
    try:
        inspect.signature(method).bind(model, inputs, num_items)
    except TypeError:
        return call_accepting("num_items_in_batch", method, model, inputs, num_items_in_batch=num_items)
    return method(model, inputs, num_items)


@functools.lru_cache(maxsize=64)
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
