"""``PreferenceTrainer``: what the trainers on preference datasets share.

In: a model or its name, a config, preference datasets. Out: the trained model. Data is prepared in ``rows.py``; the
losses are in ``losses``; ``objective.py`` fits them to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.adapters.peft import is_peft_model
from burnish.config.errors import UserError
from burnish.data.batches.batching import collate_padded
from burnish.data.batches.loader import num_tokens
from burnish.data.sets.trl import Kind
from burnish.loop.loop import TrainOutput
from burnish.loop.meter import EvalSums
from burnish.loop.types import Batch, Loss, Row, StepBatch
from burnish.losses.pair_values import PAIR_COLUMNS
from burnish.losses.preference_options import needs_reference
from burnish.losses.reference import DisabledAdapter, InitialWeights, MovingReference, UnchangedModel
from burnish.losses.responses import AnswersObjective
from burnish.losses.reward import RewardObjective
from burnish.parallel.single import set_seed
from burnish.run.plan.other_models import other_vocabulary
from burnish.run.references import refuse_other_vocabulary
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.notes import logger
from burnish.trainer.reporting import Count
from burnish.trainer.trl.base import for_each_set, sets_by_name
from burnish.trainer.trl.old_arguments import resolve_arguments
from burnish.trainer.trl.preferences.collator import (
    REFERENCE,
    Padded,
    PaddedBySide,
    collate_by_script,
    column_of,
    reference_logps,
    rows_of_padded,
)
from burnish.trainer.trl.preferences.config import PreferenceConfig, WithReference
from burnish.trainer.trl.preferences.objective import (
    EvalBatchesWithReference,
    Score,
    capabilities_and_collator,
    padding_batch,
    reference_for,
    with_numbers,
)
from burnish.trainer.trl.preferences.rows import NAMES, RECORD_COLUMNS, pair_row, preference_rows, template_of
from burnish.trainer.trl.preferences.scripted import (
    OverridableTrainer,
    PreferenceOutput,
    Scripted,
    ScriptedBatch,
    model_inputs_of,
)
from burnish.trainer.trl.prepared import first_row
from burnish.trainer.trl.sft.checks import check_sft_sets
from burnish.trainer.trl.sft.setup import (
    check_model,
    inner_tokenizer,
    is_template_file,
    load_named_model,
    resolve_model,
    vocabulary_size,
)
from burnish.trainer.trl.vision import MEDIA, VisionCollator, family_for

_SIDES: Mapping[Kind, tuple[str, ...]] = {"pairs": ("chosen", "rejected"), "unpaired": ("", "kl"), "scores": ()}
"""Responses of a row for which the reference is evaluated."""


class CountPreferences(Count):
    """Counts pairs or records, and always their tokens."""

    def __call__(self, batch: Batch) -> tuple[int, int]:
        if "items" in batch:
            return len(batch["items"]), num_tokens(batch)
        if "chosen_input_ids" in batch:
            tokens = sum(int(batch[f"{side}_attention_mask"].sum()) for side in ("chosen", "rejected"))
            return len(batch["chosen_input_ids"]), tokens
        return len(batch["input_ids"]) // (1 if "label" in batch else 2), num_tokens(batch)


class PreferenceTrainer(OverridableTrainer):
    """Base class of the preference trainers. The arguments are those of TRL's (https://huggingface.co/docs/trl), except
    for:

    Args:
        ref_model: a separate reference model or its name. Default: the model at the start of training, either without
            its new adapter or as a copy of the trained weights.
        args: the config of this trainer, or ``TrainingArguments`` and defaults for the rest.
        data_collator: creates TRL's padded batch from rows; its padding is removed again (``collator.py``).
        compute_metrics: gets the rewards of pairs (P, 2), chosen first, with labels 0; for KTO the rewards (P,) with
            their labels.

    A subclass that overrides a method of TRL with a batch or the model as argument (``compute_loss``,
    ``prediction_step``, ``_compute_loss``, ``get_batch_loss_metrics``, ...) gets TRL's padded batch and the bare model
    (``scripted.py``).

    Logged with the loss, each as a mean over its own items since the last log: ``rewards/*``, ``logps/*``,
    ``logits/*``, ``entropy``, ``mean_token_accuracy``, ``num_tokens``, ``kl``; scores of a reward model.
    """

    args: PreferenceConfig
    config_class: ClassVar[type[PreferenceConfig]]
    objective_class: ClassVar[Callable[..., Any]]
    kind: ClassVar[Kind] = "pairs"  # kind of its records
    _counter = CountPreferences
    padding_class: ClassVar[type[Padded]] = Padded
    _own_collators = (Padded, PaddedBySide)
    _loads_own_batches = False
    _requests_loss_only = False
    _row_of: Callable[[Mapping[str, Any]], Row] = staticmethod(pair_row)

    def __init__(
        self, model: Any, ref_model: Any = None, args: object = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        compute_metrics: Callable[..., Any] | None = None, callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, quantization_config: Any = None,
        peft_config: Any = None, **old: Any,
    ) -> None:  # fmt: skip
        args, processing_class = resolve_arguments(type(self), self.config_class, args, model, processing_class, old)
        self._check_arguments(model, ref_model, args, train_dataset, quantization_config)
        set_seed(args.seed, args.full_determinism)  # an adapter's weights are initialized when it is attached
        is_scored = self.objective_class is RewardObjective
        model, processing_class, added = resolve_model(model, args, processing_class, quantization_config, is_scored)
        self._tokenizer = inner_tokenizer(processing_class)
        first_row(train_dataset)  # raises for an empty dataset
        datasets = [train_dataset, *sets_by_name(eval_dataset).values()]
        self.family = family_for(model, processing_class, self._tokenizer, datasets)
        if self.family is not None and is_scored:
            raise ValueError("RewardTrainer does not support images.")
        is_collated_by_script = data_collator is not None and type(data_collator) not in self._own_collators
        # As in TRL, the collator of a script gets the records with their images.
        self._skip_prepare_dataset = self.family is not None and is_collated_by_script
        if self._skip_prepare_dataset:
            self._check_collated_by_script(args, train_dataset)
        pad_token = self._pad_token(args)
        sets_router = isinstance(args, WithReference)  # ORPO and CPO only use the model's config, in TRL as well
        model, choices = self._attach(model, args, processing_class, peft_config, added, pad_token, sets_router)
        if (requested := getattr(args, "padding_value", None)) is not None:
            self._pad = requested
        template = template_of(args, self._tokenizer, self.kind, self.family)
        self.objective = self.objective_class(choices, template, self._tokenizer)
        if not self._skip_prepare_dataset:
            train_dataset = self._prepare_dataset(train_dataset, processing_class, args, "train")
            eval_dataset = self._prepared_evals(eval_dataset, processing_class, args)
        multiple: Any = args.pad_to_multiple_of
        data_collator = data_collator or self.padding_class(self._row_of, self.kind, self._pad, multiple)
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, compute_metrics=compute_metrics, callbacks=callbacks,
            optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self._second_model = self._second(ref_model, args)
        self._configure_objective(peft_config)
        self._totals = EvalSums()
        self._inspect(args)
        if self.precompute_ref_logps:
            self._precompute_reference()

    @staticmethod
    def _check_arguments(
        model: Any, ref_model: Any, args: PreferenceConfig, train_dataset: Any, quantization_config: Any
    ) -> None:
        """Raise TypeError, ValueError or UserError for arguments that contradict each other, before weights are read.
        A chat template of another tokenizer changes the model's vocabulary."""
        if ref_model is not None:
            check_model(ref_model, "ref_model")
            if ref_model is model:
                raise ValueError(
                    "`model` and `ref_model` must be different objects. Remove `ref_model` to use a copy of the model."
                )
        if quantization_config is not None and not isinstance(model, str):
            what = "`quantization_config` has no effect on a model that is already instantiated."
            raise UserError(what, remedy="Pass the model's name or folder as `model`, or remove `quantization_config`.")
        check_sft_sets(train_dataset)
        changes_vocabulary = args.chat_template_path is not None and not is_template_file(args.chat_template_path)
        if isinstance(ref_model, str) and not changes_vocabulary and needs_reference(args.choices()):
            policy, reference = vocabulary_size(model, args), vocabulary_size(ref_model, args, "ref_model")
            if policy != reference:
                raise UserError(other_vocabulary(policy, reference))

    def _check_collated_by_script(self, args: PreferenceConfig, train_dataset: Any) -> None:
        """Raise ValueError for arguments that need prepared rows, if a script's collator gets the records."""
        if isinstance(args, WithReference) and args.precompute_ref_log_probs:
            raise ValueError(
                "`precompute_ref_log_probs=True` is not supported for a dataset with images and a `data_collator`, "
                "which gets the records. Set `precompute_ref_log_probs=False`, or remove `data_collator`."
            )

    def _pad_token(self, args: PreferenceConfig) -> str | None:
        return args.pad_token

    # --- the objective ------------------------------------------------------------------------------------------------

    @property
    def _needs_reference(self) -> bool:
        return isinstance(self.objective, AnswersObjective) and self.objective.needs_reference

    @property
    def precompute_ref_logps(self) -> bool:
        """Whether the log-probabilities of the reference are precomputed. The name is TRL's."""
        args = self.args
        return isinstance(args, WithReference) and args.precompute_ref_log_probs and self._needs_reference

    @property
    def ref_model(self) -> Any:
        """The reference as a model: the given one, or the weights at the start of training. None if the reference is
        the model without its adapter, or its values are precomputed.
        """
        if self._second_model is not None or is_peft_model(self.model):
            return self._second_model
        reference = self.objective.reference if self._needs_reference else None
        start = reference.start if isinstance(reference, MovingReference) else reference
        return start.as_model(self.model) if isinstance(start, InitialWeights) else None

    def _second(self, ref_model: Any, args: PreferenceConfig) -> Any:
        """The reference, if it is a separate model."""
        if not self._needs_reference:
            return None
        if isinstance(ref_model, str):
            ref_model = load_named_model(ref_model, args, None, argument="ref_model")
        if ref_model is not None:
            refuse_other_vocabulary(self.model, ref_model)
        return ref_model

    def _configure_objective(self, peft_config: Any) -> None:
        objective, model, is_scored = self.objective, self.model, isinstance(self.objective, RewardObjective)
        leaves_out = self._skips_tokens and objective.allows_prefix_sharing(model)
        capabilities, collate = capabilities_and_collator(
            model, self._second_model, self.args, self._pad, leaves_out, is_scored
        )
        if is_scored:
            objective.head = Score(model)
        if self.family is not None:
            capabilities = replace(capabilities, is_padding_free=False, shares_prefixes=False)
            collate = self._collator_of_images(self.family)
        for note in objective.configure(capabilities, collate):
            logger.warning(note)
        if isinstance(objective, AnswersObjective):
            second, choices = self._second_model, self.args.choices()
            objective.reference = reference_for(objective, choices, model, second, peft_config, self._parallel)
        self._known_capabilities = replace(capabilities, model=model)
        self.model_wrapped = self._made = objective.module(model)
        self.aux_loss_enabled = bool(getattr(objective, "aux_coefficient", 0.0))  # reward models have no router loss

    def _collator_of_images(self, family: Any) -> Callable[[Sequence[Row]], Batch]:
        """Collates rows with images: prepared ones, or those of a padded batch by a script's collator."""
        multiple: Any = self.args.pad_to_multiple_of
        text = partial(collate_padded, pad_id=self._pad, pad_to_multiple_of=multiple)
        if self._skip_prepare_dataset:
            return partial(collate_by_script, text, family.placeholder_ids)
        options: dict[str, Any] = {"num_workers": self.args.dataloader_num_workers, "one_by_one": not self._is_scripted}
        collate = VisionCollator(self.model, family, text, self._pad, multiple, **options)
        collate.join_processes(self.model, self._parallel)
        return collate

    def _padding_batch(self, batch: Batch) -> PaddingBatch:
        return PaddingBatch(batch) if self._is_scripted or "items" not in batch else padding_batch(batch)

    # --- methods of a script: scripted.py -----------------------------------------------------------------------------

    @cached_property
    def _scripted(self) -> Scripted:
        self._warn_of_overrides()
        return Scripted(self._rows_of_padded, self.objective, self._over, self._parallel)

    def _loss_of_padded(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        """``compute_loss`` for a padded batch."""
        ready = self._scripted.ready(model, inputs)
        return self._mean_loss(self._scripted.loss_of(model, inputs, ready), model, ready, inputs, return_outputs)

    def _mean_loss(self, loss_sums: Loss, model: nn.Module, ready: Batch, inputs: Any, return_outputs: bool) -> Any:
        num_items = self.objective.num_items(ready)
        if model.training:
            self._step.sums.update(loss_sums.sums)
        else:
            self._totals.add(loss_sums, num_items)
        loss = loss_sums.total / num_items.clamp(min=1)
        if not return_outputs:
            return loss
        if inputs is ready:
            return loss, loss_sums.outputs
        with torch.no_grad():
            logits = model(**model_inputs_of(inputs, self._pad), use_cache=False).logits
        return loss, PreferenceOutput(logits=logits, rewards=loss_sums.outputs)

    def _inspect(self, args: PreferenceConfig) -> None:
        """Print notes on the rows of the training set."""

    def _precompute_reference(self) -> None:
        """Precompute the reference's log-probabilities of every row, and free a reference that takes memory."""
        self.train_dataset = self._add_missing_columns(self.train_dataset, "train")
        self.eval_dataset = for_each_set(self.eval_dataset, self._add_missing_columns)
        if not isinstance(self.objective.reference, DisabledAdapter | UnchangedModel):
            self.objective.reference = self._second_model = None

    def _add_missing_columns(self, dataset: Any, name: str) -> Any:
        size = getattr(self.args, "precompute_ref_batch_size", None) or self.args.eval_batch_size
        return self._precompute_ref_logps(dataset, name, size)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """A dataset with the reference's log-probabilities of each row. Raises the errors of ``with_numbers``."""
        compute = partial(self._logps_of_script, batch_size) if self._overrides("compute_ref_log_probs") else None
        return with_numbers(dataset, self._rows_of, self.objective, self._made, self._parallel, batch_size, compute)

    def _logps_of_script(self, batch_size: int, dataset: Any) -> dict[str, list[float]]:
        """The columns of a dataset computed by a script's ``compute_ref_log_probs``. Every process computes all
        rows."""
        model, columns = self.ref_model or self.model, [column_of(side) for side in _SIDES[self.kind]]
        by_column: dict[str, list[float]] = {name: [] for name in columns}
        for start in range(0, len(dataset), batch_size):
            rows = [dataset[at] for at in range(start, min(start + batch_size, len(dataset)))]
            answers = self.compute_ref_log_probs(model, self._prepare_inputs(self.data_collator(rows)))
            for name, logps in zip(columns, answers, strict=True):
                if logps is not None:
                    by_column[name] += logps.tolist()
        return {name: values for name, values in by_column.items() if values}

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> tuple[Tensor | None, ...]:
        """(P,) log-probabilities of the reference: for chosen and rejected responses, or for responses and KTO's
        mismatched ones.

        Args:
            model: the reference, or the trained model.
            inputs: TRL's padded batch.
        """
        columns = self.objective.reference_columns(self._made, self._rows_of_padded(inputs), self._parallel)
        values = (columns.get(column_of(side)) for side in _SIDES[self.kind])
        return tuple(None if one is None else torch.tensor(one, device=self._parallel.device) for one in values)

    # --- data ---------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """A dataset with TRL's columns (``rows.py``). An override may map it before, or return such columns itself."""
        return preference_rows(dataset, dataset_name, args, self.kind, self.objective.encode, self.objective.template)

    def _prepared_evals(self, evals: Any, processing_class: Any, args: PreferenceConfig) -> Any:
        return for_each_set(evals, lambda dataset, name: self._prepare_dataset(dataset, processing_class, args, name))

    def _prepare_passed(self, dataset: Any) -> Any:
        if not self._skip_prepare_dataset:
            dataset = self._prepared_evals(dataset, self.processing_class, self.args)
        return self._add_missing_columns(dataset, "eval") if self.precompute_ref_logps else dataset

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        if self._is_scripted:
            return self._pad_rows(rows)
        known = ({name: row[name] for name in row if name.startswith("reference_")} for row in rows)
        pairs = zip(self._rows_of(rows), known, strict=True)
        batch: Batch = self.objective.collate([{**row, **more} for row, more in pairs])
        return batch

    def _pad_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with reference log-probabilities of its rows if they are precomputed."""
        columns = {column_of(side) for side in REFERENCE}
        plain_rows = [{name: row[name] for name in row if name not in columns} for row in rows]
        return {**self.data_collator(plain_rows), **reference_logps(rows)}

    def _rows_of(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Rows of the objective, converted by a script's ``data_collator`` if there is one."""
        if isinstance(self.data_collator, Padded):
            return [self._row_of(row) for row in rows]
        return self._rows_of_padded(self.data_collator(list(rows)))

    def _rows_of_padded(self, batch: Mapping[str, Any]) -> list[Row]:
        return rows_of_padded(batch, self.kind, may_have_images=self.family is not None)

    def _loader_of(self, get_dataloader: Callable[..., Any], *dataset: Any) -> Any:
        """A loader of the objective's batches. A loader that a script asks for has TRL's padded batches."""
        self._loads_own_batches = True
        try:
            return super()._loader_of(get_dataloader, *dataset)
        finally:
            self._loads_own_batches = False

    @property
    def _collate_for_loader(self) -> Callable[[list[Any]], Any]:
        return self._collate if self._loads_own_batches or self.family is not None else self._pad_rows

    def _in_form_of_objective(self, batch: Batch) -> Batch:
        """Convert a padded batch, such as that of a script's own loader, to the form that ``_objective`` expects."""
        if self._is_scripted or "items" in batch:
            return batch
        collated: Batch = self.objective.collate(self._rows_of_padded(batch))
        return padding_batch(collated) if isinstance(batch, PaddingBatch) else collated

    def _converted_step(self, step_batch: StepBatch) -> StepBatch:
        return replace(step_batch, batches=[self._in_form_of_objective(batch) for batch in step_batch.batches])

    def _set_signature_columns_if_needed(self) -> None:
        numbers = [f"reference_{side}logps" for side in ("", "kl_", "chosen_", "rejected_")]
        if self._skip_prepare_dataset:
            self._signature_columns = [*RECORD_COLUMNS[self.kind], *MEDIA, "tools", "chat_template_kwargs"]
            return
        self._signature_columns = [*NAMES[self.kind], *numbers, *PAIR_COLUMNS, "images", "kl_images"]

    # --- loss ---------------------------------------------------------------------------------------------------------

    def _num_items(self, inputs: Batch) -> Tensor:
        num_items: Tensor = (self.objective if "items" in inputs else self._scripted).num_items(inputs)
        return num_items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """() the mean loss of a micro-batch over its pairs or records, or (loss, outputs).

        Args:
            model: the bare model.
            inputs: TRL's padded batch. If no method is overridden: the objective's module, and a batch from its
                ``prepare_step``.
        """
        if "items" in inputs:
            return self._mean_loss(self.objective.loss(model, inputs), model, inputs, inputs, return_outputs)
        return self._loss_of_padded(model, inputs, return_outputs)

    def _predictions_of(self, outputs: Any, inputs: Any) -> tuple[Any, Any]:
        rewards = getattr(outputs, "rewards", outputs)
        if not isinstance(rewards, Tensor):  # a script's own value
            logits = getattr(outputs, "logits", None)
            return logits, None if logits is None else inputs.get("input_ids")
        ready = inputs.ready if isinstance(inputs, ScriptedBatch) else inputs
        counts = ready["items"] > 0
        rewards = rewards.view(len(counts), -1)[counts]
        labels = ready["tag"][counts] if "tag" in ready else torch.zeros_like(rewards[:, 0])
        return rewards.squeeze(-1), labels

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as in ``TrlTrainer.train``."""
        if isinstance(self.objective, AnswersObjective) and isinstance(self.objective.reference, UnchangedModel):
            self.objective.reference = None  # the policy changes from here on
        return super().train(*args, **kwargs)

    # --- evaluation and logs ------------------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        self._totals = EvalSums()
        batches = EvalBatchesWithReference(
            dataloader, self._objective(), self._model_for_evaluation(), self._parallel, self._in_form_of_objective,
            self._padding_batch,
        )  # fmt: skip
        with torch.no_grad():
            output = super().evaluation_loop(batches, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        means = self.objective.report(self._totals.means(self._parallel))
        metrics: Any = output.metrics
        metrics.update({f"{metric_key_prefix}_{name}": v for name, v in means.items() if name != "loss"})
        metrics[f"{metric_key_prefix}_num_tokens"] = self._num_tokens_so_far()
        return output
