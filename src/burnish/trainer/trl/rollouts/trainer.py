"""``GRPOTrainer`` and ``RLOOTrainer``, with the constructors and behavior of TRL's classes. The base class is in
``base.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.losses.rollouts.loss import linear_quantile, vespo_factors
from burnish.rollouts.objective import LeaveOneOutObjective, RolloutObjective
from burnish.trainer.trl.base import argument
from burnish.trainer.trl.rollouts.base import RolloutTrainer
from burnish.trainer.trl.rollouts.config import GRPOConfig, RLOOConfig


class GRPOTrainer(RolloutTrainer):
    """Train on completions that the model generates, each compared with the others of its prompt (GRPO and
    variants)."""

    args: GRPOConfig
    config_class = GRPOConfig
    objective_class = RolloutObjective
    _uncalled = RolloutTrainer._uncalled | {
        "get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask"
    }  # fmt: skip
    tag = "grpo"
    importance_sampling_level = argument()
    loss_type = argument()
    off_policy_mask_threshold = argument()
    scale_rewards = argument()
    top_entropy_quantile = argument()
    entropy_coef = argument()
    use_adaptive_entropy = argument()
    multi_objective_aggregation = argument()
    vllm_importance_sampling_correction = False
    """Read by a script's copy of TRL's ``_compute_loss``: completions are always those of the trained model."""

    @property
    def _entropy_bonus_enabled(self) -> bool:
        return self.objective.token_loss.has_bonus

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Return (S, T) bool, true for the tokens of ``mask`` (S, T) whose entropy is at least the quantile
        ``threshold`` of all ranks' tokens. For a script's copy of TRL's ``_compute_loss``.

        Args:
            entropies: (S, T) in nats. threshold: in [0, 1].
        """
        own = entropies[mask.bool()].float()
        every = self.accelerator.gather(self.accelerator.pad_across_processes(own, dim=0, pad_index=-1))
        every = every[every >= 0]  # an entropy is never negative; padding is
        least = linear_quantile(every, threshold) if len(every) else 0.0
        is_high: Tensor = (entropies >= least) & mask.bool()
        return is_high

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor, per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:  # fmt: skip
        """Return (S, 1), 0 for a completion with A < 0 whose mean log-ratio of the sampling distribution to the policy
        is above the threshold, else 1. For a script's copy of TRL's ``_compute_loss``.

        Args:
            advantages: (S, 1). The log-probabilities and ``mask``: (S, T); NaN counts as a ratio of 1.
        """
        away = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(0.0) * mask
        mean = away.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return ((advantages >= 0) | (mean <= off_policy_threshold)).to(mask.dtype)

    @staticmethod
    def get_gamma_weights(
        advantages: Tensor, log_ratio_per_token: Tensor, mask: Tensor, importance_sampling_ratio: Tensor | None = None,
        k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0,
    ) -> Tensor:  # fmt: skip
        """Return (S, 1) the factors of VESPO, without gradient. For a script's copy of TRL's ``_compute_loss``.

        Args:
            advantages: (S, 1). ``log_ratio_per_token``, ``mask`` and ``importance_sampling_ratio``: (S, T).
        """
        sums = (log_ratio_per_token.detach().clamp(-20, 20) * mask).sum(1, keepdim=True)
        if importance_sampling_ratio is not None:
            sums = sums + importance_sampling_ratio.log().clamp(math.log(1e-8), 20).sum(1, keepdim=True)
        k, decay = (torch.where(advantages >= 0, *both) for both in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
        return vespo_factors(sums, k, decay)

    @property
    def loss_is_scaled_for_ga(self) -> bool:  # type: ignore[override]
        """Whether ``compute_loss`` is overridden: it then divides by the number of micro-batches itself, as in TRL."""
        return self._is_scripted

    @property
    def _num_averaged_losses(self) -> int:  # type: ignore[override]
        return self._parallel.world_size


class RLOOTrainer(RolloutTrainer):
    """Train on completions that the model generates, each compared with the mean of the others (RLOO)."""

    args: RLOOConfig
    config_class = RLOOConfig
    objective_class = LeaveOneOutObjective
    tag = "rloo"

    normalize_advantages = argument()
    reward_clip_range = argument()
