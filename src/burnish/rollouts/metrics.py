"""Metrics of a generation batch with their divisors, and the time of each phase.

The values of a generation batch are converted to ``[total, count, reduction]``, so that a log over several generations
shows the mean over all their completions, and the shortest and longest of all. They are plain data, because they are
stored in checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.loop.types import Batch, Metric, Sum
from burnish.rollouts.samples import ScoredCompletion

PASS_AT_K_VALUES = (1, 2, 4, 8, 16, 32, 64)
"""Values of k for pass@k."""
Counted: TypeAlias = "list[float | str]"
"""Total, count, and reduction: ``mean``, ``min`` or ``max``."""


def with_counts(
    metrics: Mapping[str, float], samples: Sequence[ScoredCompletion], names: Sequence[str], count: int
) -> dict[str, Counted]:
    """Return the values of a generation batch, each with the number of completions or groups it is computed from.

    Args:
        names: names of the reward functions. count: completions per prompt.
    """
    every = len(samples)
    ended = sum(sample.is_ended for sample in samples)
    counts: dict[str, int] = {"frac_reward_zero_std": every // count, "frac_groups_dropped": every // count}
    counts["reward"] = sum(sample.is_scored for sample in samples)
    for at, name in enumerate(names):
        scored = sum(sample.rewards[at] is not None for sample in samples)
        counts |= {f"rewards/{name}/mean": scored, f"rewards/{name}/std": scored, f"rewards/{name}/none": 1}
    for name in metrics:
        if name.startswith("completions/"):
            counts[name] = ended if name.endswith("terminated_length") else every
        elif name.startswith("time/"):
            counts[name] = 1
    return {name: _metric_count(name, value, counts.get(name, every)) for name, value in metrics.items()}


def _metric_count(name: str, value: float, count: int) -> Counted:
    kind = name.rpartition("/")[2].partition("_")[0] if name.startswith("completions/") else "mean"
    if kind in ("min", "max"):
        return [value, float(count), kind]
    return [value * count if count else 0.0, float(count), "mean"]


def as_metrics(numbers: Mapping[str, Any], device: torch.device) -> dict[str, Metric]:
    """Convert the values of a generation batch to metrics of a micro-batch."""
    found: dict[str, Metric] = {}
    for name, (total, count, reduction) in numbers.items():
        found[name] = Sum(torch.tensor(total, device=device), torch.tensor(count, device=device), reduction)
    return found


def with_terminated_lengths(values: dict[str, float]) -> dict[str, float]:
    """Return the values of a log. The lengths of finished completions are 0 if no completion finished, as in TRL: the
    names in a log then do not depend on the completions."""
    if "completions/mean_length" not in values:
        return values
    return {f"completions/{kind}_terminated_length": 0.0 for kind in ("mean", "min", "max")} | values


def logp_difference(logps: Tensor, batch: Batch) -> dict[str, Metric]:
    """Return the mean difference between the log-probabilities of tokens under the sampling distribution and under the
    policy that generated them.

    Args:
        logps: (N,) of the policy, in nats. batch: with ``sampler_logps`` (N,); otherwise nothing is returned.
    """
    if "sampler_logps" not in batch:
        return {}
    mask, policy = batch["token_mask"], batch.get("old_logps", logps.detach())
    return {"sampling/logp_difference": Sum(((batch["sampler_logps"] - policy) * mask).sum(), mask.sum())}


def pass_at_k(samples: Sequence[ScoredCompletion], count: int) -> dict[str, float]:
    """Return the share of prompts for which at least one of k completions is correct, if every reward is 0 or 1.

    Source: Chen et al. 2021, eq. 1, https://arxiv.org/abs/2107.03374
    """
    values = [sample.rewards[0] for sample in samples if sample.rewards]
    if not samples or len(samples[0].rewards) != 1 or not set(values) <= {0.0, 1.0}:
        return {}
    right = [sum(v or 0 for v in values[at : at + count]) for at in range(0, len(values), count)]
    found = {}
    for k in [k for k in PASS_AT_K_VALUES if k <= count]:
        missed = [_probability_of_no_pass(count, int(c), k) for c in right]
        found[f"pass@{k}"] = 1 - sum(missed) / len(missed)
    return found


def _probability_of_no_pass(count: int, right: int, k: int) -> float:
    """Return the probability that k of ``count`` completions, of which ``right`` are correct, are all wrong."""
    product = 1.0
    for at in range(count - right + 1, count + 1):
        product *= max(0.0, 1 - k / at)
    return product


class PhaseTimes(TrainerCallback):
    """Measures ``time/train``, the seconds of a step, and ``step_time``, which includes its share of the generation.
    Both are means since the last log; ``num_tokens`` counts the tokens of all steps so far."""

    def __init__(self) -> None:
        self.state: TrainerState | None = None
        self.begun_s: float | None = None
        self.training_s = self.generating_s = 0.0
        self.steps = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.state = state

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.begun_s = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.begun_s is not None:
            self.training_s += time.perf_counter() - self.begun_s
            self.steps += 1
            self.begun_s = None

    def read(self) -> dict[str, float]:
        """Return the values for the log and reset. Empty if no step was measured."""
        if not self.steps or self.state is None:
            return {}
        train, every = self.training_s / self.steps, (self.training_s + self.generating_s) / self.steps
        self.training_s, self.generating_s, self.steps = 0.0, 0.0, 0
        return {"time/train": train, "step_time": every, "num_tokens": float(self.state.num_input_tokens_seen)}
