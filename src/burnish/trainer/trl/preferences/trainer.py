"""``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, ``ORPOTrainer``, ``CPOTrainer``, with the constructors and
behavior of TRL's classes, on burnish's ``Trainer`` and objectives.

In: a model or its name, a config, data sets of preferences. Out: the trained model. What becomes of the data is in
``rows.py``; the losses are in ``objectives``; ``objective.py`` fits them to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from burnish.config.errors import Problem, UserError
from burnish.data.batches.stream import num_tokens
from burnish.data.sets.trl import Kind
from burnish.loop.loop import TrainOutput
from burnish.loop.meter import Totals
from burnish.loop.protocols import Objective
from burnish.loop.types import Batch, Row
from burnish.losses.kto import KtoObjective
from burnish.losses.pairs import AnswersObjective, PairObjective
from burnish.losses.reference import AdapterOff, AsItIs, Following, StartOfRun
from burnish.losses.reward import RewardObjective
from burnish.models.dropout import switch_off_dropout
from burnish.models.reward_files import pad_of_classifier
from burnish.parallel.single import set_seed
from burnish.run.references import refuse_other_vocabulary
from burnish.trainer import notes
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.data.stream import PaddingBatch
from burnish.trainer.inspection import is_peft_model
from burnish.trainer.reporting import Count
from burnish.trainer.trl.base import TrlTrainer
from burnish.trainer.trl.preferences.collator import Padded, Unpadded
from burnish.trainer.trl.preferences.config import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    PreferenceConfig,
    RewardConfig,
    WithReference,
)
from burnish.trainer.trl.preferences.objective import (
    ReadyBatches,
    Score,
    fitted,
    padding_batch,
    reference_for,
    with_numbers,
)
from burnish.trainer.trl.preferences.rows import (
    NAMES,
    VerdictsOfSteps,
    pair_row,
    preference_rows,
    template_of,
    verdict_row,
    with_kl_answers,
)
from burnish.trainer.trl.prepared import column_names, first_row
from burnish.trainer.trl.sft.checks import check_sft_sets, refuse_images
from burnish.trainer.trl.sft.setup import (
    attach_peft,
    finish_peft,
    inner_tokenizer,
    load_named_model,
    own_config,
    ready_model,
    set_pad,
)

logger = logging.get_logger("transformers.trainer")


class CountPreferences(Count):
    """Pairs or records, and their tokens, which are counted always."""

    def __call__(self, batch: Batch) -> tuple[int, int]:
        return len(batch["items"]), num_tokens(batch)


class PreferenceTrainer(TrlTrainer):
    """The common part of the trainers of this room.

    Args:
        model: the model, a peft model, or the name or folder of one.
        ref_model: a model of its own, or its name, with which the policy is compared; by default what training starts
            from: the model without a new adapter, or else a copy of the weights that train.
        args: the config of this trainer, or ``TrainingArguments`` with the rest at its defaults.
        data_collator: makes TRL's padded batch of rows, whose padding is taken off again (``collator.py``).
        train_dataset, eval_dataset: ``datasets.Dataset`` or ``IterableDataset``; the latter may be a dict of them.
        processing_class: the tokenizer; by default what lies with the model.
        compute_metrics: gets the rewards of pairs (P, 2), the chosen one first, with labels 0; of verdicts the rewards
            (P,), with the verdicts.
        peft_config: a config of the peft library; the adapter is trained and the model frozen.

    ``compute_loss`` is handed a module that gives log-probabilities of answers, and a batch that is ready for it.
    Logged beside the loss, each a mean over its own items of all micro-batches since the last log: ``rewards/*``,
    ``logps/*``, ``logits/*``, ``entropy``, ``mean_token_accuracy``, ``num_tokens``, ``kl``; scores of a reward model.
    """

    args: PreferenceConfig
    config_class: ClassVar[type[PreferenceConfig]]
    objective_class: ClassVar[Callable[..., Any]]
    tag: ClassVar[str]
    kind: ClassVar[Kind] = "pairs"  # of its records
    _counter = CountPreferences
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
        args = own_config(self.config_class, args, model)
        processing_class = self._take_old_names(processing_class, old)
        if ref_model is not None and ref_model is model:
            raise ValueError("`model` and `ref_model` are one object: the reference would train too. Leave it out.")
        if quantization_config is not None and not isinstance(model, str):
            what = "`quantization_config` quantizes a model while it is loaded, and this one is already instantiated."
            raise UserError(what, remedy="Give its name or folder as `model`, or leave it out.")
        check_sft_sets(train_dataset)
        set_seed(args.seed, args.full_determinism)  # an adapter's weights are drawn when it is attached
        scores = self.objective_class is RewardObjective
        model, processing_class, added = ready_model(model, args, processing_class, quantization_config, scores)
        refuse_images(first_row(train_dataset), processing_class)
        if peft_config is not None:
            model = attach_peft(model, peft_config, added)
        if args.disable_dropout:
            switch_off_dropout(model)
        self._tokenizer = inner_tokenizer(processing_class)
        pad = set_pad(model, processing_class, self._pad_token(args))
        if hasattr(model, "peft_config"):
            finish_peft(model, args)
        choices = args.choices()
        if isinstance(args, WithReference):  # ORPO and CPO go by the model's config alone, in TRL too
            self._set_router(model, args.router_aux_loss_coef)
            choices.router_aux_loss_coef = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        for note in args.notes():
            logger.warning(note)
        template = template_of(args, self._tokenizer, self.kind)
        self.objective = self.objective_class(choices, template, self._tokenizer)
        self._pad = pad
        super().__init__(
            model=model, args=args, data_collator=data_collator or Padded(self._row_of, self.kind, pad),
            train_dataset=self._prepared(train_dataset, "train", args),
            eval_dataset=self._prepared_evals(eval_dataset, args), processing_class=processing_class,
            compute_metrics=compute_metrics, callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self._second_model = self._second(ref_model, args)
        self._fit(peft_config)
        self._totals = Totals()
        self._inspect(args)
        if self._asks_beforehand:
            self._ask_beforehand()
        tag: Any = getattr(self.model, "add_model_tags", None)
        if tag is not None:
            tag(self._tag_names)

    @property
    def _tag_names(self) -> list[str]:
        """Tags of the model's page; TRL's trainers have this name for theirs."""
        return ["burnish", self.tag]

    def _take_old_names(self, processing_class: Any, old: dict[str, Any]) -> Any:
        name, config = type(self).__name__, self.config_class.__name__
        if "tokenizer" in old:
            notes.warn(f"{name} takes `tokenizer` as `processing_class` today.", FutureWarning, stacklevel=4)
            processing_class = old.pop("tokenizer") if processing_class is None else processing_class
        for word in old:
            where = f" Write {config}({word}=...)." if word in self.config_class.__dataclass_fields__ else ""
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {word!r}.{where}")
        return processing_class

    def _pad_token(self, args: PreferenceConfig) -> str | None:
        return args.pad_token

    # --- the objective ------------------------------------------------------------------------------------------------

    @property
    def _needs_reference(self) -> bool:
        return isinstance(self.objective, AnswersObjective) and self.objective.needs_reference

    @property
    def _asks_beforehand(self) -> bool:
        args = self.args
        return isinstance(args, WithReference) and args.precompute_ref_log_probs and self._needs_reference

    @property
    def ref_model(self) -> Any:
        """The reference as a model: the one that was given, or the weights that training began with; None where it is
        the model without its adapter, or its numbers lie beside the rows."""
        if self._second_model is not None or is_peft_model(self.model):
            return self._second_model
        reference = self.objective.reference if self._needs_reference else None
        start = reference.start if isinstance(reference, Following) else reference
        return start.as_model(self.model) if isinstance(start, StartOfRun) else None

    def _second(self, ref_model: Any, args: PreferenceConfig) -> Any:
        """The reference, where it is a model of its own."""
        if not self._needs_reference:
            return None
        second = load_named_model(ref_model, args, None) if isinstance(ref_model, str) else ref_model
        if second is not None:
            refuse_other_vocabulary(self.model, second)
        return second

    def _fit(self, peft_config: Any) -> None:
        objective, model, is_scored = self.objective, self.model, isinstance(self.objective, RewardObjective)
        leaves_out = self._leaves_tokens_out and objective.allows_prefix_sharing(model)
        found, collate = fitted(model, self._second_model, self.args, self._pad, leaves_out, is_scored)
        if is_scored:
            objective.head = Score(model)
        for note in objective.fit(found, collate):
            logger.warning(note)
        if isinstance(objective, AnswersObjective):
            choices = self.args.choices()
            objective.reference = reference_for(
                objective, choices, model, self._second_model, peft_config, self._engine
            )
        self._asked = replace(found, model=model)
        self.model_wrapped = self._made = objective.module(model)
        self.aux_loss_enabled = bool(getattr(objective, "aux_coefficient", 0.0))  # a score has no router's loss

    def _objective(self) -> Objective:
        objective: Objective = self.objective
        return objective

    def _module(self) -> nn.Module:
        module: nn.Module = self._made
        return module

    def _padding_batch(self, batch: Batch) -> PaddingBatch:
        return padding_batch(batch)

    def _inspect(self, args: PreferenceConfig) -> None:
        """Remarks on the rows of the training set."""

    def _ask_beforehand(self) -> None:
        """Put what the reference says of every row beside it, and let a reference go that takes memory."""
        evals = self.eval_dataset
        self.train_dataset = self._completed(self.train_dataset)
        if evals is not None:
            is_one = not isinstance(evals, dict)
            self.eval_dataset = (
                self._completed(evals) if is_one else {name: self._completed(one) for name, one in evals.items()}
            )
        if not isinstance(self.objective.reference, AdapterOff | AsItIs):
            self.objective.reference = self._second_model = None

    def _completed(self, dataset: Any) -> Any:
        """A set with what the reference says of each row. Raises: as ``with_numbers``."""
        size = getattr(self.args, "precompute_ref_batch_size", None) or self.args.eval_batch_size
        return with_numbers(dataset, self._rows_of, self.objective, self._made, self._engine, size)

    # --- data ---------------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str, args: PreferenceConfig) -> Any:
        return preference_rows(dataset, name, args, self.kind, self.objective.encode, self.objective.template)

    def _prepared_evals(self, eval_dataset: Any, args: PreferenceConfig) -> Any:
        if isinstance(eval_dataset, dict):
            return {name: self._prepared(dataset, name, args) for name, dataset in eval_dataset.items()}
        return None if eval_dataset is None else self._prepared(eval_dataset, "eval", args)

    def _ready_evals(self, dataset: Any) -> Any:
        """A set that a script hands in, prepared as the constructor prepares its own."""
        dataset = self._prepared_evals(dataset, self.args)
        return self._completed(dataset) if self._asks_beforehand else dataset

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        known = ({name: row[name] for name in row if name.startswith("reference_")} for row in rows)
        laid = zip(self._rows_of(rows), known, strict=True)
        batch: Batch = self.objective.collate([{**row, **more} for row, more in laid])
        return batch

    def _rows_of(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Rows of the objective, by ``data_collator`` where a script has given one."""
        if isinstance(self.data_collator, Padded):
            return [self._row_of(row) for row in rows]
        return Unpadded(self.data_collator, self.kind)(rows)

    @property
    def _collate_for_loader(self) -> Callable[[list[Any]], Any]:
        return self._collate

    def _set_signature_columns_if_needed(self) -> None:
        numbers = [f"reference_{side}logps" for side in ("", "kl_", "chosen_", "rejected_")]
        self._signature_columns = [*NAMES[self.kind], *numbers]

    # --- loss ---------------------------------------------------------------------------------------------------------

    def _num_items(self, inputs: Batch) -> Tensor:
        num_items: Tensor = self.objective.num_items(inputs)
        return num_items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """() the mean loss of a micro-batch over its pairs or records, or (loss, rewards).

        Args:
            model: the objective's module. inputs: a batch that the objective's ``prepare_step`` has seen.
        """
        found, num_items = self.objective.loss(model, inputs), self._num_items(inputs)
        if model.training:
            self._step.sums.update(found.sums)
        else:
            self._totals.add(found, num_items)
        loss = found.total / num_items.clamp(min=1)
        return (loss, found.outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, rewards = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        counts = inputs["items"] > 0
        rewards = rewards.view(len(counts), -1)[counts]
        labels = inputs["tag"][counts] if "tag" in inputs else torch.zeros_like(rewards[:, 0])
        return loss.detach(), rewards.squeeze(-1), labels

    def train(self, *given: Any, **named: Any) -> TrainOutput:
        """As ``TrlTrainer.train``."""
        if isinstance(self.objective, AnswersObjective) and isinstance(self.objective.reference, AsItIs):
            self.objective.reference = None  # from here on the policy is not what it was
        return super().train(*given, **named)

    # --- evaluation and logs ------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As the Trainer's; a set that is handed in is prepared as the constructor prepares its own."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | dict):  # of a dict each comes here by itself
            eval_dataset = self._ready_evals(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """The rewards of a set, and its metrics."""
        test_dataset = self._ready_evals(test_dataset)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        self._totals, module = Totals(), self._model_for_evaluation()
        ready = partial(self.objective.iter_eval, module, engine=self._engine)
        with torch.no_grad():
            output = super().evaluation_loop(
                ReadyBatches(dataloader, lambda batches: ready(batches=batches), self._engine), description,
                prediction_loss_only, ignore_keys, metric_key_prefix,
            )  # fmt: skip
        means = self.objective.report(self._totals.means(self._engine))
        output.metrics.update({f"{metric_key_prefix}_{name}": v for name, v in means.items() if name != "loss"})
        output.metrics[f"{metric_key_prefix}_num_tokens"] = float(self.state.num_input_tokens_seen)
        return output


class DPOTrainer(PreferenceTrainer):
    """Learn from pairs of answers, the better one named, compared with a reference (DPO and its relatives)."""

    args: DPOConfig
    config_class = DPOConfig
    objective_class = PairObjective
    tag = "dpo"

    beta = property(lambda self: self.args.beta)
    loss_types = property(lambda self: list(self.args.loss_type))
    loss_weights = property(lambda self: self.args.loss_weights)
    label_smoothing = property(lambda self: self.args.label_smoothing)


class KTOTrainer(PreferenceTrainer):
    """Learn from single answers, each with a label that is true for a desirable one; a set of pairs is split."""

    args: KTOConfig
    config_class = KTOConfig
    objective_class = KtoObjective
    tag = "kto"
    kind = "verdicts"

    def _prepared(self, dataset: Any, name: str, args: PreferenceConfig) -> Any:
        rows = super()._prepared(dataset, name, args)
        others_come_later = name == "train" and isinstance(args, KTOConfig) and args.kl_pairing == "group"
        return rows if others_come_later or not self.objective.has_baseline else with_kl_answers(rows, name)

    def get_train_dataloader(self) -> Any:
        """Batches of the training set, whose other answers are those of their step where ``kl_pairing`` says so."""
        if self.train_dataset is None or self.args.kl_pairing != "group" or not self.objective.has_baseline:
            return super().get_train_dataloader()
        if not is_datasets_set(self.train_dataset):
            raise ValueError('`kl_pairing="group"` needs all rows of a step at once. Load the set, do not stream it.')
        rows = VerdictsOfSteps(self._remove_unused_columns(self.train_dataset, "Training"))
        return self._get_dataloader(rows, "Training", self._train_batch_size, self._get_train_sampler, is_training=True)

    def _row_of(self, row: Mapping[str, Any]) -> Row:
        return verdict_row(row, self.args.max_length)

    def _inspect(self, args: PreferenceConfig) -> None:
        if not hasattr(self.train_dataset, "__len__") or len(self.train_dataset) == 1:
            return  # a stream; one record is a trial
        rows: Any = [{"tag": label} for label in self.train_dataset["label"]]
        try:
            remarks = self.objective.inspect(rows, self._rows_per_step)
        except UserError as error:
            raise UserError(args.in_own_words(error.problems)) from None
        for problem in args.in_own_words(map(Problem, remarks)):
            logger.warning(problem.what)


class RewardTrainer(PreferenceTrainer):
    """Learn a score per answer from pairs: a sequence classifier with one label, read at the last token of a row."""

    args: RewardConfig
    config_class = RewardConfig
    objective_class = RewardObjective
    tag = "reward-trainer"
    kind = "scores"

    def __init__(self, model: Any, args: object = None, *rest: Any, **given: Any) -> None:
        super().__init__(model, None, args, *rest, **given)

    def _prepared(self, dataset: Any, name: str, args: PreferenceConfig) -> Any:
        old = {f"{side}_input_ids": f"{side}_ids" for side in ("chosen", "rejected")}
        if old.keys() <= {*column_names(dataset)}:
            said = ", ".join(f"`{word}` is `{today}` today" for word, today in old.items())
            notes.warn(f"{said}; in TRL the older names will not be supported in v1.", FutureWarning, stacklevel=4)
            dataset = dataset.rename_columns(old)
        return super()._prepared(dataset, name, args)

    def _pad_token(self, args: PreferenceConfig) -> str | None:
        """A token that ends no answer: transformers reads the score before the first padding token of a row."""
        return str(self._tokenizer.convert_ids_to_tokens(pad_of_classifier(self._tokenizer)))


class ORPOTrainer(PreferenceTrainer):
    """Learn chosen answers, and by their odds to prefer them, without a reference (ORPO)."""

    args: ORPOConfig
    config_class: ClassVar[type[PreferenceConfig]] = ORPOConfig
    objective_class = PairObjective
    tag = "orpo"

    def __init__(self, model: Any, args: object = None, *rest: Any, **given: Any) -> None:
        super().__init__(model, None, args, *rest, **given)


class CPOTrainer(ORPOTrainer):
    """Learn to prefer chosen answers without a reference (CPO, SimPO, AlphaPO)."""

    args: CPOConfig  # type: ignore[assignment]
    config_class: ClassVar[type[PreferenceConfig]] = CPOConfig
    tag = "cpo"
