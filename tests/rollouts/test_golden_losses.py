"""Losses, gradients and advantages of every golden case, however a step is cut into micro-batches."""

import pytest
import torch
from golden_steps import Golden, golden, make_models

from burnish.loop.metrics import joined_by_name

CASES = {case["name"]: case for case in golden()["cases"]}
CUTS = {"at once": 64, "4x4": 4, "2x8": 2, "1xN": 1, "uneven": (1, 5, 3, 6)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def close(found, expected, scale=1.0):
    return abs(found - expected) <= 1e-4 * max(abs(expected), scale)


def metrics(outcome, at):
    joined = joined_by_name(outcome.sums[at])
    return {n: float(m.total / m.count) for n, m in joined.items() if not isinstance(m, torch.Tensor)}


def parameters():
    """In the usual run each case is cut in one way, all five in turn, and whole; with ``slow`` in all of them."""
    for at, name in enumerate(CASES):
        for number, cut in enumerate(CUTS):
            is_usual = number == at % len(CUTS)
            yield pytest.param(name, cut, marks=() if is_usual else pytest.mark.slow, id=f"{name}, {cut}")


@pytest.mark.parametrize(("name", "cut"), parameters())
def test_a_case_has_its_exact_numbers_in_each_cut(name, cut, models):
    case, cut = CASES[name], CUTS[cut]
    exact = case["exact"]
    outcome = Golden(case, models, cut).run()
    for found, expected in zip(outcome.advantages, exact["advantages"], strict=False):
        assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-4), (cut, found)
    for at, step in enumerate(exact["steps"]):
        assert close(outcome.losses[at], step["loss"], 0.1), (cut, at, outcome.losses[at], step["loss"])
        assert close(outcome.norms[at], step["grad_norm"], 1e-3), (cut, at, outcome.norms[at], step["grad_norm"])
        for weight, norm in step.get("grad_norms", {}).items():
            found = next(n for known, n in outcome.norms_of[at].items() if known.endswith(weight))
            assert close(found, norm, 1e-3), (cut, at, weight, found, norm)
        logged = metrics(outcome, at)
        for theirs, ours in (("kl", "kl"), ("entropy", "entropy"), ("low", "clip_ratio/low_mean"),
                             ("high", "clip_ratio/high_mean")):  # fmt: skip
            if theirs in step and ours in logged:
                assert close(logged[ours], step[theirs], 0.01), (cut, at, theirs, logged[ours], step[theirs])
        if "entropy_coef" in step:
            assert close(outcome.coefficients[at], step["entropy_coef"]), (cut, at)
    assert close(outcome.moved, exact["moved"], 1e-3), (cut, outcome.moved, exact["moved"])


def test_all_cases_are_here():
    assert len(CASES) == 92
