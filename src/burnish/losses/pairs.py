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
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Stateful
from burnish.config.checks import check
from burnish.config.errors import OptionText, Problem, UserError
from burnish.kernels.elementwise import rounding_as_trained
from burnish.kernels.probe import Capabilities, Head, causal_lm, find_head, makes_some_logits
from burnish.kernels.token_logps import LogpRules
from burnish.loop.modes import evaluating
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Example, Loss, Metric, Row, Sum
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder, StageObjective
from burnish.losses.lm import (
    ROUTER_WITHOUT_GRADIENT,
    CheckpointingChoices,
    LmOptions,
    aux_coefficient,
    is_reentrant,
    not_configured,
)
from burnish.losses.preference_losses import (
    PAIR_LOSSES,
    LossShape,
    Matches,
    PairLoss,
    Pairs,
    Side,
    alphapo,
    at_same_rank,
    bco,
    log_odds,
    odds_ratio_loss,
    wpo_weights,
)
from burnish.losses.preference_options import (
    OF_SFT,
    PairLossChoices,
    PairOptions,
    PreferenceChoices,
    PreferenceOptions,
    ReferenceOptions,
)
from burnish.losses.reference import MovingReference, Reference
from burnish.losses.sequence_logps import (
    SequenceModel,
    SequenceValues,
    collate_sequences,
    factors_beyond,
    mean_row,
    with_images,
)
from burnish.utils.patching import PatchOptions


class PairChoices(PairLossChoices, LmOptions, CheckpointingChoices, PatchOptions):
    """Options of losses over responses."""


PAIR_COLUMNS = {
    "chosen_input_ids": (0, 0), "chosen_labels": (IGNORE_INDEX, 0),
    "rejected_input_ids": (0, 0), "rejected_labels": (IGNORE_INDEX, 0),
}  # fmt: skip
"""Columns of a pair, and their values in the row of a padding batch."""


class AnswersObjective(StageObjective):
    """Base of training on pairs and on labelled responses: log-probabilities under policy and reference.

    Args:
        options: the flat options.
        template: examples -> rows.
        tokenizer: not used; part of the interface.

    Attributes:
        reference: set by the caller if ``needs_reference``.
    """

    learning_rates = (5e-7, 5e-6)
    batch_keys = frozenset({"reference", "mean_row", "baseline", "factors"})
    disables_dropout = True
    logs_rewards = True
    needs_sum_of_squares = False
    needs_reference = True

    def __init__(self, options: PairChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        self.options = options
        self.template = template
        self.reference: Reference | None = None
        self.head: Head | None = None
        self.makes_some_logits = False
        self.aux_coefficient = 0.0
        self.collate: Collate = not_configured

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The objective's own parts of a checkpoint."""
        return {} if self.reference is None else self.reference.parts

    def setup(self, module: nn.Module) -> None:
        if self.reference is not None:
            self.reference.setup(module)

    def fit(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        """Store how the model computes its logits, as ``LmObjective.fit``."""
        self.collate, inner = partial(self._collated, collate), causal_lm(capabilities.model)
        if aux_coefficient(inner, self.options.router_aux_loss_coef) and is_reentrant(self.options):
            raise UserError(ROUTER_WITHOUT_GRADIENT)
        self.head, self.makes_some_logits = capabilities.head, capabilities.makes_some_logits
        if self.head is not None or self.options.fused_loss is False:
            return []
        name = type(inner).__name__
        return [f"The head of {name} is not a plain linear layer: full logits are computed, which takes more memory."]

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        return not aux_coefficient(causal_lm(model), self.options.router_aux_loss_coef)

    def module(self, model: nn.Module) -> SequenceModel:
        """The model wrapped so that it returns log-probabilities of responses. Requires ``fit`` first."""
        options = self.options
        rules = LogpRules(
            self.head.softcap if self.head else None, accuracy=True, entropy=True,
            sum_squared_probs=self.needs_sum_of_squares,
        )  # fmt: skip
        self.aux_coefficient = aux_coefficient(causal_lm(model), options.router_aux_loss_coef)
        return SequenceModel(
            model, self.head, self.makes_some_logits, rules, bool(self.aux_coefficient), options, self.batch_keys
        )

    def module_of_reference(self, model: nn.Module) -> SequenceModel:
        """A second model (the reference) wrapped in the same way."""
        head = None if self.options.fused_loss is False else find_head(model)
        rules = LogpRules(head.softcap if head else None)
        makes_some = head is None and makes_some_logits(model)
        return SequenceModel(model, head, makes_some, rules, False, self.options, self.batch_keys)

    def num_items(self, batch: Batch) -> Tensor:
        """() number of pairs or records."""
        items: Tensor = batch["items"]
        return items.sum()

    def answered(self, module: nn.Module, batch: Batch) -> SequenceValues:
        """Log-probabilities under the policy, in evaluation with the same rounding as in training. So an untrained
        policy equals its reference exactly.
        """
        with rounding_as_trained():
            values: SequenceValues = module(batch)
        return values

    def step_begins(self, module: nn.Module) -> None:
        """Called at the beginning of a step or an evaluation."""
        if isinstance(self.reference, MovingReference) and module.training:
            self.reference.step_begins()

    def _collated(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        raise NotImplementedError

    def _reference_logps(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> list[Tensor]:
        """(S,) reference log-probabilities of each micro-batch: precomputed ones of its rows, or computed now."""
        if all("reference" in batch for batch in batches):
            return [batch["reference"] for batch in batches]
        if self.reference is None:
            what = (
                "The reference log-probabilities were computed before training, and these examples were not included."
            )
            raise UserError(what, remedy="Configure them as an evaluation set before training starts.")
        with self.reference.answering(module) as answering, parallel.other_modules(), asking(answering, parallel):
            return [answering(batch).logps for batch in batches]


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
        self.needs_reference = any(loss.needs_reference for loss in self.losses) or bool(options.pref_bco_weight)
        self.averages = any(loss.averages for loss in self.losses) and not self.needs_reference
        self.sorts = next((name for name in options.pref_loss if PAIR_LOSSES[name].sorts), None)
        self.counts_tokens = any(loss.counts_tokens for loss in self.losses) or bool(options.cpo_alpha)
        self.needs_sum_of_squares = options.use_weighting
        self.baseline = RunningMean()
        self.shape = LossShape(
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

    def _collated(self, collate: Collate, rows: Sequence[Row]) -> Batch:
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
        found: list[dict[str, Any]] = [{} for _ in batches]
        self.step_begins(module)
        if self.needs_reference:
            for more, logps in zip(found, self._reference_logps(module, batches, parallel), strict=True):
                more["reference"] = logps
        if (row := mean_row(self.head, parallel)) is not None:
            found = [{**more, "mean_row": row} for more in found]
        made = [{**batch, **more} for batch, more in zip(batches, found, strict=True)]
        if self.counts_tokens:
            share = token_share(made, parallel)
            made = [{**batch, "pairs_per_token": share} for batch in made]
        if self.sorts or (self.options.pref_bco_weight and module.training):
            made = self._with_the_step(module, made, parallel)
        if self.options.pref_bco_weight:
            made = [{**batch, "baseline": self.baseline.value.to(parallel.device)} for batch in made]
        return made

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        """As ``Objective.iter_eval``, but ranks (AOT) are taken among all pairs of the set, and a mean over tokens is
        over all tokens of the set.
        """
        if self.sorts:
            yield from self.prepare_step(module, [parallel.to_device(batch) for batch in batches], parallel)
            return
        share = token_share(map(parallel.to_device, batches), parallel) if self.counts_tokens else None
        for batch in batches:
            (made,) = self.prepare_step(module, [parallel.to_device(batch)], parallel)
            yield made if share is None else {**made, "pairs_per_token": share}

    def _with_the_step(self, module: nn.Module, batches: list[Batch], parallel: Parallel) -> list[Batch]:
        """Compute the policy's log-probabilities of all pairs of the step without gradient, for ranks and BCO's
        baseline."""
        with asking(module, parallel):
            pairs = [self._pairs(module(batch), batch) for batch in batches]
        if self.options.pref_bco_weight and module.training:
            self._move_baseline(pairs, batches, parallel)
        return with_matches(pairs, batches, parallel, self.sorts) if self.sorts else batches

    def _move_baseline(self, pairs: Sequence[Pairs], batches: Sequence[Batch], parallel: Parallel) -> None:
        rewards = [
            (self.shape.beta * (pair.chosen.ratio + pair.rejected.ratio) * batch["items"]).sum()
            for pair, batch in zip(pairs, batches, strict=True)
        ]
        count = 2 * torch.stack([batch["items"].sum() for batch in batches]).sum()
        total, number = parallel.sum(torch.stack([torch.stack(rewards).sum(), count])).unbind()
        self.baseline.add(total, number)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        values = self.answered(module, batch)
        pairs, items = self._pairs(values, batch), batch["items"]
        losses = sum(
            weight * loss.of(pairs, self.shape) for weight, loss in zip(self.weights, self.losses, strict=True)
        )
        assert isinstance(losses, Tensor)
        losses = self._with_additions(losses, pairs, values, batch)
        metrics: dict[str, Metric] = {
            name: (value * items).sum() for name, value in self._measured(pairs).items()
        } | token_metrics(values, batch)
        total = (losses * items).sum()
        if values.aux is not None:
            metrics["aux_loss"] = (values.aux * items.sum()).detach()
            total = total + self.aux_coefficient * values.aux * items.sum()
        rewards = [self._reward(side) for side in detached(pairs)[:2]]
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
            losses = (losses + weight * bco(pairs, self.shape, batch["baseline"])) / (1 + weight)
        if options.pref_ftx:
            losses = losses - options.pref_ftx * pairs.chosen.mean
        if options.cpo_alpha:
            losses = losses + options.cpo_alpha * PAIR_LOSSES["sft"].of(pairs, self.shape)
        return losses

    def _measured(self, pairs: Pairs) -> dict[str, Tensor]:
        """(P,) of each metric, without gradient. A tie does not count as accurate."""
        pairs = detached(pairs)
        chosen, rejected = (self._shown(side) for side in pairs[:2])
        rewards = [self._reward(side) for side in pairs[:2]]
        found = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        if "orpo" in self.options.pref_loss:
            ratio = odds_ratio_loss(pairs)
            found |= {"sft_loss": -pairs.chosen.mean, "nll_loss": -pairs.chosen.mean, "odds_ratio_loss": ratio}
            found |= {"log_odds_ratio": -ratio, "log_odds_chosen": log_odds(pairs)}
        if self.counts_tokens:
            found["nll_loss"] = PAIR_LOSSES["sft"].of(pairs, self.shape)
        return found

    def _reward(self, side: Side) -> Tensor:
        """(P,) β r(y). Without a reference: β times ``_shown``, transformed by AlphaPO."""
        return self.shape.beta * (side.ratio if self.needs_reference else alphapo(self._shown(side), self.shape))

    def _shown(self, side: Side) -> Tensor:
        """(P,) the logged value of a response: the sum of its log-probabilities, or their mean if the loss uses
        means."""
        return side.mean if self.averages else side.logps


@check
def check_pair_stage(options: PreferenceChoices) -> list[Problem]:
    """Report losses that belong to another stage."""
    if OBJECTIVES[options.stage] is not PairObjective:
        return []
    return [
        Problem(OptionText('"{pref_loss}": {} is a loss of {stage=sft}.', name), option="pref_loss")
        for name in options.pref_loss
        if name in OF_SFT
    ]


@contextmanager
def asking(module: nn.Module, parallel: Parallel) -> Iterator[None]:
    """Context for a forward pass without gradient whose results are compared with those of training."""
    with evaluating(module), rounding_as_trained(), parallel.precision():
        yield


# --- small parts ------------------------------------------------------------------------------------------------------


class RunningMean:
    """The mean of all added values, each with equal weight (BCO's baseline δ)."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(()), torch.zeros(())

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add ``count`` () values with the sum ``total`` ()."""
        total, count = total.detach().float().cpu(), count.detach().float().cpu()
        self.count = self.count + count
        self.value = self.value + (total - self.value * count) / self.count.clamp(min=1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.count = state["value"].cpu(), state["count"].cpu()


def two_answers(row: Row) -> list[Row]:
    """The two sequences of a pair, chosen first, each with the images of the prompt."""
    return [
        {"input_ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"], **with_images(row)}
        for side in ("chosen", "rejected")
    ]


def detached(pairs: Pairs) -> Pairs:
    chosen, rejected = (Side(*(values.detach() for values in side)) for side in (pairs.chosen, pairs.rejected))
    return pairs._replace(chosen=chosen, rejected=rejected)


def token_share(batches: Iterable[Batch], parallel: Parallel) -> Tensor:
    """() number of pairs divided by the number of trained tokens of their chosen responses, over all ranks."""
    counts = [torch.stack([batch["items"].sum(), (batch["lengths"][0::2] * batch["items"]).sum()]) for batch in batches]
    pairs, tokens = parallel.sum(torch.stack(counts).sum(0)).unbind()
    share: Tensor = pairs / tokens.clamp(min=1)
    return share


def with_matches(pairs: Sequence[Pairs], batches: Sequence[Batch], parallel: Parallel, name: str) -> list[Batch]:
    """Add (P,) ``matches_chosen`` and ``matches_rejected``: the values of the same rank among all pairs of the step."""
    items = torch.cat([batch["items"] for batch in batches])
    if name == "aot":
        values = torch.cat([pair.chosen.logps - pair.rejected.logps for pair in pairs])
        others = torch.cat([pair.chosen.reference - pair.rejected.reference for pair in pairs])
    else:
        values, others = (
            torch.cat([side.ratio for side in sides]) for sides in zip(*(p[:2] for p in pairs), strict=True)
        )
    gathered = parallel.gather(torch.stack([values, others, items]))  # (3 for each rank, most pairs of a rank)
    every = gathered.view(-1, 3, gathered.shape[1]).transpose(0, 1).flatten(1)
    counts = every[2] > 0
    one, other = (torch.zeros_like(every[0]) for _ in range(2))
    one[counts] = at_same_rank(every[0][counts], every[1][counts])
    other[counts] = one[counts] if name == "aot" else at_same_rank(every[1][counts], every[0][counts])
    own = slice(parallel.rank * (len(one) // parallel.world_size), None)
    sizes = [len(batch["items"]) for batch in batches]
    ours = [torch.split(matches[own][: sum(sizes)], sizes) for matches in (one, other)]
    return [{**batch, "matches_chosen": a, "matches_rejected": b} for batch, a, b in zip(batches, *ours, strict=True)]


def token_metrics(values: SequenceValues, batch: Batch) -> dict[str, Metric]:
    """Means over the trained tokens of pairs, each with its own count."""
    counted = batch["items"].repeat_interleave(2)  # (S,)
    sides = {"chosen": slice(0, None, 2), "rejected": slice(1, None, 2)}
    found: dict[str, Metric] = {}
    if "mean_row" in batch:
        for name, side in sides.items():
            count = (batch["lengths"] * counted)[side].sum()
            found[f"logits/{name}"] = Sum((values.mean_logits * counted)[side].sum(), count)
    lengths, chosen = batch["lengths"] * counted, sides["chosen"]
    found["entropy"] = Sum((values.entropy * counted).sum(), lengths.sum())
    found["mean_token_accuracy"] = Sum((values.correct * counted)[chosen].sum(), lengths[chosen].sum())
    return found
