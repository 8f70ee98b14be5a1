"""Adapt an objective of ``losses`` to a ``Trainer``: fit it to the model, and create its reference.

In: an objective, a model, the script's reference or None. Out: the collate function, the reference, the batches of an
evaluation with reference log-probabilities.
"""

# P pairs or records in a micro-batch, S sequences, H hidden size

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from burnish.adapters.peft import PeftAdapter, PeftOptions
from burnish.config.errors import UserError
from burnish.data.batches.batching import collate_padded, collate_padding_free, collate_prefix_sharing
from burnish.kernels.probe import Capabilities, unwrap_peft
from burnish.loop.protocols import Objective, Parallel
from burnish.loop.types import Batch, Row
from burnish.losses.base import Collate
from burnish.losses.preference_options import ReferenceOptions
from burnish.losses.reference import (
    DisabledAdapter,
    InitialWeights,
    MovingReference,
    Reference,
    SeparateModel,
    ShardedInitialWeights,
    UnchangedModel,
    refuse_sharded_weights,
)
from burnish.losses.responses import AnswersObjective
from burnish.models.images.features import patch_vision_model
from burnish.models.patches.capabilities import find_capabilities
from burnish.models.patches.dropout import switch_off_dropout
from burnish.run.reference_cache import RowsWithReference, fill
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.data.in_step import equalize_batches
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.data.prefix_sharing import may_be_padding_free
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.notes import logger
from burnish.trainer.trl.preferences.rows import ObjectiveRows


def padding_batch(batch: Batch) -> PaddingBatch:
    """A batch with weight 0, also if the batches of a step depend on each other."""
    kl = {"kl": padding_batch(batch["kl"])} if "kl" in batch else {}
    return PaddingBatch({**batch, **kl, "items": torch.zeros_like(batch["items"])})


class EvalBatchesWithReference:
    """The batches of an evaluation with reference log-probabilities, the same number on every rank.

    Args:
        loader: this rank's loader.
        objective: adds the log-probabilities (``iter_eval``).
        module: the module of the objective.
        parallel: backend of the run.
        convert: converts a batch of the loader to the form that the objective reads.
        pad: converts a batch to one with weight 0, for ranks without further batches.
    """

    def __init__(
        self, loader: Any, objective: Objective, module: nn.Module, parallel: Parallel,
        convert: Callable[[Batch], Batch], pad: Callable[[Batch], Batch],
    ) -> None:  # fmt: skip
        self.loader, self.objective, self.module, self.parallel = loader, objective, module, parallel
        self.convert, self.pad = convert, pad
        self.dataset = getattr(loader, "dataset", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = _EqualizedLoader(self.loader, self.parallel, self.convert, self.pad)
        for batch in self.objective.iter_eval(self.module, batches, self.parallel):
            # Its rows are counted by the first tensor; a padded batch of TRL is not changed.
            yield {"items": batch["items"], **batch} if "items" in batch else batch


@dataclass(eq=False)
class _EqualizedLoader:
    """A loader that can be iterated several times, with the same number of batches on all ranks."""

    loader: Any
    parallel: Parallel
    convert: Callable[[Batch], Batch]
    pad: Callable[[Batch], Batch]

    def __iter__(self) -> Iterator[Batch]:
        for batch, is_own in equalize_batches(map(self.convert, self.loader), self.parallel):
            yield batch if is_own else self.pad(batch)


# --- layout -----------------------------------------------------------------------------------------------------------


def capabilities_and_collator(
    model: Any, second: Any, args: TrlArguments, pad: int, skips_tokens: bool, scores: bool
) -> tuple[Capabilities, Collate]:
    """Probe the model, and select the collate function: padding-free if the model, and a reference with the same
    inputs, separate adjacent sequences; else padded.

    Args:
        second: the reference, if it is a separate model.
        pad: id of the padding token.
        skips_tokens: whether tokens without influence on a loss are skipped, if possible.
        scores: whether the model is a sequence classifier.
    """
    may, target = may_be_padding_free(model), _HiddenStatesOfClassifier(model) if scores else model
    capabilities = find_capabilities(
        target, padding_free=may, prefix_sharing=may and skips_tokens, head_of=None if scores else model
    )
    both = [capabilities]
    if second is not None:
        may = capabilities.is_padding_free and may_be_padding_free(second)
        both.append(find_capabilities(second, padding_free=may, prefix_sharing=may and capabilities.shares_prefixes))
    for note in (note for one in both for note in one.notes):
        logger.warning(note)
    if all(one.shares_prefixes for one in both):
        return capabilities, collate_prefix_sharing
    if all(one.is_padding_free for one in both):
        return capabilities, collate_padding_free
    multiple: Any = args.pad_to_multiple_of
    return capabilities, partial(collate_padded, pad_id=pad, pad_to_multiple_of=multiple)


class _HiddenStatesOfClassifier(nn.Module):
    """Wraps a sequence classifier to return the hidden states of all tokens, for probes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_base_model(self) -> Any:
        return unwrap_peft(self.model)

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.get_base_model().base_model(**inputs)[0])


class Score(nn.Module):
    """The score layer ``model.score`` of a sequence classifier, with the interface of ``ValueHead``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = unwrap_peft(model)
        score = getattr(inner, "score", None)
        if not isinstance(score, nn.Module) or inner.config.num_labels != 1:
            raise UserError(
                "Reward models must be sequence classifiers with `num_labels=1`. Received: "
                f"{type(inner).__name__} with {getattr(inner.config, 'num_labels', 'no')} labels.",
                remedy="Load it with AutoModelForSequenceClassification.from_pretrained(name, num_labels=1), or "
                "pass its name to RewardTrainer.",
            )
        self.score = score

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N,) float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = self.score(hidden.to(next(self.score.parameters()).dtype))
        return scores.squeeze(-1).float()


# --- reference --------------------------------------------------------------------------------------------------------


def reference_for(
    objective: AnswersObjective,
    options: ReferenceOptions,
    model: Any,
    ref_model: Any,
    peft_config: Any,
    parallel: Parallel,
) -> Reference | None:
    """The reference: ``ref_model``, the model without its new adapter, or the weights at the start of training.

    Args:
        options: options of the reference.
        model: the policy.
        ref_model: a separate reference model, or None.
        peft_config: config of a new adapter; None if there is none, or it is continued.
        parallel: processes and devices of the run.
    """
    if not objective.needs_reference:
        return None
    if ref_model is not None:
        switch_off_dropout(ref_model)
        patch_vision_model(ref_model)
        second = SeparateModel(objective.module_of_reference(ref_model.to(parallel.device)))
        if not options.sync_ref_model:
            return second
        refuse_sharded_weights(parallel)
        return _following(second.beside(model), options)
    if peft_config is not None and _starts_as_identity(peft_config) and not options.sync_ref_model:
        adapter = PeftAdapter(PeftOptions())
        adapter.attach(model)
        return DisabledAdapter(adapter, model)
    if options.precompute_ref_log_probs:
        return UnchangedModel()
    if options.sync_ref_model:
        refuse_sharded_weights(parallel)
        return _following(InitialWeights(model), options)
    return ShardedInitialWeights(parallel) if parallel.shards_weights else InitialWeights(model)


def _following(start: InitialWeights | SeparateModel, options: ReferenceOptions) -> MovingReference:
    return MovingReference(start, options.ref_model_sync_steps, options.ref_model_mixup_alpha)


def _starts_as_identity(peft_config: Any) -> bool:
    """Whether the model computes the same with and without the new adapter. False for prompt learning, and for adapters
    initialized from the weights (PiSSA)."""
    return not peft_config.is_prompt_learning and getattr(peft_config, "init_lora_weights", True) in (True, "gaussian")


def with_numbers(
    dataset: Any, rows_of: Callable[[list[Any]], list[Row]], objective: AnswersObjective, module: nn.Module,
    parallel: Parallel, size: int, compute: Callable[[Any], dict[str, list[float]]] | None = None,
) -> Any:  # fmt: skip
    """A dataset with the reference's log-probabilities of each row. Returned unchanged if it already has them.

    Args:
        rows_of: rows of the dataset -> rows of the objective.
        module: the objective's module of the policy.
        parallel: processes and devices of the run.
        size: batch size.
        compute: dataset -> the columns, if a script computes them.

    Raises:
        UserError: for a streamed dataset, and if the reference does not exist any more.
    """
    if not is_datasets_set(dataset):
        what = "`precompute_ref_log_probs` is not supported with IterableDataset."
        raise UserError(what, remedy="Use a map-style dataset, or remove `precompute_ref_log_probs`.")
    if any(name.startswith("reference_") and name.endswith("logps") for name in dataset.column_names):
        return dataset
    if objective.reference is None:
        what = "Cannot compute reference log-probabilities for a dataset passed to `evaluate()`: with "
        what += "`precompute_ref_log_probs`, the reference model is freed before training."
        remedy = "Pass the dataset as `eval_dataset` to the Trainer, or remove `precompute_ref_log_probs`."
        raise UserError(what, remedy=remedy)
    if compute is not None:
        for name, answers in compute(dataset).items():
            dataset = dataset.add_column(name, answers)
        return dataset
    rows = RowsWithReference(ObjectiveRows(dataset, lambda row: rows_of([row])[0]))
    for sentence in fill(rows, objective, module, parallel, size):
        logger.warning(sentence)
    for name, values in rows.columns.items():
        dataset = dataset.add_column(name, values.tolist())
    return dataset
