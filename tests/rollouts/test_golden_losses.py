"""Losses, gradients and advantages of every golden case for any micro-batching."""

import json
import os
from pathlib import Path

import pytest
import torch
from golden_steps import GoldenCase, Options, Outcome, golden, make_models

from burnish.losses.rollouts.loss import RolloutLoss
from two_processes import in_two_processes

CASES = {case["name"]: case for case in golden()["cases"]}
CUTS = {"at once": 64, "4x4": 4, "2x8": 2, "1xN": 1, "uneven": (1, 5, 3, 6)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def close(result, expected, scale=1.0):
    return abs(result - expected) <= 1e-4 * max(abs(expected), scale)


def parameters():
    """Yield each case with one of the ways to cut micro-batches in turn; with ``slow``, with all of them."""
    for index, name in enumerate(CASES):
        for number, cut in enumerate(CUTS):
            is_default = number == index % len(CUTS)
            yield pytest.param(name, cut, marks=() if is_default else pytest.mark.slow, id=f"{name}, {cut}")


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "cut"), parameters())
def test_loss_matches_exact_golden_numbers_for_any_micro_batching(name, cut, models):
    check(CASES[name], GoldenCase(CASES[name], models, CUTS[cut]).run())


def check(case, outcome):
    """Compare an outcome with the golden numbers of its case."""
    exact = case["exact"]
    for result, expected in zip(outcome.advantages, exact["advantages"], strict=False):
        assert torch.allclose(
            torch.as_tensor(result, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), atol=1e-4
        ), result
    for index, step in enumerate(exact["steps"]):
        assert close(outcome.losses[index], step["loss"], 0.1), (index, outcome.losses[index], step["loss"])
        assert close(outcome.norms[index], step["grad_norm"], 1e-3), (index, outcome.norms[index], step["grad_norm"])
        for weight, norm in step.get("grad_norms", {}).items():
            result = next(n for known, n in outcome.norms_of[index].items() if known.endswith(weight))
            assert close(result, norm, 1e-3), (index, weight, result, norm)
        logged = outcome.logged[index]
        for theirs, ours in (("kl", "kl"), ("entropy", "entropy"), ("low", "clip_ratio/low_mean"),
                             ("high", "clip_ratio/high_mean")):  # fmt: skip
            if theirs in step and ours in logged:
                assert close(logged[ours], step[theirs], 0.01), (index, theirs, logged[ours], step[theirs])
        if "entropy_coef" in step:
            assert close(outcome.coefficients[index], step["entropy_coef"]), index
    assert close(outcome.moved, exact["moved"], 1e-3), (outcome.moved, exact["moved"])


def run_cases(folder, out, names):
    """Run cases in one of several processes, with the ways to cut in turn; rank 0 writes the outcomes."""
    outcomes = {}
    for at, name in enumerate(names):
        cut = [*CUTS.values()][at % len(CUTS)]
        outcomes[name] = vars(GoldenCase(CASES[name], Path(folder), cut).run())
    if os.environ["RANK"] == "0":
        for outcome in outcomes.values():
            outcome["advantages"] = [values.tolist() for values in outcome["advantages"]]
        Path(out).write_text(json.dumps(outcomes))


@pytest.mark.distributed
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(9, id="some")])
def test_two_processes_match_exact_golden_numbers(models, tmp_path, step):
    names = [*CASES][::step]
    in_two_processes(run_cases, str(models), str(tmp_path / "outcomes.json"), names)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert [*outcomes] == names
    for name in names:
        check(CASES[name], Outcome(**outcomes[name]))


def test_all_golden_cases_are_tested():
    assert len(CASES) == 92


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "rloo"])
def test_on_policy_gradient_is_known_before_the_forward_pass(name, level):
    kind = {"rl_loss_type": name} if name != "rloo" else {}
    options = Options(**kind, importance_sampling_level=level, epsilon_high=0.3, max_completion_length=5, rl_beta=0.0)
    loss, owner = RolloutLoss(options, leave_one_out=name == "rloo"), torch.tensor([0, 0, 0, 1, 1, 2])
    mask, generator = torch.tensor([1.0, 1, 0, 1, 1, 1]), torch.Generator().manual_seed(0)
    batch = {"owner": owner, "items": torch.ones(3), "advantages": torch.tensor([1.0, -2.0, 0.5]), "token_mask": mask,
             "token_weights": loss.token_weights(mask, owner, 3)}  # fmt: skip
    (prepared,) = loss.prepare_step([batch], None)
    logps = (-torch.rand(6, generator=generator)).requires_grad_()
    (expected,) = torch.autograd.grad(loss(logps, torch.zeros(6), batch).total, [logps])
    assert torch.allclose(prepared["logp_gradients"], expected)
    (off_policy,) = loss.prepare_step([{**batch, "old_logps": logps.detach() - 0.1}], None)
    assert "logp_gradients" not in off_policy
