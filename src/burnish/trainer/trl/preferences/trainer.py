"""``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, with the constructors and behavior of TRL's classes, based on
burnish's ``Trainer`` and objectives. ``ORPOTrainer`` and ``CPOTrainer`` are in ``without_reference.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem, UserError
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.losses.kto import KtoObjective
from burnish.losses.pairs import PairObjective
from burnish.losses.reward import RewardObjective
from burnish.models.reward_files import pad_of_classifier
from burnish.trainer import notes
from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.notes import logger
from burnish.trainer.trl.base import argument
from burnish.trainer.trl.preferences.base import PreferenceTrainer
from burnish.trainer.trl.preferences.collator import REFERENCE
from burnish.trainer.trl.preferences.config import DPOConfig, KTOConfig, PreferenceConfig, RewardConfig, set_beta
from burnish.trainer.trl.preferences.rows import UnpairedOfSteps, unpaired_row, with_kl_answers
from burnish.trainer.trl.preferences.scripted import get_batch_logps
from burnish.trainer.trl.prepared import column_names


def _loss_types(args: DPOConfig) -> list[str]:
    return list(args.loss_type)


class DPOTrainer(PreferenceTrainer):
    """Trains on pairs of chosen and rejected responses, compared with a reference (DPO and related losses)."""

    args: DPOConfig
    config_class = DPOConfig
    objective_class = PairObjective
    tag = "dpo"
    _requests_loss_only = True
    _loss_methods = (*PreferenceTrainer._loss_methods, "_compute_loss")

    beta = argument(write=set_beta)
    f_divergence_type = argument()
    f_alpha_divergence_coef = argument()
    ld_alpha = argument()
    use_weighting = argument()
    loss_types = argument(_loss_types)
    loss_weights = argument()
    label_smoothing = argument()

    def _loss_of_padded(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        return self._compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        """The result of ``compute_loss``, as in TRL."""
        return super()._loss_of_padded(model, inputs, return_outputs)


class KTOTrainer(PreferenceTrainer):
    """Trains on single responses with a label that is true for desirable ones. A dataset of pairs is split."""

    args: KTOConfig
    config_class = KTOConfig
    objective_class = KtoObjective
    tag = "kto"
    _requests_loss_only = True
    kind = "unpaired"
    _loss_methods = (*PreferenceTrainer._loss_methods, "_compute_loss", "_compute_kl_logps")

    beta = argument(write=set_beta)
    loss_type = argument()
    calculate_KL = property(lambda self: self.objective.has_baseline)
    desirable_weight = argument()
    undesirable_weight = argument()

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: KTOConfig, dataset_name: str) -> Any:
        rows = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        others_come_later = dataset_name == "train" and args.kl_pairing == "group"
        return rows if others_come_later or not self.objective.has_baseline else with_kl_answers(rows, dataset_name)

    def _check_collated_by_script(self, args: PreferenceConfig, train_dataset: Any) -> None:
        super()._check_collated_by_script(args, train_dataset)
        if isinstance(args, KTOConfig) and args.kl_pairing == "group":
            raise ValueError(
                '`kl_pairing="group"` is not supported for a dataset with images and a `data_collator`, which makes '
                "the mismatched responses itself. Remove one of them."
            )
        if {"chosen", "rejected"} & {*column_names(train_dataset)}:
            raise ValueError(
                "With images and a `data_collator`, records of a KTOTrainer must have the columns `completion` and "
                f"`label`. Received: {', '.join(column_names(train_dataset))}. Split each pair into two records."
            )

    def _loss_of_padded(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        return self._compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        """The result of ``compute_loss``, as in TRL."""
        if not (self.calculate_KL and self._overrides("_compute_kl_logps")):
            return super()._loss_of_padded(model, inputs, return_outputs)
        ready = {**self._scripted.ready(model, inputs), "baseline": self._baseline_of(model, inputs)}
        return self._mean_loss(self._scripted.loss_of(model, inputs, ready), model, ready, inputs, return_outputs)

    def _baseline_of(self, model: nn.Module, inputs: Any) -> Tensor:
        """() KTO's baseline from a script's ``_compute_kl_logps``: a mean over the micro-batch, as in TRL."""
        policy, known = self._compute_kl_logps(model, inputs), REFERENCE["kl"]
        if known in inputs:
            of_reference = inputs[known]
        else:
            with torch.no_grad(), self.objective.reference.answering(self._over(model)) as reference:
                of_reference = self._compute_kl_logps(reference.model, inputs)
        ratio = (policy - of_reference).mean().detach()
        return self.accelerator.gather_for_metrics(ratio).mean().clamp(min=0)  # type: ignore[no-any-return]

    def _compute_kl_logps(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
        """(P,) log-probabilities of the mismatched responses of a padded batch, without gradient."""
        if not self.calculate_KL:
            return None
        labels = batch["KL_input_ids"].masked_fill(batch["KL_completion_mask"] == 0, IGNORE_INDEX)
        inputs = {"input_ids": batch["KL_input_ids"], "attention_mask": batch["KL_attention_mask"], "use_cache": False}
        with torch.no_grad():
            return get_batch_logps(model(**inputs).logits[:, -labels.shape[1] :], labels)

    def get_train_dataloader(self) -> Any:
        """Batches of the training set. With ``kl_pairing="group"`` mismatched responses come from the same step."""
        if self.train_dataset is None or self.args.kl_pairing != "group" or not self.objective.has_baseline:
            return super().get_train_dataloader()
        if not is_datasets_set(self.train_dataset):
            raise ValueError('`kl_pairing="group"` is not supported with IterableDataset. Use a map-style dataset.')
        rows = UnpairedOfSteps(self._remove_unused_columns(self.train_dataset, description="Training"))
        return self._get_dataloader(
            dataset=rows, description="Training", batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler, is_training=True,
        )  # fmt: skip

    def _row_of(self, row: Mapping[str, Any]) -> Row:
        return unpaired_row(row, self.args.max_length)

    def _inspect(self, args: PreferenceConfig) -> None:
        if not hasattr(self.train_dataset, "__len__") or len(self.train_dataset) == 1:
            return  # a streamed dataset, or a trial with one record
        rows: Any = [{"tag": label} for label in self.train_dataset["label"]]
        try:
            found_problems = self.objective.inspect(rows, self._rows_per_step)
        except UserError as error:
            raise UserError(args.with_own_names(error.problems)) from None
        for problem in args.with_own_names(map(Problem, found_problems)):
            logger.warning(problem.what)


class RewardTrainer(PreferenceTrainer):
    """Trains a score per response on pairs: a sequence classifier with one label, read at the last token of a row."""

    args: RewardConfig
    config_class = RewardConfig
    objective_class = RewardObjective
    tag = "reward-trainer"
    kind = "scores"

    def __init__(self, model: Any, args: object = None, *rest: Any, **kwargs: Any) -> None:
        super().__init__(model, None, args, *rest, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        for pattern in ("{side}_input_ids", "input_ids_{side}"):
            old = {pattern.format(side=side): f"{side}_ids" for side in ("chosen", "rejected")}
            if not old.keys() <= {*column_names(dataset)}:
                continue
            renamed = ", ".join(f"`{word}` to `{name}`" for word, name in old.items())
            notes.warn(f"Deprecated columns: rename {renamed}.", FutureWarning)
            dataset = dataset.rename_columns(old)
            masks = {f"{side}_ids": pattern.format(side=side).replace("input_ids", "attention_mask")
                     for side in ("chosen", "rejected")}  # fmt: skip
            if {*masks.values()} <= {*column_names(dataset)}:
                dataset = dataset.map(_without_padding, fn_kwargs={"masks": masks}, remove_columns=[*masks.values()])
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def _pad_token(self, args: PreferenceConfig) -> str | None:
        """A token that does not end responses, because transformers reads the score before the first padding token
        of a row."""
        tokenizer = self._tokenizer
        return args.pad_token or str(tokenizer.convert_ids_to_tokens(pad_of_classifier(tokenizer, _OTHER_PADDING)))


def _without_padding(row: Mapping[str, Any], masks: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the token ids of a row without those that an attention mask excludes.

    Args:
        masks: name of a column of token ids -> that of its attention mask.
    """
    return {ids: [one for one, use in zip(row[ids], row[mask], strict=True) if use] for ids, mask in masks.items()}


_OTHER_PADDING = (
    'Call tokenizer.add_special_tokens({"pad_token": "<pad>"}) and model.resize_token_embeddings(len(tokenizer)), or '
    "set RewardConfig(pad_token=...) to a token that does not end responses."
)
