"""``GRPOTrainer`` and ``RLOOTrainer``, with the constructors and behavior of TRL's classes. The base class is in
``base.py``."""

from __future__ import annotations

from torch import Tensor

from burnish.losses.rollouts.loss import linear_quantile
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
    _uncalled = RolloutTrainer._uncalled | {"get_high_entropy_mask"}
    tag = "grpo"
    importance_sampling_level = argument(GRPOConfig, lambda args: args.importance_sampling_level)
    loss_type = argument(GRPOConfig, lambda args: args.loss_type)
    off_policy_mask_threshold = argument(GRPOConfig, lambda args: args.off_policy_mask_threshold)
    scale_rewards = argument(GRPOConfig, lambda args: args.scale_rewards)
    top_entropy_quantile = argument(GRPOConfig, lambda args: args.top_entropy_quantile)
    entropy_coef = argument(GRPOConfig, lambda args: args.entropy_coef)
    use_adaptive_entropy = argument(GRPOConfig, lambda args: args.use_adaptive_entropy)
    multi_objective_aggregation = argument(GRPOConfig, lambda args: args.multi_objective_aggregation)
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

    normalize_advantages = argument(RLOOConfig, lambda args: args.normalize_advantages)
    reward_clip_range = argument(RLOOConfig, lambda args: args.reward_clip_range)
