"""Training with a script's overridden methods, called as in TRL: with padded batches and the model itself.

If a subclass overrides ``compute_loss`` or another method with a batch or model as argument, the loader yields TRL's
padded batches, and the backend wraps the bare model. Values that depend on the whole step (reference log-probabilities,
KTO's baseline, ranks) are computed as without the override, and are attached to the padded batch. So an override that
only calls the original method changes nothing.
"""

# P pairs or records in a micro-batch, S sequences

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from burnish.checkpoint.parts import Stateful
from burnish.loop.protocols import Objective, Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Loss, Row
from burnish.losses.sequence_logps import SequenceModel
from burnish.models.patches.dropout import switch_off_dropout
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.notes import logger
from burnish.trainer.trl.base import TrlTrainer
from burnish.trainer.trl.preferences.config import PreferenceConfig
from burnish.trainer.trl.preferences.objective import padding_batch
from burnish.trainer.trl.rollouts.config import RolloutConfig
from burnish.trainer.trl.sft.setup import attach_peft, finish_peft, set_pad


@dataclass
class PreferenceOutput(ModelOutput):
    """Outputs of ``compute_loss(..., return_outputs=True)``. In TRL: the model's output.

    Args:
        logits: (S, T, V), the chosen responses before the rejected ones.
        rewards: burnish's rewards, in the order of its rows.
    """

    logits: Tensor | None = None
    rewards: Tensor | None = None


class ScriptedBatch(dict[str, Any]):
    """TRL's padded batch. ``ready`` is the same micro-batch in the form of the objective."""

    def __init__(self, values: Mapping[str, Any], ready: Batch) -> None:
        super().__init__(values)
        self.ready = ready
        self._versions = {name: (value, value._version) for name, value in tensors_in(values)}

    def is_unchanged_in(self, values: Mapping[str, Any]) -> bool:
        """Whether the tensors of ``values`` are those from which ``ready`` was created, without changes."""
        now = dict(tensors_in(values))
        return now.keys() == self._versions.keys() and all(
            now[name] is value and value._version == version for name, (value, version) in self._versions.items()
        )


def tensors_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in values.items() if isinstance(value, Tensor))


class PaddedObjective(Objective):
    """Base class: an objective over padded batches and the bare model.

    Args:
        objective: the trainer's objective.
        over: model -> the objective's module around it.
        parallel: backend of the trainer.
    """

    def __init__(self, objective: Any, over: Callable[[nn.Module], nn.Module], parallel: Parallel) -> None:
        self.objective, self.over, self.parallel = objective, over, parallel

    @property
    def parts(self) -> Mapping[str, Stateful]:
        parts: Mapping[str, Stateful] = self.objective.parts
        return parts

    def setup(self, module: nn.Module) -> None:
        self.objective.setup(self.over(module))

    def end_step(self) -> None:
        self.objective.end_step()

    def report(self, values: dict[str, float]) -> dict[str, float]:
        reported: dict[str, float] = self.objective.report(values)
        return reported


class Scripted(PaddedObjective):
    """An objective of preferences. Args: rows_of: padded batch -> the objective's rows."""

    def __init__(self, rows_of: Callable[[Mapping[str, Any]], list[Row]], *parts: Any) -> None:
        super().__init__(*parts)
        self.rows_of = rows_of
        self._prepared: Sequence[ScriptedBatch] = ()  # micro-batches of the step; of an evaluation the last two

    def collate(self, batch: Mapping[str, Any]) -> Batch:
        """The objective's micro-batch of a padded one, without values that depend on the whole step."""
        result: Batch = self.objective.collate(self.rows_of(batch))
        return padding_batch(result) if isinstance(batch, PaddingBatch) else result

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        collated = [parallel.to_device(self.collate(batch)) for batch in batches]
        ready = self.objective.prepare_step(self.over(module), collated, parallel)
        self._prepared = [ScriptedBatch(batch, prepared) for batch, prepared in zip(batches, ready, strict=True)]
        return self._prepared

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        read = _RecordedBatches(batches, self.collate, parallel)
        for ready in self.objective.iter_eval(self.over(module), read, parallel):
            scripted = ScriptedBatch(read.padded.popleft(), ready)
            self._prepared = [*self._prepared[-1:], scripted]  # a reader may be one batch ahead
            yield scripted

    def ready(self, module: nn.Module, batch: Batch) -> Batch:
        """The objective's micro-batch of a padded one: the prepared one, or a new one if a script has changed the
        batch."""
        for prepared in self._prepared:
            if prepared.is_unchanged_in(batch):
                return prepared.ready
        collated = self.parallel.to_device(self.collate(batch))
        (ready,) = self.objective.prepare_step(self.over(module), [collated], self.parallel)
        return ready  # type: ignore[no-any-return]

    def num_items(self, batch: Batch) -> Tensor:
        num_items: Tensor = self.objective.num_items(
            batch.ready if isinstance(batch, ScriptedBatch) else self.collate(batch)
        )
        return num_items

    def loss_of(self, module: nn.Module, batch: Batch, ready: Batch) -> Loss:
        """The loss of a padded batch, a sum over its items. ``ready`` is the result of ``self.ready``."""
        over = self.over(module)
        if isinstance(over, PaddedScores):
            ready = {**ready, "padded": {name: batch[name] for name in ("input_ids", "attention_mask")}}
        loss: Loss = self.objective.loss(over, ready)
        return loss

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        return self.loss_of(module, batch, self.ready(module, batch))


@dataclass(eq=False)
class _RecordedBatches:
    """The objective's batches of a loader, which can be iterated twice. ``padded``: the batches of the last
    iteration."""

    batches: Iterable[Batch]
    collated: Callable[[Batch], Batch]
    parallel: Parallel
    padded: deque[Batch] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Batch]:
        self.padded.clear()
        for batch in self.batches:
            self.padded.append(self.parallel.to_device(batch))
            yield self.collated(batch)


class PaddedScores(nn.Module):
    """The scores computed by a sequence classifier itself. ``model`` is wrapped by the backend."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """(S,) the scores of ``batch["padded"]``, alternating between chosen and rejected."""
        logits: Tensor = self.model(**batch["padded"], use_cache=False).logits
        return logits.squeeze(-1).float().view(2, -1).t().flatten()


def module_over(wrapped: nn.Module, bare: nn.Module, model: nn.Module) -> nn.Module:
    """The objective's module around ``model``.

    Args:
        wrapped: the module around ``bare``, used if no backend has wrapped the model. A wrapper has to be called itself
            to sync gradients; logits are computed then, and scores are taken from the model's output.
        bare: the model without wrappers.
        model: the model passed to a method.
    """
    if model is bare:
        wrapped.training = model.training
        return wrapped
    if isinstance(wrapped, SequenceModel):
        return wrapped.without_head(model)
    return PaddedScores(model).train(model.training)


def get_batch_logps(
    logits: Tensor, labels: Tensor, average_log_prob: bool = False, is_encoder_decoder: bool = False
) -> Tensor:
    """(S,) log-probabilities of the labels, summed over each sequence, or their mean.

    Args:
        logits: (S, T, V).
        labels: (S, T), ``IGNORE_INDEX`` at positions without loss.
        average_log_prob: whether to return means.
        is_encoder_decoder: whether position t predicts label t rather than t + 1.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits (S, T, V) and labels (S, T) must have matching shapes. Received: {tuple(logits.shape)}, "
            f"{tuple(labels.shape)}."
        )
    if not is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    is_trained = labels != IGNORE_INDEX
    chosen = F.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    sums = (chosen * is_trained).sum(-1)
    return sums / is_trained.sum(-1) if average_log_prob else sums


def concatenated_inputs(
    batch: Mapping[str, Any], is_encoder_decoder: bool = False, padding_value: int = 0, device: Any = None
) -> dict[str, Tensor]:
    """(2P, T) ``concatenated_input_ids``, ``concatenated_attention_mask``, ``concatenated_labels``: the chosen
    responses before the rejected ones."""
    fillers, tensors = {"input_ids": padding_value, "attention_mask": 0, "labels": IGNORE_INDEX}, {}
    for name, filler in fillers.items():
        sides = [batch[f"{side}_{name}"] for side in ("chosen", "rejected")]
        longest = max(side.shape[1] for side in sides)
        padded = [F.pad(side, (0, longest - side.shape[1]), value=filler) for side in sides]
        tensors[f"concatenated_{name}"] = torch.cat(padded).to(device)
    return tensors


def model_inputs_of(batch: Mapping[str, Any], padding_value: int) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of all responses of a padded batch."""
    inputs, prefix = batch, ""
    if "chosen_input_ids" in batch:
        inputs, prefix = concatenated_inputs(batch, padding_value=padding_value), "concatenated_"
    return {name: inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}


class OverridableTrainer(TrlTrainer):
    """A trainer with an objective whose methods a script may override. It then uses TRL's padded batches and the model
    itself.

    Attributes:
        objective: the objective of the trainer.
        _scripted: an objective that calls a script's methods.
        _made: the objective's module around the model.
    """

    objective: Any
    _scripted: Any
    _made: nn.Module
    _pad: int

    def _attach(
        self, model: Any, args: PreferenceConfig | RolloutConfig, processing_class: Any, peft_config: Any,
        added: list[int], pad_token: str | None = None, sets_router: bool = True,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The model with its adapter, dropout and padding as the arguments say; and the options of the objective.

        Args:
            args: its config, with ``choices()`` and ``notes()``.
            processing_class: tokenizer or processor.
            peft_config: config of a new adapter, or None.
            added: ids of tokens that were added to the tokenizer.
            pad_token: padding token. Default: the tokenizer's.
            sets_router: whether ``router_aux_loss_coef`` applies.
        """
        if peft_config is not None:
            model = attach_peft(model, peft_config, added)
        if args.disable_dropout:
            switch_off_dropout(model)
        self._pad = set_pad(model, processing_class, pad_token)
        if hasattr(model, "peft_config"):
            finish_peft(model, args)
        choices = args.choices()
        if sets_router:
            self._set_router(model, args.router_aux_loss_coef)
            choices.router_aux_loss_coef = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        for note in args.notes():
            logger.warning(note)
        return model, choices

    def _module(self) -> nn.Module:
        module: nn.Module = self.model if self._is_scripted else self._made
        return module

    def _objective(self) -> Objective:
        objective: Objective = self._scripted if self._is_scripted else self.objective
        return objective

    def _model_for_evaluation(self) -> nn.Module:
        model = super()._model_for_evaluation()
        return self.model if self._is_scripted and model is self._made else model

    @property
    def _is_scripted(self) -> bool:
        """Whether a script overrides a method with a batch or a model as argument."""
        return bool(self._overridden)

    @property
    def _overridden(self) -> list[str]:
        names = (*self._loss_methods, "prediction_step", "_prepare_inputs", "_prepare_input", "floating_point_ops")
        return [name for name in names if self._overrides(name)]

    def _warn_of_overrides(self) -> None:
        if not self._overridden:  # a script computes a loss itself
            return
        logger.warning(
            f"{type(self).__name__} overrides {', '.join(self._overridden)}, so batches are padded and the "
            "model's forward method is called, as in TRL. Steps take longer than without the override."
        )

    def _over(self, model: nn.Module) -> nn.Module:
        """The objective's module around the model that is passed to a method."""
        return module_over(self._made, self.model, model)
