"""``stage: dpo``: train on pairs of a chosen and a rejected response.

In: pairs, a template, a causal language model, a reference. Out: rows with two sequences; micro-batches in which the
two sequences of a pair are adjacent; per pair a loss of ``preference_losses``, as a sum over pairs.

Nothing is a mean over a micro-batch. Values that depend on all pairs of a step (AOT's ranks, BCO's baseline, means over
tokens) and the reference's log-probabilities are computed once per step in ``prepare_step``, before the first backward
pass.
"""

# P pairs in a micro-batch, S = 2P sequences, N trained tokens

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Stateful
from burnish.config.checks import check
from burnish.config.errors import OptionText, Problem
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Example, Loss, Metric, Row
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder
from burnish.losses.pair_values import (
    PAIR_COLUMNS,
    RunningMean,
    detach_pairs,
    token_metrics,
    token_share,
    two_answers,
    with_matches,
)
from burnish.losses.preference_losses import (
    PAIR_LOSSES,
    LossConstants,
    Matches,
    PairLoss,
    Pairs,
    Side,
    alphapo,
    bco,
    log_odds,
    odds_ratio_loss,
    wpo_weights,
)
from burnish.losses.preference_options import (
    SFT_LOSSES,
    PairOptions,
    PreferenceChoices,
    PreferenceOptions,
    ReferenceOptions,
    needs_reference,
)
from burnish.losses.responses import AnswersObjective, PairChoices, scoring
from burnish.losses.sequence_logps import SequenceValues, collate_sequences, factors_beyond, mean_row


@OBJECTIVES.register("dpo", options=PairOptions, reads=(PreferenceOptions, ReferenceOptions))
class PairObjective(AnswersObjective):
    """Pairs of a chosen and a rejected response (DPO and related methods)."""

    records = "pairs"
    row_columns: ClassVar[Mapping[str, Any]] = PAIR_COLUMNS
    variants = {"online": "online_dpo"}  # noqa: RUF012
    batch_keys = AnswersObjective.batch_keys | {"matches_chosen", "matches_rejected", "pairs_per_token"}

    def __init__(self, options: PairChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.losses: list[PairLoss] = [PAIR_LOSSES[name] for name in options.pref_loss]
        self.weights: list[float] = options.pref_loss_weights or [1.0] * len(self.losses)
        self.needs_reference = needs_reference(options)
        self.uses_means = any(loss.uses_means for loss in self.losses) and not self.needs_reference
        self.sorting_loss = next((name for name in options.pref_loss if PAIR_LOSSES[name].sorts_pairs), None)
        self.has_token_mean = any(loss.is_token_mean for loss in self.losses) or bool(options.cpo_alpha)
        self.needs_sum_of_squares = options.use_weighting
        self.baseline = RunningMean()

    @property
    def constants(self) -> LossConstants:
        """The constants of the losses; a script may change β during a run."""
        options = self.options
        return LossConstants(
            options.pref_beta, options.dpo_label_smoothing, options.simpo_gamma, options.discopop_tau,
            options.f_divergence_type, options.f_alpha_divergence_coef, options.dpop_lambda, options.alphapo_alpha,
        )  # fmt: skip

    @property
    def parts(self) -> Mapping[str, Stateful]:
        own: dict[str, Stateful] = {"bco_baseline": self.baseline} if self.options.pref_bco_weight else {}
        return {**super().parts, **own}

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation."""
        names = ["loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))]
        return [*names, "logps/chosen", "logps/rejected"]

    def sequence_title(self, row: Row, name: str) -> str:
        return f"the {name} response, "

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]:
        """Encode pairs. They are always truncated to ``cutoff_len``; ``truncate`` has no effect."""
        return self.template.encode_pairs(examples, stats)

    def _collate(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        """The micro-batch with ``items`` (P,), the weights of its pairs, and ``reference`` (S,) if precomputed."""
        batch = collate_sequences(collate, [answer for row in rows for answer in two_answers(row)])
        batch["items"] = torch.ones(len(rows))
        if self.options.ld_alpha is not None:
            shorter = batch["lengths"].view(-1, 2).amin(-1).repeat_interleave(2)
            batch["factors"] = factors_beyond(batch["owner"], shorter, self.options.ld_alpha)
        if self.needs_reference and all("reference_chosen_logps" in row for row in rows):
            reference_logps = [[row["reference_chosen_logps"], row["reference_rejected_logps"]] for row in rows]
            batch["reference"] = torch.tensor(reference_logps).flatten()
        return batch

    def reference_columns(self, module: nn.Module, rows: Sequence[Row], parallel: Parallel) -> dict[str, list[float]]:
        """Reference log-probabilities of both responses, by column."""
        (logps,) = self._reference_logps(module, [parallel.to_device(self.collate(rows))], parallel)
        return {f"reference_{side}_logps": logps[at::2].tolist() for at, side in enumerate(("chosen", "rejected"))}

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        """Add to each micro-batch the reference's log-probabilities and the values that depend on the whole step."""
        prepared = list(batches)
        if self.needs_reference:
            logps = self._reference_logps(module, batches, parallel)
            prepared = [{**batch, "reference": values} for batch, values in zip(batches, logps, strict=True)]
        of_step: dict[str, Tensor] = {}
        if (row := mean_row(self.head, parallel)) is not None:
            of_step["mean_row"] = row
        if self.has_token_mean:
            of_step["pairs_per_token"] = token_share(prepared, parallel)
        prepared = [{**batch, **of_step} for batch in prepared]
        if self.sorting_loss or (self.options.pref_bco_weight and module.training):
            prepared = self._with_step_values(module, prepared, parallel)
        if self.options.pref_bco_weight:
            baseline = self.baseline.value.to(parallel.device)
            prepared = [{**batch, "baseline": baseline} for batch in prepared]
        return prepared

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        """As ``Objective.iter_eval``, but ranks (AOT) are taken among all pairs of the set, and a mean over tokens is
        over all tokens of the set.
        """
        if self.sorting_loss:
            yield from self.prepare_step(module, [parallel.to_device(batch) for batch in batches], parallel)
            return
        share = token_share(map(parallel.to_device, batches), parallel) if self.has_token_mean else None
        for batch in batches:
            (prepared,) = self.prepare_step(module, [parallel.to_device(batch)], parallel)
            yield prepared if share is None else {**prepared, "pairs_per_token": share}

    def _with_step_values(self, module: nn.Module, batches: list[Batch], parallel: Parallel) -> list[Batch]:
        """Compute the policy's log-probabilities of all pairs of the step without gradient, for ranks and BCO's
        baseline."""
        with scoring(module, parallel):
            pairs = [self._pairs(module(batch), batch) for batch in batches]
        if self.options.pref_bco_weight and module.training:
            self._move_baseline(pairs, batches, parallel)
        return with_matches(pairs, batches, parallel, self.sorting_loss) if self.sorting_loss else batches

    def _move_baseline(self, pairs: Sequence[Pairs], batches: Sequence[Batch], parallel: Parallel) -> None:
        rewards = [
            (self.constants.beta * (pair.chosen.ratio + pair.rejected.ratio) * batch["items"]).sum()
            for pair, batch in zip(pairs, batches, strict=True)
        ]
        count = 2 * torch.stack([batch["items"].sum() for batch in batches]).sum()
        total, number = parallel.sum(torch.stack([torch.stack(rewards).sum(), count])).unbind()
        self.baseline.add(total, number)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        values = self.policy_values(module, batch)
        pairs, items = self._pairs(values, batch), batch["items"]
        losses = sum(
            weight * loss.of(pairs, self.constants) for weight, loss in zip(self.weights, self.losses, strict=True)
        )
        assert isinstance(losses, Tensor)
        losses = self._with_additions(losses, pairs, values, batch)
        metrics: dict[str, Metric] = {
            name: (value * items).sum() for name, value in self._pair_metrics(pairs).items()
        } | token_metrics(values, batch)
        total = (losses * items).sum()
        if values.aux is not None:
            metrics["aux_loss"] = (values.aux * items.sum()).detach()
            total = total + self.aux_coefficient * values.aux * items.sum()
        rewards = [self._reward(side) for side in detach_pairs(pairs)[:2]]
        return Loss(total, metrics, outputs=torch.stack(rewards, 1).flatten())

    def _pairs(self, values: SequenceValues, batch: Batch) -> Pairs:
        """Split values into pairs. Chosen and rejected responses alternate."""
        reference = batch["reference"] if self.needs_reference else torch.zeros_like(values.logps.detach())
        chosen, rejected = (Side(values.logps[at::2], reference[at::2], batch["lengths"][at::2]) for at in (0, 1))
        matches = None
        if "matches_chosen" in batch:
            matches = Matches(batch["matches_chosen"], batch["matches_rejected"])
        return Pairs(chosen, rejected, matches, batch.get("pairs_per_token"))

    def _with_additions(self, losses: Tensor, pairs: Pairs, values: SequenceValues, batch: Batch) -> Tensor:
        options = self.options
        if options.use_weighting:
            means = values.sum_squared_probs / batch["lengths"]
            losses = losses * wpo_weights(means[0::2], means[1::2])
        if options.pref_bco_weight:
            weight = options.pref_bco_weight
            losses = (losses + weight * bco(pairs, self.constants, batch["baseline"])) / (1 + weight)
        if options.pref_ftx:
            losses = losses - options.pref_ftx * pairs.chosen.mean
        if options.cpo_alpha:
            losses = losses + options.cpo_alpha * PAIR_LOSSES["sft"].of(pairs, self.constants)
        return losses

    def _pair_metrics(self, pairs: Pairs) -> dict[str, Tensor]:
        """(P,) of each metric, without gradient. A tie does not count as accurate."""
        pairs = detach_pairs(pairs)
        chosen, rejected = (self._logged_logps(side) for side in pairs[:2])
        rewards = [self._reward(side) for side in pairs[:2]]
        metrics = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        if "orpo" in self.options.pref_loss:
            ratio = odds_ratio_loss(pairs)
            metrics |= {"sft_loss": -pairs.chosen.mean, "nll_loss": -pairs.chosen.mean, "odds_ratio_loss": ratio}
            metrics |= {"log_odds_ratio": -ratio, "log_odds_chosen": log_odds(pairs)}
        if self.has_token_mean:
            metrics["nll_loss"] = PAIR_LOSSES["sft"].of(pairs, self.constants)
        return metrics

    def _reward(self, side: Side) -> Tensor:
        """(P,) β r(y). Without a reference: β times ``_logged_logps``, transformed by AlphaPO."""
        return self.constants.beta * (
            side.ratio if self.needs_reference else alphapo(self._logged_logps(side), self.constants)
        )

    def _logged_logps(self, side: Side) -> Tensor:
        """(P,) the logged value of a response: the sum of its log-probabilities, or their mean if the loss uses
        means."""
        return side.mean if self.uses_means else side.logps


@check
def check_pair_stage(options: PreferenceChoices) -> list[Problem]:
    """Report losses that belong to another stage."""
    if OBJECTIVES[options.stage] is not PairObjective:
        return []
    return [
        Problem(OptionText('"{pref_loss}": {} is a loss of {stage=sft}.', name), option="pref_loss")
        for name in options.pref_loss
        if name in SFT_LOSSES
    ]
