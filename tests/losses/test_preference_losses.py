"""Preference losses compared with LLaMA-Factory and TRL, coupling between the pairs of a step, and edge cases."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import tensor

from burnish.losses.pair_values import RunningMean
from burnish.losses.preference_losses import (
    PAIR_LOSSES,
    LossConstants,
    Pairs,
    Side,
    at_same_rank,
    bco,
    bradley_terry,
    kto,
    log_odds,
    matches_of,
    odds_ratio_loss,
    wpo_weights,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "preference.json"
TOLERANCE = 2e-5  # tolerance: the golden numbers have eight digits and were computed in float32


def golden():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["losses"]


NUMBERS = golden()


def cases(*path):
    result = NUMBERS
    for name in path:
        result = result[name] if result else []
    return result or []


def side(name, ld_alpha=None, weights_reference=True):
    """Return one side of the golden pairs: sums over tokens, weighted by ``ld_alpha`` after the shorter response."""

    def total(pair, model_name):
        logps, shorter = pair[f"{model_name}_{name}"], min(len(pair["policy_chosen"]), len(pair["policy_rejected"]))
        alpha = 1.0 if ld_alpha is None or (model_name == "reference" and not weights_reference) else ld_alpha
        return sum(logps[:shorter]) + alpha * sum(logps[shorter:])

    pairs = NUMBERS["pairs"]
    sums = (
        tensor([total(pair, model_name) for pair in pairs], dtype=torch.float64)
        for model_name in ("policy", "reference")
    )
    return Side(*sums, tensor([float(len(pair[f"policy_{name}"])) for pair in pairs], dtype=torch.float64))


def pairs_of(ld_alpha=None, weights_reference=True):
    return Pairs(side("chosen", ld_alpha, weights_reference), side("rejected", ld_alpha, weights_reference))


def case_id(settings):
    settings = {key: value for key, value in settings.items() if value is not None}
    return "-".join(str(value) for value in settings.values())[:60]


@pytest.mark.parametrize("case", cases("trl", "dpo"), ids=lambda case: case_id(case["settings"]))
def test_pair_losses_match_trl(case):
    requested = case["settings"]
    pairs = pairs_of(requested["ld_alpha"])
    shape = LossConstants(
        requested["beta"], requested["label_smoothing"], discopop_tau=requested["discopop_tau"],
        divergence=requested["f_divergence_type"], divergence_alpha=requested["f_alpha_divergence_coef"],
    )  # fmt: skip
    weights = requested["loss_weights"] or [1.0] * len(requested["loss_type"])
    losses = sum(
        weight * PAIR_LOSSES[name].of(pairs, shape)
        for weight, name in zip(weights, requested["loss_type"], strict=True)
    )
    if requested["use_weighting"]:
        losses = losses * wpo_weights(pairs.chosen.mean + 0.3, pairs.rejected.mean + 0.3)
    assert losses.mean().item() == pytest.approx(case["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("case", cases("llamafactory", "dpo"), ids=lambda case: case_id(case["settings"]))
def test_pair_losses_match_llamafactory(case):
    requested = case["settings"]
    # It weights the tokens beyond the shorter response only under the policy; burnish under both models.
    pairs = pairs_of(requested.get("ld_alpha"), weights_reference=False)
    shape = LossConstants(requested["pref_beta"], requested["dpo_label_smoothing"], requested["simpo_gamma"])
    losses = PAIR_LOSSES[requested["pref_loss"]].of(pairs, shape)
    if weight := requested["pref_bco_weight"]:
        rewards = shape.beta * torch.cat([pairs.chosen.ratio, pairs.rejected.ratio])
        losses = (losses + weight * bco(pairs, shape, rewards.mean())) / (1 + weight)
    losses = losses - requested["pref_ftx"] * pairs.chosen.mean
    assert losses.tolist() == pytest.approx(case["losses"], rel=TOLERANCE)
    assert losses.mean().item() == pytest.approx(case["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("case", cases("llamafactory", "not_to_match"), ids=lambda case: case["settings"]["pref_loss"])
def test_mislabelled_llamafactory_losses_differ(case):
    name = {"kto_pair": "bco_pair"}.get(case["settings"]["pref_loss"], case["settings"]["pref_loss"])
    losses = PAIR_LOSSES[name].of(pairs_of(), LossConstants(case["settings"]["pref_beta"]))
    assert not torch.allclose(losses, tensor(case["losses"], dtype=torch.float64), rtol=1e-2)


@pytest.mark.parametrize("case", cases("trl", "cpo"), ids=lambda case: case_id(case["settings"]))
def test_losses_without_reference_match_trl(case):
    requested = case["settings"]
    name = {"sigmoid": "cpo", "hinge": "cpo_hinge", "ipo": "cpo_ipo", "simpo": "simpo"}[requested["loss_type"]]
    shape = LossConstants(
        requested["beta"], requested["label_smoothing"], requested["simpo_gamma"], alphapo=requested["alpha"]
    )
    assert PAIR_LOSSES[name].of(pairs_of(), shape).tolist() == pytest.approx(case["losses"], rel=TOLERANCE)


@pytest.mark.parametrize("case", cases("trl", "orpo"), ids=lambda case: case_id(case["settings"]))
def test_odds_ratio_matches_trl(case):
    pairs, beta = pairs_of(), case["settings"]["beta"]
    assert (beta * odds_ratio_loss(pairs)).tolist() == pytest.approx(case["ratio_term"], rel=TOLERANCE)
    assert log_odds(pairs).mean().item() == pytest.approx(case["log_odds_chosen"], rel=TOLERANCE)
    assert -odds_ratio_loss(pairs).mean().item() == pytest.approx(case["log_odds_ratio"], rel=TOLERANCE)


@pytest.mark.parametrize("peer", ["llamafactory", "trl"])
def test_kto_losses_match_trl_and_llamafactory(peer):
    rows = NUMBERS["kto_rows"]
    ratio = tensor([sum(row["policy"]) - sum(row["reference"]) for row in rows])
    mismatched_sums = tensor([sum(row["policy_kl"]) - sum(row["reference_kl"]) for row in rows])
    means = tensor([sum(row["policy"]) / len(row["policy"]) for row in rows])
    is_desirable = tensor([row["tag"] for row in rows])
    for case in NUMBERS[peer]["kto"]:
        requested = case["settings"]
        ours = ("pref_beta", "kto_chosen_weight", "kto_rejected_weight")
        beta, *weights = (requested[name] for name in (ours if peer == "llamafactory" else list(requested)[1:]))
        z = mismatched_sums.mean().clamp(min=0) * (requested.get("loss_type") != "apo_zero_unpaired")
        assert z.item() == pytest.approx(case["metrics"]["kl"], rel=TOLERANCE)
        losses = kto(ratio, is_desirable, z, beta, tuple(weights))
        # LLaMA-Factory divides the likelihood of the chosen responses by their number and multiplies it by that of the
        # records.
        ftx = -requested.get("pref_ftx", 0.0) * means[is_desirable].mean()
        assert (losses.mean() + ftx).item() == pytest.approx(case["loss"], rel=TOLERANCE) or requested.get("pref_ftx")


def random_pairs(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def one():
        logps, reference = (-torch.rand(count, generator=generator, dtype=torch.float64) * 9 - 1 for _ in range(2))
        lengths = torch.randint(2, 9, (count,), generator=generator).double()
        return Side(logps.requires_grad_(), reference, lengths)

    return Pairs(one(), one())


def some(side, rows):
    return Side(*(values[rows] for values in side))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_pair_loss_is_additive_over_micro_batches(name):
    """The values that couple the pairs are computed over the whole step."""
    pairs, shape = random_pairs(), LossConstants(label_smoothing=0.1)
    whole = PAIR_LOSSES[name].of(pairs, shape)
    gradients = torch.autograd.grad(whole.sum(), [pairs.chosen.logps, pairs.rejected.logps], allow_unused=True)
    matches = matches_of(pairs, name) if PAIR_LOSSES[name].sorts_pairs else None
    share = len(whole) / pairs.chosen.lengths.sum()
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = Pairs(
            some(pairs.chosen, rows), some(pairs.rejected, rows),
            None if matches is None else type(matches)(*(values[rows] for values in matches)), share,
        )  # fmt: skip
        total = total + PAIR_LOSSES[name].of(part, shape).sum()
    assert total.item() == pytest.approx(whole.sum().item(), rel=1e-12)
    again = torch.autograd.grad(total, [pairs.chosen.logps, pairs.rejected.logps], allow_unused=True)
    for one, other in zip(gradients, again, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name not in ("sft", "discopop")])
def test_initial_gradient_favors_chosen_over_rejected(name):
    """Except with discopop, whose loss, found by search, increases around 0."""
    sums = [torch.full((1,), -9.0, requires_grad=True) for _ in range(2)]
    pairs = Pairs(*(Side(logps, logps.detach(), torch.full((1,), 4.0)) for logps in sums))
    chosen, rejected = torch.autograd.grad(PAIR_LOSSES[name].of(pairs, LossConstants(label_smoothing=0.1)).sum(), sums)
    assert chosen < rejected
    assert chosen <= 0 <= rejected


def test_sorted_pairs_get_gradient_of_sorted_sum():
    """Reference: sort both sides with their gradients, and compare values of the same rank."""
    pairs, shape = random_pairs(), LossConstants()
    sums = [pairs.chosen.logps, pairs.rejected.logps]
    one, other = pairs.chosen.ratio.sort().values, pairs.rejected.ratio.sort().values
    plain = -torch.nn.functional.logsigmoid(shape.beta * (one - other)).sum()
    losses = PAIR_LOSSES["aot_unpaired"].of(pairs, shape).sum()
    assert losses.item() == pytest.approx(plain.item(), rel=1e-12)
    for expected, got in zip(torch.autograd.grad(plain, sums), torch.autograd.grad(losses, sums), strict=True):
        assert torch.allclose(expected, got, rtol=1e-12)


def test_equal_values_get_a_consistent_rank():
    assert at_same_rank(tensor([3.0, 1.0, 1.0]), tensor([10.0, 30.0, 20.0])).tolist() == [30.0, 10.0, 20.0]


def test_odds_of_a_certain_response_are_finite_with_finite_gradient():
    certain = Side(torch.zeros(2, requires_grad=True), torch.zeros(2), torch.ones(2))
    uncertain = Side(tensor([-1e-9, -40.0]).requires_grad_(), torch.zeros(2), torch.ones(2))
    loss = PAIR_LOSSES["orpo"].of(Pairs(certain, uncertain), LossConstants()).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(certain.logps.grad).all()
    assert torch.isfinite(uncertain.logps.grad).all()


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergence_far_from_reference_is_finite(divergence):
    far = Side(tensor([-5000.0, 0.0]).requires_grad_(), tensor([0.0, -5000.0]), torch.ones(2))
    loss = PAIR_LOSSES["sigmoid"].of(Pairs(far, far), LossConstants(divergence=divergence)).sum()
    assert torch.isfinite(loss)


def test_reward_loss_applies_margin_and_centers_scores():
    chosen, rejected = tensor([1.0, 2.0]), tensor([0.0, 0.0])
    plain = -torch.nn.functional.logsigmoid(tensor([1.0, 2.0]))
    assert torch.allclose(bradley_terry(chosen, rejected), plain)
    shifted = bradley_terry(chosen, rejected, margin=tensor([1.0, 2.0]), centring=0.5)
    assert torch.allclose(shifted, torch.full((2,), 0.5).log().neg() + 0.5 * tensor([1.0, 4.0]))


def test_pair_with_high_policy_likelihood_has_a_weight_above_one():
    """As in TRL and in the paper: tokens that are likelier than average have a weight above 1."""
    assert wpo_weights(torch.tensor([0.5]), torch.tensor([0.25])).item() == pytest.approx(math.exp(0.75))


@pytest.mark.parametrize("total", [math.nan, math.inf])
def test_running_mean_ignores_a_sum_that_is_not_finite(total):
    mean = RunningMean()
    mean.add(torch.tensor(6.0), torch.tensor(2.0))
    mean.add(torch.tensor(total), torch.tensor(2.0))
    assert mean.value == 3
    mean.add(torch.tensor(18.0), torch.tensor(2.0))
    assert mean.value == 6
