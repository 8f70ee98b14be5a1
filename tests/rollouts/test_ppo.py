"""PPO's formulas compared with golden cases for any micro-batching, and its two saved states."""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish.losses.rollouts.ppo import KlController, ScoreMoments, estimates, ppo_loss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "rollouts.json").read_text(encoding="utf-8"))["ppo"]


def settings(case):
    options = case["settings"]
    names = {"kl_coef": "init_kl_coef", "batch_size": None}
    return SimpleNamespace(
        kl_coef=None,
        **{f"ppo_{names.get(name, name)}": value for name, value in options.items() if names.get(name, name)},
    )


def column(case, name):
    return torch.tensor([value for row in case["sequences"] for value in row[name]], dtype=torch.float64)


def lengths_of(case):
    return torch.tensor([len(row["old"]) for row in case["sequences"]])


def estimates_of(case):
    scores = torch.tensor([row["score"] for row in case["sequences"]], dtype=torch.float64)
    options = settings(case)
    return estimates(
        column(case, "old"), column(case, "ref"), column(case, "values"), scores, lengths_of(case),
        options.ppo_init_kl_coef, options,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rewards_returns_and_advantages_match_reference(case):
    result = estimates_of(case)
    for name in ("rewards", "returns", "advantages"):
        torch.testing.assert_close(getattr(result, name), column(case, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cuts", [[1], [1, 2, 3], [2]])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_losses_and_gradients_of_a_step_in_several_micro_batches(case, cuts):
    result, options = estimates_of(case), settings(case)
    logps, values = column(case, "new").requires_grad_(), column(case, "new_values").requires_grad_()
    ones = torch.ones(len(logps), dtype=torch.float64)
    batch = {
        "token_mask": ones, "token_weights": ones, "old_logps": column(case, "old"),
        "old_values": column(case, "values"), "token_advantages": result.advantages, "returns": result.returns,
    }  # fmt: skip
    ends = lengths_of(case).cumsum(0).tolist()
    borders = [0, *[ends[cut - 1] for cut in cuts], ends[-1]]
    total, sums = 0, {}
    for begin, end in pairwise(borders):
        part = {name: tensor[begin:end] for name, tensor in batch.items()}
        loss = ppo_loss(logps[begin:end], values[begin:end], part, options)
        total = total + loss.total / len(logps)
        for name, each in loss.sums.items():
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + each.total, before[1] + each.count)
    total.backward()
    means = {name: float(value / count) for name, (value, count) in sums.items()}
    assert float(total.detach()) == pytest.approx(case["loss"], abs=1e-7)
    names = {"policy_loss": "ppo/policy_loss", "value_loss": "ppo/value_loss", "policy_clipfrac": "ppo/clipfrac",
             "value_clipfrac": "ppo/value_clipfrac"}  # fmt: skip
    for golden, own in names.items():
        assert means[own] == pytest.approx(case[golden], abs=1e-7), golden
    for tensor, golden in ((logps, "gradient_by_logp"), (values, "gradient_by_value")):
        torch.testing.assert_close(tensor.grad, torch.tensor(case[golden], dtype=torch.float64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_kl_coefficient_adapts_to_distance_from_reference(case):
    controller = KlController(settings(case))
    kl = (column(case, "old") - column(case, "ref")).sum().item() / len(case["sequences"])
    assert kl == pytest.approx(case["objective_kl"], abs=1e-7)
    controller.update(kl, case["settings"]["batch_size"])
    assert controller.coefficient == pytest.approx(case["kl_coef_after"], abs=1e-9)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_kl_that_is_not_finite_does_not_change_the_coefficient(kl):
    case = CASES[0]
    controller = KlController(settings(case))
    before = controller.coefficient
    controller.update(kl, case["settings"]["batch_size"])
    assert controller.coefficient == before


def test_running_score_normalization_survives_a_checkpoint():
    torch.manual_seed(0)
    parts = [torch.randn(n, dtype=torch.float64) * 3 + 2 for n in (4, 7, 1)]
    moments = ScoreMoments()
    for part in parts[:2]:
        moments.normalize(part)
    restored = ScoreMoments()
    restored.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    every = torch.cat(parts)
    expected = (parts[2] - every.mean()) / every.std()
    for each in (moments, restored):
        torch.testing.assert_close(each.normalize(parts[2]), expected, rtol=1e-5, atol=1e-6)


CHANGES = {
    "ppo_whiten_rewards": True, "ppo_gamma": 0.5, "ppo_lam": 0.5, "ppo_cliprange": 0.01, "ppo_cliprange_value": 0.01,
    "ppo_vf_coef": 0.5,
}  # fmt: skip


def step_values(case, options):
    """Return advantages, returns and the loss of a step in one tensor."""
    scores = torch.tensor([row["score"] for row in case["sequences"]], dtype=torch.float64)
    overrides = [column(case, name) for name in ("old", "ref", "values")]
    result = estimates(*overrides, scores, lengths_of(case), 0.2, options)
    ones = torch.ones(len(overrides[0]), dtype=torch.float64)
    batch = {
        "token_mask": ones, "token_weights": ones, "old_logps": overrides[0], "old_values": overrides[2],
        "token_advantages": result.advantages, "returns": result.returns,
    }  # fmt: skip
    loss = ppo_loss(column(case, "new"), column(case, "new_values"), batch, options).total
    return torch.cat([result.advantages, result.returns, loss.reshape(1)])


@pytest.mark.parametrize("name", CHANGES)
def test_each_option_changes_training_data(name):
    case = CASES[0]
    changed = settings(case)
    setattr(changed, name, CHANGES[name])
    assert not torch.allclose(step_values(case, settings(case)), step_values(case, changed))


def test_kl_coefficient_options_are_applied():
    base = {"kl_coef": None, "ppo_init_kl_coef": 0.2, "ppo_target": 6.0, "ppo_horizon": 10000}

    def coefficient_after(**options):
        controller = KlController(SimpleNamespace(**{**base, **options}))
        controller.update(7.0, 100)
        return controller.coefficient

    assert coefficient_after() == pytest.approx(0.2 * (1 + (7 / 6 - 1) * 100 / 10000))
    assert coefficient_after(ppo_init_kl_coef=0.1) == pytest.approx(coefficient_after() / 2)
    assert coefficient_after(ppo_target=7.0) == pytest.approx(0.2)
    assert coefficient_after(ppo_horizon=100) == pytest.approx(0.2 * (7 / 6))
    assert coefficient_after(kl_coef=0.3) == 0.3
