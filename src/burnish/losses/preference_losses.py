"""Losses of preference learning, as pure functions of log-probabilities.

In: per pair (or record) the log-probabilities of the responses under the policy and the reference, and their lengths.
Out: one loss per pair, in nats, with a gradient to the policy's log-probabilities. Nothing here depends on models,
batches, options or steps. Values that depend on all pairs of a step (AOT's ranks, the baselines of KTO and BCO) are
passed as tensors.

Letters: y+ the chosen response, y- the rejected one; L(y) the sum over the trained tokens of log p(token) under the
policy, R(y) the same under the reference, r(y) = L(y) - R(y), |y| number of trained tokens, L̄ = L / |y|, σ the
logistic function, β ``beta``, s ``label_smoothing``, Δ = r(y+) - r(y-).
"""

# P pairs

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_STEEPEST = 80.0
"""Exponents are clamped to this value: e^80 is near the maximum of float32."""


class Side(NamedTuple):
    """One response of every pair."""

    logps: Tensor  # (P,) L(y), in nats
    reference: Tensor  # (P,) R(y), without gradient; not used by losses without a reference
    lengths: Tensor  # (P,) |y|, at least 1

    @property
    def ratio(self) -> Tensor:
        """(P,) r(y)"""
        return self.logps - self.reference

    @property
    def mean(self) -> Tensor:
        """(P,) L̄(y)"""
        return self.logps / self.lengths


class Matches(NamedTuple):
    """Values of the same rank in the step, for losses that sort its pairs. Constants without gradient."""

    chosen: Tensor  # (P,) for aot the sorted R(y+) - R(y-); for aot_unpaired the sorted r(y-)
    rejected: Tensor  # (P,) for aot_unpaired the sorted r(y+); not used for aot


class Pairs(NamedTuple):
    chosen: Side
    rejected: Side
    matches: Matches | None = None  # None: computed from these pairs as the whole step
    pairs_per_token: Tensor | None = None  # () pairs / chosen tokens of the step; None: of these pairs


@dataclass(frozen=True)
class LossConstants:
    """Parameters of a loss.

    Args:
        beta: strength of the regularization towards the reference; τ for ipo, λ for orpo.
        label_smoothing: assumed fraction of pairs with swapped responses.
        gamma: target margin of simpo.
        discopop_tau: temperature of discopop.
        divergence: divergence that replaces r: reverse_kl, forward_kl, js_divergence, alpha_divergence.
        divergence_alpha: coefficient of alpha_divergence.
        dpop_lambda: weight of dpop's penalty.
        alphapo: AlphaPO's α for log-probabilities of losses without a reference; 0: no transformation.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    discopop_tau: float = 0.05
    divergence: str = "reverse_kl"
    divergence_alpha: float = 0.5
    dpop_lambda: float = 50.0
    alphapo: float = 0.0


@dataclass(frozen=True)
class PairLoss:
    """A loss over pairs.

    Args:
        of: loss of each pair (P,).
        needs_reference: whether it uses R(y).
        uses_means: whether it compares means over tokens, so that rewards are β L̄.
        smooths_labels: whether it supports label smoothing.
        takes_divergence: whether r may be replaced by another divergence.
        sorts_pairs: whether the pairs of a step are coupled by their ranks.
        is_token_mean: whether it is a mean over the tokens of the step.
    """

    of: Callable[[Pairs, LossConstants], Tensor]
    needs_reference: bool = True
    uses_means: bool = False
    smooths_labels: bool = False
    takes_divergence: bool = False
    sorts_pairs: bool = False
    is_token_mean: bool = False


# --- with a reference -------------------------------------------------------------------------------------------------


def sigmoid(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-(1-s) ln σ(βΔ) - s ln σ(-βΔ).  DPO, Rafailov et al. 2023, eq. 7, https://arxiv.org/abs/2305.18290; s as in cDPO,
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf"""
    return _smoothed_log_sigmoid(constants.beta * _delta(pairs, constants), constants.label_smoothing)


def hinge(pairs: Pairs, constants: LossConstants) -> Tensor:
    """max(0, 1 - βΔ).  RSO, Liu et al. 2023, eq. 12, https://arxiv.org/abs/2309.06657"""
    return F.relu(1 - constants.beta * _delta(pairs, constants))


def ipo(pairs: Pairs, constants: LossConstants) -> Tensor:
    """(r(y+)/|y+| - r(y-)/|y-| - 1/(2β))².  IPO, Azar et al. 2023, eq. 17, https://arxiv.org/abs/2310.12036; means over
    tokens as its authors confirmed for TRL; β is their τ."""
    return (_mean_delta(pairs, constants) - 1 / (2 * constants.beta)).square()


def sigmoid_norm(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-ln σ(β (r(y+)/|y+| - r(y-)/|y-|)): length-normalized DPO, Tülu 3, Lambert et al. 2024,
    https://arxiv.org/abs/2411.15124"""
    return -F.logsigmoid(constants.beta * _mean_delta(pairs, constants))


def robust(pairs: Pairs, constants: LossConstants) -> Tensor:
    """[-(1-s) ln σ(βΔ) + s ln σ(-βΔ)] / (1 - 2s), unbiased if a fraction s of pairs is swapped.  rDPO, Chowdhury
    et al. 2024, https://arxiv.org/abs/2403.00409"""
    x, s = constants.beta * _delta(pairs, constants), constants.label_smoothing
    return (-(1 - s) * F.logsigmoid(x) + s * F.logsigmoid(-x)) / (1 - 2 * s)


def exo_pair(pairs: Pairs, constants: LossConstants) -> Tensor:
    """q ln(q/(1-s)) + (1-q) ln((1-q)/s) with q = σ(βΔ): the reverse KL to the smoothed labels.  EXO, Ji et al. 2024,
    eq. 16, https://arxiv.org/abs/2402.00856"""
    x, s = constants.beta * _delta(pairs, constants), torch.tensor(constants.label_smoothing)
    towards = x.sigmoid() * (F.logsigmoid(x) - torch.log1p(-s))
    return towards + (-x).sigmoid() * (F.logsigmoid(-x) - torch.log(s))


def nca_pair(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-ln σ(βr+) - ½ ln σ(-βr+) - ½ ln σ(-βr-).  NCA, Chen et al. 2024, https://arxiv.org/abs/2402.05369"""
    chosen, rejected = _rewards(pairs, constants)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-ln σ(βr+) - ln σ(-βr-): BCO without a baseline, as in TRL 1.16 (``bco`` has a baseline)."""
    chosen, rejected = _rewards(pairs, constants)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, constants: LossConstants) -> Tensor:
    """(r+ - 1/(2β))² + (r- + 1/(2β))².  SPPO, Wu et al. 2024, https://arxiv.org/abs/2405.00675"""
    target = 1 / (2 * constants.beta)
    return (pairs.chosen.ratio - target).square() + (pairs.rejected.ratio + target).square()


def apo_zero(pairs: Pairs, constants: LossConstants) -> Tensor:
    """1 - σ(βr+) + σ(βr-), for chosen responses that are better than the model's.  APO, D'Oosterlinck et al. 2024,
    eq. 7, https://arxiv.org/abs/2408.06266"""
    chosen, rejected = _rewards(pairs, constants)
    return 1 - chosen.sigmoid() + rejected.sigmoid()


def apo_down(pairs: Pairs, constants: LossConstants) -> Tensor:
    """σ(βr+) + 1 - σ(βΔ), for chosen responses that are worse than the model's.  APO, eq. 8"""
    chosen, rejected = _rewards(pairs, constants)
    return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()


def discopop(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-(1-m) ln σ(u) + m e^-u with u = βΔ, m = σ(u/τ).  DiscoPOP, Lu et al. 2024, https://arxiv.org/abs/2406.08414"""
    u = constants.beta * _delta(pairs, constants)
    modulation = (u / constants.discopop_tau).sigmoid()
    return -(1 - modulation) * F.logsigmoid(u) + modulation * (-u).exp()


def aot(pairs: Pairs, constants: LossConstants) -> Tensor:
    """``sigmoid`` of the difference at the same rank: the sorted L(y+) - L(y-) minus the sorted R(y+) - R(y-).  AOT,
    Melnyk et al. 2024, https://arxiv.org/abs/2406.05882"""
    matches = pairs.matches or matches_of(pairs, "aot")
    own = pairs.chosen.logps - pairs.rejected.logps
    return _smoothed_log_sigmoid(constants.beta * (own - matches.chosen), constants.label_smoothing)


def aot_unpaired(pairs: Pairs, constants: LossConstants) -> Tensor:
    """``sigmoid`` of the sorted r(y+) minus the sorted r(y-).  AOT, the unpaired variant.

    The two values of a pair belong to two comparisons of the step. The loss value returned for a pair is that of its
    chosen response's comparison. The rejected response only contributes its gradient here, because its value is counted
    in the other pair.
    """
    matches = pairs.matches or matches_of(pairs, "aot_unpaired")
    of_chosen = _smoothed_log_sigmoid(constants.beta * (pairs.chosen.ratio - matches.chosen), constants.label_smoothing)
    of_rejected = _smoothed_log_sigmoid(
        constants.beta * (matches.rejected - pairs.rejected.ratio), constants.label_smoothing
    )
    return of_chosen + of_rejected - of_rejected.detach()


def dpop(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-ln σ(β (Δ - λ max(0, -r(y+)))): penalizes chosen responses that become less likely.  DPO-Positive, Pal et al.
    2024, https://arxiv.org/abs/2402.13228"""
    falls = F.relu(-pairs.chosen.ratio)
    x = constants.beta * (_delta(pairs, constants) - constants.dpop_lambda * falls)
    return _smoothed_log_sigmoid(x, constants.label_smoothing)


# --- without one ------------------------------------------------------------------------------------------------------


def sft(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-log p over the chosen tokens, as each pair's share of the mean over the tokens of the step."""
    share = pairs.pairs_per_token
    if share is None:
        share = len(pairs.chosen.lengths) / pairs.chosen.lengths.sum()
    return -pairs.chosen.logps * share


def orpo(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-L̄(y+) - β ln σ(log odds).  ORPO, Hong et al. 2024, eq. 4 to 7, https://arxiv.org/abs/2403.07691; λ = β"""
    return -pairs.chosen.mean + constants.beta * odds_ratio_loss(pairs)


def odds_ratio_loss(pairs: Pairs) -> Tensor:
    """(P,) -ln σ(log odds)"""
    return -F.logsigmoid(log_odds(pairs))


def log_odds(pairs: Pairs) -> Tensor:
    """(P,) ln of odds(y+) / odds(y-), with odds = p / (1 - p) and p = e^L̄."""
    chosen, rejected = pairs.chosen.mean, pairs.rejected.mean
    return (chosen - _log_of_rest(chosen)) - (rejected - _log_of_rest(rejected))


def simpo(pairs: Pairs, constants: LossConstants) -> Tensor:
    """-ln σ(β (L̄+ - L̄-) - γ).  SimPO, Meng et al. 2024, eq. 6, https://arxiv.org/abs/2405.14734; s as in ``sigmoid``"""
    chosen, rejected = (alphapo(side.mean, constants) for side in (pairs.chosen, pairs.rejected))
    return _smoothed_log_sigmoid(constants.beta * (chosen - rejected) - constants.gamma, constants.label_smoothing)


def cpo(pairs: Pairs, constants: LossConstants) -> Tensor:
    """``sigmoid`` without a reference.  CPO, Xu et al. 2024, https://arxiv.org/abs/2401.08417"""
    chosen, rejected = (alphapo(side.logps, constants) for side in (pairs.chosen, pairs.rejected))
    return _smoothed_log_sigmoid(constants.beta * (chosen - rejected), constants.label_smoothing)


def cpo_hinge(pairs: Pairs, constants: LossConstants) -> Tensor:
    """max(0, 1 - β (L+ - L-)).  SLiC, Zhao et al. 2023, https://arxiv.org/abs/2305.10425"""
    chosen, rejected = (alphapo(side.logps, constants) for side in (pairs.chosen, pairs.rejected))
    return F.relu(1 - constants.beta * (chosen - rejected))


def cpo_ipo(pairs: Pairs, constants: LossConstants) -> Tensor:
    """(L̄+ - L̄- - 1/(2β))²: ``ipo`` without a reference."""
    chosen, rejected = (alphapo(side.mean, constants) for side in (pairs.chosen, pairs.rejected))
    return (chosen - rejected - 1 / (2 * constants.beta)).square()


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, smooths_labels=True, takes_divergence=True),
    "hinge": PairLoss(hinge, takes_divergence=True),
    "ipo": PairLoss(ipo, takes_divergence=True),
    "sigmoid_norm": PairLoss(sigmoid_norm, takes_divergence=True),
    "robust": PairLoss(robust, smooths_labels=True, takes_divergence=True),
    "exo_pair": PairLoss(exo_pair, smooths_labels=True, takes_divergence=True),
    "nca_pair": PairLoss(nca_pair),
    "bco_pair": PairLoss(bco_pair),
    "sppo_hard": PairLoss(sppo_hard),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "discopop": PairLoss(discopop, takes_divergence=True),
    "aot": PairLoss(aot, smooths_labels=True, sorts_pairs=True),
    "aot_unpaired": PairLoss(aot_unpaired, smooths_labels=True, sorts_pairs=True),
    "dpop": PairLoss(dpop, smooths_labels=True, takes_divergence=True),
    "sft": PairLoss(sft, needs_reference=False, takes_divergence=True, is_token_mean=True),
    "orpo": PairLoss(orpo, needs_reference=False, uses_means=True),
    "simpo": PairLoss(simpo, needs_reference=False, uses_means=True, smooths_labels=True),
    "cpo": PairLoss(cpo, needs_reference=False, smooths_labels=True),
    "cpo_hinge": PairLoss(cpo_hinge, needs_reference=False),
    "cpo_ipo": PairLoss(cpo_ipo, needs_reference=False, uses_means=True),
}
"""The losses, under their names in LLaMA-Factory or TRL if they exist there."""


# --- what may be added to a loss of pairs -----------------------------------------------------------------------------


def bco(pairs: Pairs, constants: LossConstants, baseline: Tensor) -> Tensor:
    """(P,) -ln σ(βr+ - δ) - ln σ(-(βr- - δ)).  BCO, Jung et al. 2024, https://arxiv.org/abs/2404.04656

    Args:
        baseline: () δ, the running mean of the rewards of both sides.
    """
    chosen, rejected = _rewards(pairs, constants)
    return -F.logsigmoid(chosen - baseline) - F.logsigmoid(baseline - rejected)


def wpo_weights(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(P,) w(y+) w(y-), the probability that the policy generates such a pair, without gradient.

    Args:
        chosen: (P,) mean over tokens of log π(token) - ln Σ_v π(v)².
        rejected: (P,) the same for the rejected responses.
    Source: Zhou et al. 2024, eq. 2, https://arxiv.org/abs/2406.11827
    """
    return (chosen + rejected).detach().exp()


def matches_of(pairs: Pairs, name: str) -> Matches:
    """Values of the same rank, if ``pairs`` are all pairs of the step."""
    chosen, rejected = pairs.chosen, pairs.rejected
    if name == "aot":
        of_policy = (chosen.logps - rejected.logps).detach()
        counterpart = at_same_rank(of_policy, (chosen.reference - rejected.reference).detach())
        return Matches(counterpart, counterpart)
    up, down = chosen.ratio.detach(), rejected.ratio.detach()
    return Matches(at_same_rank(up, down), at_same_rank(down, up))


def at_same_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each element of ``values`` (P,), the element of ``others`` (P,) that has the same rank after sorting."""
    found = torch.empty_like(others)
    found[values.argsort(stable=True)] = others.sort(stable=True).values
    return found


# --- single responses -------------------------------------------------------------------------------------------------


def kto(ratio: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float, weights: tuple[float, float]) -> Tensor:
    """w_d (1 - σ(β (r - z))) for desirable responses, w_u (1 - σ(β (z - r))) for others.  KTO, Ethayarajh et al. 2024,
    eq. 7, https://arxiv.org/abs/2402.01306; with z = 0 TRL's apo_zero_unpaired.

    Args:
        ratio: (P,) r(y) of records.
        is_desirable: (P,) bool.
        baseline: () z, at least 0, without gradient.
        beta: β.
        weights: w_d and w_u.
    """
    sign = torch.where(is_desirable, 1.0, -1.0)
    weight = torch.where(is_desirable, weights[0], weights[1])
    return weight * (1 - (beta * sign * (ratio - baseline)).sigmoid())


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centring: float = 0.0) -> Tensor:
    """-ln σ(score(y+) - score(y-) - margin) + c (score(y+) + score(y-))².  InstructGPT, Ouyang et al. 2022, eq. 1,
    https://arxiv.org/abs/2203.02155; margin: Llama 2, eq. 2, https://arxiv.org/abs/2307.09288; c keeps the mean of all
    scores near 0: Eisenstein et al. 2023, eq. 2, https://arxiv.org/abs/2312.09244

    Args:
        chosen, rejected: (P,) scores.
        margin: (P,) required difference; None: 0.
        centring: c.
    """
    apart = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -F.logsigmoid(apart)
    return losses + centring * (chosen + rejected).square() if centring else losses


# --- small words used above -------------------------------------------------------------------------------------------


def _smoothed_log_sigmoid(x: Tensor, label_smoothing: float) -> Tensor:
    """(P,) -(1-s) ln σ(x) - s ln σ(-x)"""
    losses = -F.logsigmoid(x)
    if not label_smoothing:
        return losses
    return (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-x)


def _delta(pairs: Pairs, constants: LossConstants) -> Tensor:
    return divergence(pairs.chosen.ratio, constants) - divergence(pairs.rejected.ratio, constants)


def _mean_delta(pairs: Pairs, constants: LossConstants) -> Tensor:
    chosen, rejected = (divergence(side.ratio, constants) / side.lengths for side in (pairs.chosen, pairs.rejected))
    return chosen - rejected


def _rewards(pairs: Pairs, constants: LossConstants) -> tuple[Tensor, Tensor]:
    return constants.beta * pairs.chosen.ratio, constants.beta * pairs.rejected.ratio


def divergence(ratio: Tensor, constants: LossConstants) -> Tensor:
    """f'(e^r), which replaces r for a divergence f other than the reverse KL. f-DPO, Wang et al. 2023, table 1,
    https://arxiv.org/abs/2309.16240"""
    alpha = constants.divergence_alpha
    if constants.divergence == "forward_kl":
        return 1 - (-ratio).clamp(max=_STEEPEST).exp()
    if constants.divergence == "js_divergence":
        return F.logsigmoid(ratio) + torch.log(torch.tensor(2.0))
    if constants.divergence == "alpha_divergence" and alpha != 1:
        return (((alpha - 1) * ratio).clamp(max=_STEEPEST).exp() - 1) / (alpha - 1)
    return ratio


def alphapo(logps: Tensor, constants: LossConstants) -> Tensor:
    """(1 - e^(-αL)) / α.  AlphaPO, Gupta et al. 2025, https://arxiv.org/abs/2501.03884"""
    if not constants.alphapo:
        return logps
    return (1 - (-constants.alphapo * logps).clamp(max=_STEEPEST).exp()) / constants.alphapo


def _log_of_rest(logp: Tensor) -> Tensor:
    """ln(1 - e^x) for x < 0. x is clamped below 0, because log1p(-exp(0)) is -inf with a NaN gradient.
    Mächler 2012, https://cran.r-project.org/package=Rmpfr/vignettes/log1mexp-note.pdf"""
    below = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    near = torch.log(-torch.expm1(below))
    far = torch.log1p(-below.clamp(max=-0.5).exp())
    return torch.where(below > -0.6931472, near, far)
