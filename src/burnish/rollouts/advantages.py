"""Compute advantages from rewards: how much better a completion is than the others of its prompt.

Input: the rewards of each completion by each function, NaN if a function does not apply. Output: one number per
completion, and statistics for the log. Computed in float64 on the CPU, so that equal rewards give an advantage of
exactly 0.

Letters: R rewards (C, K), w weights (K,), r = Σ_k w_k R_k over the functions that apply, G completions of a group.
"""

# C completions, K reward functions, P groups (one per prompt)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burnish.rollouts.options import RolloutOptions

_SMALL = 1e-4
"""Added to a standard deviation before dividing, as in TRL."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of a generation batch.

    Args:
        values: (C,) float64; 0 for a completion without a score.
        rewards: (C,) float64, the weighted sum r; NaN for a completion without a score.
        has_variance: (P,) bool, whether the rewards of a group differ. Other groups are not trained on.
        groups: (C,) group of each completion, in [0, P).
        metrics: values for the log: ``reward``, ``reward_std``, ``frac_reward_zero_std``.
    """

    values: Tensor
    rewards: Tensor
    has_variance: Tensor
    groups: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def advantages(
    rewards: Tensor, weights: Sequence[float], groups: Tensor, options: RolloutOptions,
    leave_one_out: bool = False, penalties: Tensor | None = None,
) -> Advantages:  # fmt: skip
    """Compute the advantages of a generation batch.

    Args:
        rewards: (C, K) float64, NaN if a function returned none.
        weights: weights of the K functions.
        groups: (C,) group of each completion; any integers.
        options: how rewards are combined and scaled.
        leave_one_out: use RLOO's advantage, r minus the mean of the other completions of the group.
        penalties: (C,) subtracted from the reward: β times the KL divergence of a completion (RLOO).

    Source: Shao et al. 2024 (GRPO, section 4.1.2), Liu et al. 2026 (GDPO: normalize_then_sum), Ahmadian et al. 2024
        (RLOO, eq. 8), with the constants of TRL 1.16.
    """
    rewards, groups = rewards.double().cpu(), torch.unique(groups.cpu(), return_inverse=True)[1]
    is_scored = ~rewards.isnan().all(1)
    weighted = (rewards * torch.tensor(list(weights), dtype=torch.float64)).nansum(1)
    r = torch.where(is_scored, weighted, torch.nan)
    used = r if not leave_one_out else _penalize(r, penalties, options)
    if leave_one_out:
        values = _leave_one_out(used, groups)
        values = _standardize(values) if options.normalize_advantages else values
    elif options.multi_objective_aggregation == "normalize_then_sum":
        each = torch.stack([_scale_by_group(column, groups).nan_to_num(0.0) for column in rewards.unbind(1)], 1)
        z = (each * torch.tensor(list(weights), dtype=torch.float64)).sum(1)
        values = _standardize(torch.where(is_scored, z, torch.nan))
    else:
        values = _scale(r, groups, options.scale_rewards)
    has_variance = _has_different_values(used, groups)
    deviation = _deviation(r[is_scored])
    metrics = {
        "reward": float(r[is_scored].mean()) if is_scored.any() else float("nan"),
        "reward_std": float(deviation),
        "frac_reward_zero_std": float((~has_variance).double().mean()) if len(has_variance) else 0.0,
    }
    return Advantages(values.nan_to_num(0.0), r, has_variance, groups, metrics)


def _penalize(r: Tensor, penalties: Tensor | None, options: RolloutOptions) -> Tensor:
    if options.reward_clip_range is not None:
        r = r.clamp(*options.reward_clip_range)
    return r if penalties is None else r - penalties.double().cpu()


def _group_sums(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return (P,) sums of the values that are not NaN, and (P,) their counts."""
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    counts = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, (~values.isnan()).double())
    return torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, values.nan_to_num(0.0)), counts


def _center(values: Tensor, groups: Tensor) -> Tensor:
    """Return (C,) values minus the mean of their group, exactly 0 if all values of a group are equal."""
    sums, counts = _group_sums(values, groups)
    centered = values - (sums / counts)[groups]
    return torch.where(_has_different_values(values, groups)[groups] | values.isnan(), centered, 0.0)


def _scale_by_group(values: Tensor, groups: Tensor) -> Tensor:
    centered = _center(values, groups)
    squares, counts = _group_sums(centered.square(), groups)
    return centered / ((squares / (counts - 1).clamp(min=1)).sqrt() + _SMALL)[groups]


def _scale(r: Tensor, groups: Tensor, scale: bool | str) -> Tensor:
    if scale in (True, "group"):
        return _scale_by_group(r, groups)
    centered = _center(r, groups)
    return centered / (_deviation(r[~r.isnan()]) + _SMALL) if scale == "batch" else centered


def _leave_one_out(r: Tensor, groups: Tensor) -> Tensor:
    """Return (C,) r minus the mean of the other scored completions of the group, exactly 0 if there is no other or all
    are equal."""
    sums, counts = _group_sums(r, groups)
    others = (counts - 1)[groups]
    values = r - (sums[groups] - r.nan_to_num(0.0)) / others.clamp(min=1)
    return torch.where(_has_different_values(r, groups)[groups] | r.isnan(), values, 0.0)


def _standardize(values: Tensor) -> Tensor:
    known = values[~values.isnan()]
    return (values - known.mean()) / (_deviation(known) + _SMALL) if len(known) else values


def _deviation(values: Tensor) -> Tensor:
    """Return () the sample standard deviation, 0 for fewer than two values."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _has_different_values(values: Tensor, groups: Tensor) -> Tensor:
    """Return (P,) whether two scored completions of the group differ."""
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    low = torch.full((num_groups,), torch.inf, dtype=torch.float64)
    low = low.scatter_reduce(0, groups, values.nan_to_num(torch.inf), "amin")
    high = torch.full((num_groups,), -torch.inf, dtype=torch.float64)
    high = high.scatter_reduce(0, groups, values.nan_to_num(-torch.inf), "amax")
    return high - low > 1e-8
