"""An objective of ``objectives`` as a ``Trainer`` runs it: fitted to the model, with its reference.

In: an objective, a model, the reference that a script gives or none. Out: the collate function, the reference, the
batches of an evaluation with the numbers of the reference.
"""

# P pairs or records in a micro-batch, S sequences, H hidden size

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from burnish.adapters.peft import PeftAdapter, PeftOptions
from burnish.config.errors import UserError
from burnish.data.batches.batching import collate_padded, collate_padding_free, collate_prefix_sharing
from burnish.data.rows.reference_numbers import RowsWithReference
from burnish.kernels.probe import Capabilities, causal_lm
from burnish.loop.protocols import Engine
from burnish.loop.types import Batch, Row
from burnish.losses.base import Collate
from burnish.losses.pairs import AnswersObjective
from burnish.losses.preference_options import ReferenceOptions
from burnish.losses.reference import (
    AdapterOff,
    AsItIs,
    Following,
    Reference,
    SecondModel,
    StartInPieces,
    StartOfRun,
    refuse_pieces,
)
from burnish.models.dropout import switch_off_dropout
from burnish.models.patches.capabilities import find_capabilities
from burnish.run.reference_cache import fill
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.data.in_step import in_step
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.data.prefix_sharing import may_lie_flat
from burnish.trainer.data.stream import PaddingBatch
from burnish.trainer.trl.preferences.rows import ObjectiveRows

logger = logging.get_logger("transformers.trainer")


def padding_batch(batch: Batch) -> PaddingBatch:
    """A batch that counts nothing, also where batches of a step depend on each other."""
    kl = {"kl": padding_batch(batch["kl"])} if "kl" in batch else {}
    return PaddingBatch({**batch, **kl, "items": torch.zeros_like(batch["items"])})


class ReadyBatches:
    """The batches of an evaluation, with what the reference says of them, the same number on every rank.

    Args:
        loader: of this rank. ready: ``Objective.iter_eval`` of the module and the engine.
        pad: makes a batch that was lent by another rank one that counts nothing.
    """

    def __init__(
        self, loader: Any, ready: Callable[[Iterable[Batch]], Iterator[Batch]], engine: Engine,
        pad: Callable[[Batch], Batch] = padding_batch,
    ) -> None:  # fmt: skip
        self.loader, self.ready, self.engine, self.pad = loader, ready, engine, pad
        self.dataset = getattr(loader, "dataset", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.ready(_InStep(self.loader, self.engine, self.pad)):
            # Its rows are counted by the first tensor; a padded batch of TRL's stays as it is.
            yield {"items": batch["items"], **batch} if "items" in batch else batch


class _InStep:
    """A loader that may be iterated several times, in step with the other ranks."""

    def __init__(self, loader: Any, engine: Engine, pad: Callable[[Batch], Batch]) -> None:
        self.loader, self.engine, self.pad = loader, engine, pad

    def __iter__(self) -> Iterator[Batch]:
        for batch, is_own in in_step(self.loader, self.engine):
            yield batch if is_own else self.pad(batch)


# --- layout -----------------------------------------------------------------------------------------------------------


def fitted(
    model: Any, second: Any, args: TrlArguments, pad: int, leaves_tokens_out: bool, scores: bool
) -> tuple[Capabilities, Collate]:
    """Ask the model, and choose the function that makes its micro-batches: flat where the model, and the reference that
    reads the same, keep neighbours apart, else padded.

    Args:
        second: the reference, where it is a model of its own.
        pad: the token for padding.
        leaves_tokens_out: whether tokens on which nothing depends are left out, where that is possible.
    """
    may, asked = may_lie_flat(model), _AllHidden(model) if scores else model
    found = find_capabilities(
        asked, padding_free=may, prefix_sharing=may and leaves_tokens_out, head_of=None if scores else model
    )
    both = [found]
    if second is not None:
        may = found.is_padding_free and may_lie_flat(second)
        both.append(find_capabilities(second, padding_free=may, prefix_sharing=may and found.shares_prefixes))
    for note in (note for one in both for note in one.notes):
        logger.warning(note)
    if all(one.shares_prefixes for one in both):
        return found, collate_prefix_sharing
    if all(one.is_padding_free for one in both):
        return found, collate_padding_free
    multiple: Any = args.pad_to_multiple_of
    return found, partial(collate_padded, pad_id=pad, pad_to_multiple_of=multiple)


class _AllHidden(nn.Module):
    """A sequence classifier that is asked for the hidden states of all its tokens, as a probe wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_base_model(self) -> Any:
        return causal_lm(self.model)

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.get_base_model().base_model(**inputs)[0])


class Score(nn.Module):
    """The score of a sequence classifier, asked as a ``ValueHead`` is. Args: model: has it as ``score``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = causal_lm(model)
        score = getattr(inner, "score", None)
        if not isinstance(score, nn.Module) or inner.config.num_labels != 1:
            raise UserError(
                f"Reward models must be sequence classifiers with `num_labels=1`. Received: "
                f"{type(inner).__name__} with "
                f"{getattr(inner.config, 'num_labels', 'no')} labels.",
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
    objective: AnswersObjective, options: ReferenceOptions, model: Any, ref_model: Any, peft_config: Any, engine: Engine
) -> Reference | None:
    """The policy's counterpart: ``ref_model``, the model without its new adapter, or the weights at the start.

    Args:
        peft_config: of an adapter that is new; None where there is none, or it is continued.
    """
    if not objective.needs_reference:
        return None
    if ref_model is not None:
        switch_off_dropout(ref_model)
        second = SecondModel(objective.module_of_reference(ref_model.to(engine.device)))
        if not options.sync_ref_model:
            return second
        refuse_pieces(engine)
        return _following(second.beside(model), options)
    if peft_config is not None and _begins_as_nothing(peft_config) and not options.sync_ref_model:
        adapter = PeftAdapter(PeftOptions())
        adapter.attach(model)
        return AdapterOff(adapter, model)
    if options.precompute_ref_log_probs:
        return AsItIs()
    if options.sync_ref_model:
        refuse_pieces(engine)
        return _following(StartOfRun(model), options)
    return StartInPieces(engine) if engine.splits_weights else StartOfRun(model)


def _following(start: StartOfRun | SecondModel, options: ReferenceOptions) -> Following:
    return Following(start, options.ref_model_sync_steps, options.ref_model_mixup_alpha)


def _begins_as_nothing(peft_config: Any) -> bool:
    """Return whether the model computes the same with the new adapter and without: not with a learned prompt, nor where
    the adapter takes a part of the weights (PiSSA)."""
    return not peft_config.is_prompt_learning and getattr(peft_config, "init_lora_weights", True) in (True, "gaussian")


def with_numbers(
    dataset: Any, rows_of: Callable[[list[Any]], list[Row]], objective: AnswersObjective, module: nn.Module,
    engine: Engine, size: int, ask: Callable[[Any], dict[str, list[float]]] | None = None,
) -> Any:  # fmt: skip
    """A set with what the objective's reference says of each row; as it is where that lies there already.

    Args:
        rows_of: rows of the set -> the objective's. module: the policy's. size: rows that are asked about at a time.
        ask: a set -> its columns, where a script answers.

    Raises:
        UserError: of a streamed set, and of one that comes when the reference is there no more.
    """
    if not is_datasets_set(dataset):
        what = "`precompute_ref_log_probs` is not supported with IterableDataset."
        raise UserError(what, remedy="Use a map-style dataset, or remove `precompute_ref_log_probs`.")
    if any(name.startswith("reference_") and name.endswith("logps") for name in dataset.column_names):
        return dataset
    if objective.reference is None:
        what = "Cannot compute reference log-probs for a dataset passed to `evaluate()`: with "
        what += "`precompute_ref_log_probs`, the reference model is freed before training."
        remedy = "Pass the dataset as `eval_dataset` to the Trainer, or remove `precompute_ref_log_probs`."
        raise UserError(what, remedy=remedy)
    if ask is not None:
        for name, answers in ask(dataset).items():
            dataset = dataset.add_column(name, answers)
        return dataset
    rows = RowsWithReference(ObjectiveRows(dataset, lambda row: rows_of([row])[0]))
    for sentence in fill(rows, objective, module, engine, size):
        logger.warning(sentence)
    for name, values in rows.columns.items():
        dataset = dataset.add_column(name, values.tolist())
    return dataset
