"""The formulas of PPO: rewards per token, advantages and returns, the clipped losses, and the KL coefficient.

Letters: S completions, N tokens of completions, concatenated; π log-probability of a token, ρ that of the reference, s
the score of a completion, V the value before a token, A its advantage, R its return, q = exp(π - π_old).

Sources: PPO 1707.06347; GAE 1506.02438; the adaptive coefficient and the clipped value loss 1909.08593. Constants and
the order of normalizations are those of TRL 0.9's ``PPOTrainer``, which LLaMA-Factory 0.9.5 uses. Means are over the
tokens of the step, and normalizations over the tokens of the rollout, on all ranks; theirs are over a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.config.options import option
from burnish.loop.types import Batch, Loss, Metric, Sum

_LEAST_VARIANCE = 1e-8


@dataclass
class PpoLossOptions:
    """Losses and rewards of proximal policy optimization."""

    ppo_target: float = option(6.0, "Target KL divergence (per completion) of the adaptive KL coefficient.", gt=0)
    ppo_horizon: int = option(10000, "Horizon of the adaptive KL controller, in completions.", ge=1, unit="completions")
    ppo_init_kl_coef: float = option(
        0.2, "Initial KL coefficient; it is adapted during training to reach ppo_target.", ge=0
    )
    kl_coef: float | None = option(None, "Fixed coefficient of the KL penalty, instead of an adaptive one.", ge=0)
    ppo_whiten_rewards: bool = option(
        False, "Scale the per-token rewards of a rollout to unit variance.", aliases=("whiten_rewards",)
    )
    ppo_gamma: float = option(1.0, "Discount factor (gamma).", gt=0, le=1, aliases=("gamma",))
    ppo_lam: float = option(0.95, "Lambda of generalized advantage estimation.", ge=0, le=1, aliases=("lam",))
    ppo_cliprange: float = option(0.2, "Clip range of the probability ratio.", gt=0, lt=1, aliases=("cliprange",))
    ppo_cliprange_value: float = option(0.2, "Clip range of the value function.", gt=0, aliases=("cliprange_value",))
    ppo_vf_coef: float = option(0.1, "Weight of the value loss.", ge=0, aliases=("vf_coef",))


class Estimates(NamedTuple):
    """Training targets of the tokens of a rollout; (N,) each, float64."""

    rewards: Tensor  # before normalization
    returns: Tensor
    advantages: Tensor  # normalized over the rollout


def estimates(
    old_logps: Tensor, ref_logps: Tensor, values: Tensor, scores: Tensor, lengths: Tensor, kl_coef: float,
    options: PpoLossOptions,
) -> Estimates:  # fmt: skip
    """Compute rewards, returns and advantages of an entire rollout, that of all ranks.

    The reward of a token is -c (π_old - ρ), plus the score for the last token of a completion. Then, backwards, a_t =
    r_t + γ V_{t+1} - V_t + γ λ a_{t+1} with V = 0 after the end, R = a + V, and A is the normalized a.

    Args:
        old_logps, ref_logps, values: (N,) of the trained tokens, completion after completion.
        scores: (S,). lengths: (S,) number of tokens of each completion, at least 1.
        kl_coef: c.
    """
    old, ref, before = old_logps.double(), ref_logps.double(), values.double()
    rewards = -kl_coef * (old - ref)
    rewards[lengths.cumsum(0) - 1] += scores.double()
    used = whiten(rewards, keep_mean=True) if options.ppo_whiten_rewards else rewards
    gae = _backwards(used, before, lengths, options.ppo_gamma, options.ppo_lam)
    return Estimates(rewards, gae + before, whiten(gae))


def whiten(values: Tensor, keep_mean: bool = False) -> Tensor:
    """Return (N,) ``values`` with variance 1, and with mean 0 or their original mean."""
    mean = values.mean()
    variance = (values - mean).square().sum() / max(len(values) - 1, 1)
    scaled = (values - mean) * (variance + _LEAST_VARIANCE).rsqrt()
    return scaled + mean if keep_mean else scaled


def _backwards(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> Tensor:
    """Return (N,) the sums of generalized advantage estimation, each over the rest of its completion."""
    sizes, found = lengths.tolist(), []
    for row_rewards, row_values in zip(torch.split(rewards, sizes), torch.split(values, sizes), strict=True):
        behind = torch.cat([row_values[1:], row_values.new_zeros(1)])
        deltas = (row_rewards + gamma * behind - row_values).tolist()
        sums, later = [0.0] * len(deltas), 0.0
        for place in reversed(range(len(deltas))):
            sums[place] = later = deltas[place] + gamma * lam * later
        found.append(rewards.new_tensor(sums))
    return torch.cat(found)


def ppo_loss(logps: Tensor, values: Tensor, batch: Batch, options: PpoLossOptions) -> Loss:
    """Return the part of a micro-batch in the loss of its step, as a sum over its tokens.

    Args:
        logps: (N,) of the policy, in nats, with gradient. values: (N,) of the value head, with gradient.
        batch: with ``token_mask``, ``token_weights``, ``old_logps``, ``old_values``, ``token_advantages`` and
            ``returns``, (N,) each.
    """
    mask, advantage = batch["token_mask"], batch["token_advantages"].to(logps.dtype)
    ratio = (logps - batch["old_logps"]).exp()
    clipped_ratio = ratio.clamp(1 - options.ppo_cliprange, 1 + options.ppo_cliprange)
    plain, clipped = -advantage * ratio, -advantage * clipped_ratio
    policy = torch.maximum(plain, clipped)
    old_values, returns = batch["old_values"].to(values.dtype), batch["returns"].to(values.dtype)
    reach = options.ppo_cliprange_value
    near = torch.minimum(torch.maximum(values, old_values - reach), old_values + reach)
    far_error, near_error = (values - returns).square(), (near - returns).square()
    value = 0.5 * torch.maximum(far_error, near_error)
    total = ((policy + options.ppo_vf_coef * value) * batch["token_weights"]).sum()
    metrics: dict[str, Metric] = {
        "ppo/policy_loss": _mean(policy, mask),
        "ppo/value_loss": _mean(value, mask),
        "ppo/clipfrac": _mean((clipped > plain).float(), mask),
        "ppo/value_clipfrac": _mean((near_error > far_error).float(), mask),
    }
    return Loss(total, metrics)


def _mean(values: Tensor, mask: Tensor) -> Sum:
    return Sum((values.detach() * mask).sum(), mask.sum())


@dataclass
class KlController:
    """The coefficient c of the KL term. Part of a checkpoint.

    Unless it is fixed, c ← c (1 + clip(KL / target - 1, ±0.2) B / horizon) after each rollout of B completions
    (1909.08593, section 2.2).
    """

    options: PpoLossOptions
    coefficient: float = field(init=False)

    def __post_init__(self) -> None:
        fixed = self.options.kl_coef
        self.coefficient = self.options.ppo_init_kl_coef if fixed is None else fixed

    def update(self, kl: float, num_completions: int) -> None:
        """Update the coefficient; not from a NaN or infinite KL, as of a rollout whose steps are skipped.

        Args:
            kl: mean over the completions of Σ (π_old - ρ), in nats.
        """
        if self.options.kl_coef is not None or not math.isfinite(kl):
            return
        error = min(max(kl / self.options.ppo_target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_completions / self.options.ppo_horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient = state["coefficient"]


class ScoreMoments:
    """Mean and standard deviation of all scores so far, for ``ppo_score_norm``. Part of a checkpoint.

    The moments of two sets of values are merged as in Chan, Golub and LeVeque 1979.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def normalize(self, scores: Tensor) -> Tensor:
        """Add the scores of a rollout and return (S,) the normalized scores, float64."""
        count, mean = len(scores), float(scores.mean())
        both, step = self.count + count, mean - self.mean
        self.squares += float((scores - mean).square().sum()) + step * step * self.count * count / both
        self.mean += step * count / both
        self.count = both
        deviation = (self.squares / max(both - 1, 1)) ** 0.5
        normalized_scores: Tensor = (scores - self.mean) / (deviation + torch.finfo(torch.float32).eps)
        return normalized_scores

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
