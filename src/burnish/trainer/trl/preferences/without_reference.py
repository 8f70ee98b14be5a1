"""``ORPOTrainer`` and ``CPOTrainer``, with the constructors and behavior of TRL's classes.

Their methods (``tokenize_row``, ``concatenated_forward``, ``odds_ratio_loss``, ...) are called if a script overrides
one of them; otherwise burnish's objective computes the same. In: TRL's batch (``PaddedBySide``) and the bare model.
"""

# P pairs in a micro-batch, T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.loop.types import IGNORE_INDEX
from burnish.losses.pairs import PairObjective
from burnish.losses.preference_losses import Pairs, Side, log_odds
from burnish.trainer.trl.base import argument
from burnish.trainer.trl.preferences.base import PreferenceTrainer
from burnish.trainer.trl.preferences.collator import PaddedBySide
from burnish.trainer.trl.preferences.config import CPOConfig, ORPOConfig, PreferenceConfig, set_beta
from burnish.trainer.trl.preferences.rows import NAMES, pair_texts
from burnish.trainer.trl.preferences.scripted import ScriptedBatch, concatenated_inputs, get_batch_logps
from burnish.trainer.trl.prepared import column_names, first_row

PAIR_METHODS = (
    "get_batch_loss_metrics", "concatenated_forward", "concatenated_inputs", "get_batch_logps", "store_metrics"
)  # fmt: skip


class ORPOTrainer(PreferenceTrainer):
    """Trains on chosen responses with an odds-ratio preference term, without a reference (ORPO)."""

    args: ORPOConfig
    config_class: ClassVar[type[PreferenceConfig]] = ORPOConfig
    objective_class = PairObjective
    padding_class = PaddedBySide
    tag = "orpo"
    _pair_methods: ClassVar[tuple[str, ...]] = (*PAIR_METHODS, "odds_ratio_loss")  # called if one is overridden
    _loss_methods = (*PreferenceTrainer._loss_methods, *_pair_methods)

    is_encoder_decoder = False
    _is_rendered = False  # whether texts were rendered by a chat template
    get_batch_logps = staticmethod(get_batch_logps)
    concatenated_inputs = staticmethod(concatenated_inputs)

    beta = argument(write=set_beta)
    padding_value = property(lambda self: self._pad)
    pad_token_id = property(lambda self: self._pad)
    max_length = argument()
    generate_during_eval = argument()
    max_completion_length = argument()
    aux_loss_coef = property(lambda self: self.objective.aux_coefficient)

    def __init__(self, model: Any, args: object = None, *rest: Any, **kwargs: Any) -> None:
        if kwargs.pop("ref_model", None) is not None:
            raise TypeError(f"{type(self).__name__} uses no reference model. Remove `ref_model`.")
        super().__init__(model, None, args, *rest, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        if not (self._overrides("tokenize_row") or self._overrides("build_tokenized_answer")):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if "chosen_input_ids" in column_names(dataset):  # tokenized already, as ``trainer.eval_dataset`` is
            return dataset
        self.args, self.processing_class = args, processing_class  # used by tokenize_row
        self._is_rendered = not isinstance(first_row(dataset)["chosen"], str)
        texts = dataset.map(partial(pair_texts, tokenizer=self._tokenizer))
        return texts.map(self.tokenize_row)

    def _loss_of_padded(self, model: nn.Module, inputs: Any, return_outputs: bool) -> Any:
        """Use TRL's methods if a script overrides one of them."""
        if not any(map(self._overrides, self._pair_methods)):
            return super()._loss_of_padded(model, inputs, return_outputs)
        train_eval = "train" if model.training else "eval"
        loss, metrics = self.get_batch_loss_metrics(model, inputs, train_eval=train_eval)
        self.store_metrics(metrics, train_eval=train_eval)
        return (loss, metrics) if return_outputs else loss

    def _predictions_of(self, outputs: Any, inputs: Any) -> tuple[Any, Any]:
        """(2,) mean logits of the chosen and of the rejected responses, if TRL's methods computed them; (2,) zeros."""
        names = ("eval_logits/chosen", "eval_logits/rejected")
        if not isinstance(outputs, Mapping) or not all(name in outputs for name in names):
            return super()._predictions_of(outputs, inputs)
        logits = torch.tensor([outputs[name] for name in names], device=self.accelerator.device)
        return logits, torch.zeros_like(logits)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return dataset if self._keeps_columns else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        if self._keeps_columns:
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    @property
    def _keeps_columns(self) -> bool:
        """Whether batches have all columns of the dataset, as TRL's padded batches do."""
        return self._is_scripted or not self._loads_own_batches

    def _pad_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with the texts of its pairs and the other columns of the dataset as lists."""
        batch = super()._pad_rows(rows)
        if type(self.data_collator) is not PaddedBySide:
            return batch
        texts = [pair_texts(row, self._tokenizer) if "chosen" in row else {} for row in rows]
        columns = {name: [{**row, **text}[name] for row, text in zip(rows, texts, strict=True)]
                   for name in {**rows[0], **texts[0]} if name not in (*NAMES["pairs"], *batch)}  # fmt: skip
        return columns | batch

    def build_tokenized_answer(self, prompt: str, answer: str) -> dict[str, list[int]]:
        """Ids of a prompt and of the following response, split at the end of the prompt's own ids.

        If the last token of the prompt merges with the response, that token belongs to the response.
        """
        ids = self.processing_class(prompt + answer, add_special_tokens=False)["input_ids"]
        prompt_ids = self.processing_class(prompt, add_special_tokens=False)["input_ids"]
        at = len(prompt_ids) if ids[: len(prompt_ids)] == prompt_ids else len(prompt_ids) - 1
        parts = {"prompt_": ids[:at], "": ids[at:]}
        return {f"{name}input_ids": of for name, of in parts.items()} | {
            f"{name}attention_mask": [1] * len(of) for name, of in parts.items()
        }

    def tokenize_row(self, feature: Mapping[str, Any], model: Any = None) -> dict[str, list[int]]:
        """Ids, masks and labels of a pair. Adds the EOS token, unless a chat template has rendered the texts.

        Args:
            feature: texts ``prompt``, ``chosen``, ``rejected``.
            model: not used; part of TRL's interface.
        """
        begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        row: dict[str, list[int]] = {}
        for side in ("rejected", "chosen"):
            parts = self.build_tokenized_answer(feature["prompt"], feature[side])
            prompt, answer = list(parts["prompt_input_ids"]), list(parts["input_ids"])
            prompt = [begin, *prompt] if begin is not None and prompt[:1] != [begin] else prompt
            answer = answer if self._is_rendered or answer[-1:] == [end] else [*answer, end]
            answer = answer if self.max_length is None else answer[: max(0, self.max_length - len(prompt))]
            row |= {
                f"{side}_input_ids": prompt + answer, f"{side}_attention_mask": [1] * len(prompt + answer),
                f"{side}_labels": [IGNORE_INDEX] * len(prompt) + answer,
            }  # fmt: skip
        return row | {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}

    # --- loss ---------------------------------------------------------------------------------------------------------

    def concatenated_forward(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """One forward pass over both responses of each pair.

        Returns:
            (P,) log-probabilities of the chosen responses, and of the rejected ones; (P, T, V) logits of both; () the
            negative log-likelihood that is added to the loss; for a mixture of experts () the loss of its router.
        """
        inputs = self.concatenated_inputs(
            batch, is_encoder_decoder=self.is_encoder_decoder, padding_value=self.padding_value,
            device=self.accelerator.device,
        )  # fmt: skip
        labels, more = inputs["concatenated_labels"], {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(
            inputs["concatenated_input_ids"],
            attention_mask=inputs["concatenated_attention_mask"],
            use_cache=False,
            **more,
        )
        logits = outputs.logits[:, -labels.shape[1] :]
        logps = self.get_batch_logps(
            logits, labels, average_log_prob=self.objective.uses_means, is_encoder_decoder=self.is_encoder_decoder
        )
        chosen, rejected = logps.chunk(2)
        half = len(labels) // 2
        both = (chosen, rejected, *logits.chunk(2), self._nll(logits[:half], labels[:half], batch))
        return (*both, outputs.aux_loss) if self.aux_loss_enabled else both

    def _nll(self, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """() negative log-likelihood of chosen responses for the loss: the mean over pairs of each one's mean."""
        return -get_batch_logps(logits, labels, average_log_prob=True).mean()

    def odds_ratio_loss(self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor) -> tuple[Tensor, ...]:
        """(P,) β ln σ(log odds), (P,) rewards of both responses, () means of ln σ(log odds) and of the log odds."""
        pairs = self._pairs(policy_chosen_logps.float(), policy_rejected_logps.float())
        odds = log_odds(pairs)
        ratio = F.logsigmoid(odds)
        return self.beta * ratio, *self._rewards(pairs), ratio.mean(), odds.mean()

    @staticmethod
    def _pairs(chosen: Tensor, rejected: Tensor) -> Pairs:
        """Pairs from log-probabilities, which may already be means."""
        both = [Side(logps, torch.zeros_like(logps), torch.ones_like(logps)) for logps in (chosen, rejected)]
        return Pairs(both[0], both[1])

    def _rewards(self, pairs: Pairs) -> list[Tensor]:
        return [self.objective._reward(side).detach() for side in pairs[:2]]

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Mapping[str, Any], train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """() the loss of a micro-batch, and its metrics by name, with the prefix ``eval_`` in evaluation."""
        chosen, rejected, *logits, nll = (outputs := self.concatenated_forward(model, batch))[:5]
        loss, rewards, more = self._mean(chosen, rejected, nll)
        more |= {
            "rewards/chosen": rewards[0], "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(), "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen, "logps/rejected": rejected, "logits/chosen": logits[0].mean(),
            "logits/rejected": logits[1].mean(), "nll_loss": nll,
        }  # fmt: skip
        if self.aux_loss_enabled:
            loss = loss + self.aux_loss_coef * outputs[5]
        prefix = "eval_" if train_eval == "eval" else ""
        gather = self.accelerator.gather_for_metrics
        return loss, {f"{prefix}{name}": gather(value.detach().float()).mean().item() for name, value in more.items()}

    def _mean(self, chosen: Tensor, rejected: Tensor, nll: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """() the mean loss, (P,) rewards of both responses, further metrics."""
        losses, *rewards, ratio, odds = self.odds_ratio_loss(chosen, rejected)
        return nll - losses.mean(), rewards, {"log_odds_ratio": ratio, "log_odds_chosen": odds}

    def store_metrics(self, metrics: Mapping[str, float], train_eval: str = "train") -> None:
        """Store metrics of a micro-batch for the next log, which has their means."""
        for name, value in metrics.items():
            self._metrics[train_eval][name].append(value)


class CPOTrainer(ORPOTrainer):
    """Trains preferences without a reference (CPO, SimPO, AlphaPO)."""

    args: CPOConfig  # type: ignore[assignment]
    config_class: ClassVar[type[PreferenceConfig]] = CPOConfig
    tag = "cpo"
    _pair_methods = (*PAIR_METHODS, "cpo_loss")
    _loss_methods = (*PreferenceTrainer._loss_methods, *_pair_methods)

    label_smoothing = argument()
    loss_type = argument()
    cpo_alpha = argument()
    simpo_gamma = argument()
    alpha = argument()

    def _mean(self, chosen: Tensor, rejected: Tensor, nll: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        losses, *rewards = self.cpo_loss(chosen, rejected)
        return losses.mean() + self.cpo_alpha * nll, rewards, {}

    def _nll(self, logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """() the mean over the tokens of the chosen responses; over those of the whole step if their number is
        known."""
        logps, learned = get_batch_logps(logits, labels), (labels[:, 1:] != IGNORE_INDEX).sum()
        ready = batch.ready if isinstance(batch, ScriptedBatch) else {}
        share = ready.get("pairs_per_token", len(labels) / learned.clamp(min=1))
        nll: Tensor = -(logps * share).mean()
        return nll

    def cpo_loss(self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor) -> tuple[Tensor, ...]:
        """(P,) the loss without the likelihood of the chosen responses, (P,) rewards of both responses."""
        pairs, (loss,) = self._pairs(policy_chosen_logps, policy_rejected_logps), self.objective.losses
        return loss.of(pairs, self.objective.constants), *self._rewards(pairs)
