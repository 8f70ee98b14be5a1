"""Logged metrics of rollouts: every documented name, and its denominator."""

import json
from types import SimpleNamespace

import pytest
import torch
from golden_steps import Options
from test_rollout_runs import train, user

from burnish.inference.sampling import DrawSettings, draw_logps
from burnish.inference.types import NoiseKey, Sampling
from burnish.rollouts.advantages import advantages
from burnish.rollouts.metrics import as_metrics, with_counts
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.samples import ScoredCompletion
from representative import representative_slow
from run_outputs import history, same_weights

GENERATION_METRICS = {
    "reward", "reward_std", "frac_reward_zero_std", "rewards/short/mean", "rewards/short/std", "rewards/short/none",
    "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "time/generate", "time/reward", "time/logps",
}  # fmt: skip
CLIPS = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
STEP_METRICS = {"loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "step_time", "time/train"}
ENDS = {"mask_truncated_completions": False, "max_completion_length": 100, "num_iterations": 1}
CASES = {
    "grpo": ({"beta": 0.1}, {"kl"} | CLIPS),
    "filtered": ({"top_p": 0.9}, {"sampling/logp_difference"} | CLIPS),
    "bonus": ({"entropy_coef": 0.01}, {"policy_loss", "entropy_coef"} | CLIPS),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"cispo_clip_ratio"}),
    "vespo": ({"loss_type": "vespo"}, {"vespo/phi_seq_mean"}),
    "rloo": ({"stage": "rloo", "beta": 0.1}, {"kl"} | CLIPS),
    "dropped": ({"drop_zero_variance_groups": "drop"}, {"frac_groups_dropped"} | CLIPS),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", representative_slow(CASES, ("grpo", "rloo")))
def test_log_has_every_metric(tmp_path, name):
    options, names = CASES[name]
    run = train(user(tmp_path, max_steps=1, save_strategy="no", **{**ENDS, **options}))
    (entry,) = [entry for entry in history(run) if "loss" in entry]
    assert not (GENERATION_METRICS | STEP_METRICS | names) - entry.keys()
    assert entry["num_tokens"] > 0
    assert entry["step_time"] >= entry["time/train"] > 0


def test_terminated_lengths_are_0_if_no_completion_ended(tmp_path):
    # TRL logs 0, so that the columns of a log do not depend on the completions.
    short = {**ENDS, "max_completion_length": 1, "eval_strategy": "steps", "eval_steps": 1, "val_size": 2}
    run = train(user(tmp_path, max_steps=1, save_strategy="no", **short))
    logs = [entry for entry in history(run) if "loss" in entry or "eval_loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        prefix = "" if "loss" in entry else "eval_"
        assert entry[f"{prefix}completions/clipped_ratio"] == 1
        assert [entry[f"{prefix}completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")] == [0, 0, 0]


def test_ppo_log_has_every_metric(tmp_path):
    more = {"ppo_epochs": 2, "num_generations": None, "steps_per_generation": None, "top_k": 50, "max_steps": 1}
    options = user(tmp_path, stage="ppo", save_strategy="no", **{**ENDS, **more, "num_iterations": None})
    run = train({name: value for name, value in options.items() if value is not None})
    result = {name for entry in history(run) for name in entry}
    names = {"objective/kl", "kl_coef", "ppo/policy_loss", "ppo/value_loss", "ppo/clipfrac", "ppo/entropy",
             "ppo/skipped", "sampling/logp_difference"}  # fmt: skip
    expected = (GENERATION_METRICS | names | {"step_time", "num_tokens"}) - {"frac_reward_zero_std"}
    assert not expected - result


def scored_completion(length: int, is_ended: bool, *rewards: float | None) -> ScoredCompletion:
    return ScoredCompletion(0, 0, "", [1], [5] * length, [1] * length, is_ended, rewards=list(rewards))


def test_metrics_of_two_generations_are_means_over_completions():
    small = [scored_completion(4, True, 1.0, None), scored_completion(2, True, 0.0, None)]
    large = [scored_completion(10, False, 1.0, 2.0)] * 4 + [scored_completion(6, True, None, None)] * 2
    total: dict[str, list[float]] = {}
    for samples, rewards in ((small, [1.0, 0.0]), (large, [3.0] * 4)):
        lengths = [len(sample.ids) for sample in samples]
        ended = [len(sample.ids) for sample in samples if sample.is_ended]
        numbers = {
            "reward": sum(rewards) / len(rewards), "completions/mean_length": sum(lengths) / len(lengths),
            "completions/min_length": min(lengths), "completions/max_length": max(lengths),
            "completions/mean_terminated_length": sum(ended) / len(ended),
        }  # fmt: skip
        for name, metric in as_metrics(with_counts(numbers, samples, ["a", "b"], 2), torch.device("cpu")).items():
            both = total.setdefault(name, [0.0, 0.0, []])
            both[0] += float(metric.total)
            both[1] += float(metric.count)
            both[2].append((metric.reduction, float(metric.total)))
    assert total["reward"][0] / total["reward"][1] == pytest.approx((1 + 12) / 6)
    mean = total["completions/mean_length"]
    assert mean[0] / mean[1] == pytest.approx((4 + 2 + 40 + 12) / 8)
    ended_mean = total["completions/mean_terminated_length"]
    assert ended_mean[0] / ended_mean[1] == pytest.approx((4 + 2 + 12) / 4)
    assert total["completions/min_length"][2] == [("min", 2.0), ("min", 6.0)]
    assert total["completions/max_length"][2] == [("max", 4.0), ("max", 10.0)]


def test_sampled_log_probability_is_that_of_filtered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 1.0]])
    settings = [DrawSettings(Sampling(1.0, 2, 1.0), noise=NoiseKey()), DrawSettings(Sampling(0.5, 0, 1.0))]
    tokens = torch.tensor([1, 3])
    expected = [logits[0, :2].log_softmax(0)[1], (logits[1] / 0.5).log_softmax(0)[3]]
    assert torch.allclose(draw_logps(logits, settings, tokens), torch.stack(expected))


SOMETIMES = """
def sometimes(prompts, **kwargs):
    # Completions of every second prompt differ.
    return [at % 4 / 4 if at // 4 % 2 else 1.0 for at in range(len(prompts))]
"""


def refill_options(tmp_path, **more):
    (tmp_path / "sometimes.py").write_text(SOMETIMES)
    return user(tmp_path, reward_funcs=[f"{tmp_path}/sometimes.py:sometimes"], drop_zero_variance_groups="refill",
                num_iterations=1, **more)  # fmt: skip


def test_refill_samples_more_prompts_until_the_step_is_full(tmp_path):
    run = train(refill_options(tmp_path, max_steps=4, logging_steps=2))
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert [sum(line["step"] == step for line in lines) for step in (1, 3)] == [32, 32]  # two step batches each
    assert len({line["record"] for line in lines}) == 16  # prompts are not sampled again
    log = [entry for entry in history(run) if "loss" in entry]
    assert [entry["frac_groups_dropped"] for entry in log] == [0.5, 0.5]
    assert all(entry["grad_norm"] > 0 for entry in log)


@pytest.mark.slow
def test_refill_samples_at_most_three_times_as_many_prompts(tmp_path):
    options = refill_options(tmp_path, max_steps=2, logging_steps=1)
    (tmp_path / "sometimes.py").write_text("def sometimes(prompts, **kwargs):\n    return [1.0] * len(prompts)\n")
    run = train(options)
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 16
    assert [entry["grad_norm"] for entry in history(run) if "loss" in entry] == [0.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [{"rl_beta": 0.1}, {"top_entropy_quantile": 0.5}, {"rl_beta": 0.1, "num_iterations": 2}],
    ids=["reference", "entropy", "iterations"],
)
def test_step_whose_groups_are_all_dropped_changes_nothing(tmp_path, options):
    given = {**refill_options(tmp_path, max_steps=1, weight_decay=0.0), **options}
    (tmp_path / "sometimes.py").write_text("def sometimes(prompts, **kwargs):\n    return [1.0] * len(prompts)\n")
    run = train({**given, "drop_zero_variance_groups": "drop"})
    log = next(entry for entry in history(run) if "loss" in entry)
    assert (log["loss"], log["grad_norm"]) == (0.0, 0.0)


@pytest.mark.slow
def test_refilled_run_resumed_inside_a_generation_gives_the_same_weights(tmp_path):
    whole = train(refill_options(tmp_path, max_steps=4, output_dir=str(tmp_path / "whole")))
    train(refill_options(tmp_path, max_steps=3, output_dir=str(tmp_path / "part")))
    parted = train(refill_options(tmp_path, max_steps=4, output_dir=str(tmp_path / "part")))
    assert same_weights(whole, parted)


def test_large_rewards_that_differ_by_1_have_different_advantages():
    """float32 does not represent 2**24 + 1."""
    samples = [SimpleNamespace(row=0, number=at, rewards=[2.0**24 + at % 2]) for at in range(4)]
    objective = SimpleNamespace(
        choices=Options(num_generations=4, scale_rewards="none"), leaves_one_out=False, count=lambda is_eval: 4,
        functions=[SimpleNamespace(name="large", weight=1.0)], _penalties=lambda samples: None,
    )  # fmt: skip
    metrics = RolloutObjective.set_advantages(objective, samples)
    assert [sample.advantage for sample in samples] == [-0.5, 0.5, -0.5, 0.5]
    assert metrics["rewards/large/mean"] == 2.0**24 + 0.5


def test_equal_rewards_of_rloo_have_an_advantage_of_exactly_0():
    rewards = torch.tensor([[0.1], [0.1], [0.1], [0.1], [0.2], [0.1]])
    found = advantages(rewards.double(), [1.0], torch.tensor([0, 0, 0, 1, 1, 1]), Options(), leave_one_out=True)
    assert found.values[:3].tolist() == [0, 0, 0]
    assert found.values[3:].tolist() == pytest.approx([-0.05, 0.1, -0.05])


def test_identical_completions_of_rloo_have_one_penalty_despite_rounding():
    options = Options(rl_beta=0.5)
    samples = [scored_completion(3, True, 1.0) for _ in range(2)]
    for sample, rounding in zip(samples, (0.0, 1e-6), strict=True):
        sample.old_logps, sample.ref_logps = [-1.0, -2.0 + rounding, -0.5], [-1.5, -1.0, -0.5]
    objective = SimpleNamespace(leaves_one_out=True, needs_reference=True, choices=options)
    penalties = RolloutObjective._penalties(objective, samples)
    assert penalties is not None
    found = advantages(torch.ones(2, 1), [1.0], torch.zeros(2), options, leave_one_out=True, penalties=penalties)
    assert found.values.tolist() == [0, 0]
    assert found.metrics["frac_reward_zero_std"] == 1
