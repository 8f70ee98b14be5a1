"""Options of the losses of sampled completions (stages grpo and rloo).

Names, defaults and ranges are those of TRL 1.16's ``GRPOConfig`` and ``RLOOConfig``. Two of its names belong to
a different option of preference learning; ``OPTION_NAMES`` maps them for the stages that train on completions.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.options import option, shared_options

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED_LOSSES, "cispo", "sapo", "vespo")
OPTION_NAMES = {"loss_type": "rl_loss_type", "beta": "rl_beta"}


@shared_options
@dataclass
class ClipFields:
    """Options of stages grpo and rloo, and of TRL's ``GRPOConfig`` and ``RLOOConfig``."""

    epsilon: float = option(
        0.2, "Clip range of the probability ratio: the lower bound is 1 - epsilon.", gt=0, lt=1
    )  # fmt: skip
    epsilon_high: float | None = option(
        None,
        "Upper clip range: the upper bound is 1 + epsilon_high. Default: epsilon. For cispo: the maximum ratio.",
        gt=0,
    )  # fmt: skip


@shared_options
@dataclass
class GrpoLossFields:
    """Options of stage grpo, and of TRL's ``GRPOConfig``."""

    delta: float | None = option(
        None, "Upper bound of the ratio of completions with a negative advantage (two-sided clipping).", gt=1
    )
    importance_sampling_level: str = option(
        "token", "Level of the probability ratio: each token, or the whole completion (GSPO).",
        choices=("token", "sequence"),
    )  # fmt: skip
    sapo_temperature_pos: float = option(1.0, "Temperature of SAPO for positive advantages.", gt=0)
    sapo_temperature_neg: float = option(1.05, "Temperature of SAPO for negative advantages.", gt=0)
    vespo_k_pos: float = option(2.0, "Exponent k of VESPO for advantages of at least 0.", ge=0)
    vespo_lambda_pos: float = option(3.0, "Decay λ of VESPO for advantages of at least 0.", ge=0)
    vespo_k_neg: float = option(3.0, "Exponent k of VESPO for negative advantages.", ge=0)
    vespo_lambda_neg: float = option(2.0, "Decay λ of VESPO for negative advantages.", ge=0)
    use_bias_correction_kl: bool = option(True, "Use the unbiased KL estimator with importance sampling correction.")
    off_policy_mask_threshold: float | None = option(
        None, "Exclude completions with a negative advantage from the policy loss if their mean log-ratio to the "
        "sampling policy exceeds this value.", ge=0,
    )  # fmt: skip
    top_entropy_quantile: float = option(
        1.0, "Fraction of the tokens that contribute to the policy loss: those with the highest entropy.", gt=0, le=1
    )
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus.", ge=0)
    use_adaptive_entropy: bool = option(
        False, "Adapt entropy_coef after each step to keep the entropy at entropy_target."
    )
    entropy_coef_min: float = option(0.0, "Lower bound of an adaptive entropy_coef.", ge=0)
    entropy_coef_max: float = option(1.0, "Upper bound of an adaptive entropy_coef.", ge=0)
    entropy_coef_delta: float = option(0.005, "Amount by which an adaptive entropy_coef changes per step.", gt=0)
    entropy_target: float = option(0.2, "Target entropy per token, used to adapt entropy_coef.", ge=0, unit="nats")


@dataclass
class RolloutLossOptions(GrpoLossFields, ClipFields):
    """Reinforcement learning loss."""

    rl_loss_type: str = option("dapo", "Loss of stage: grpo. TRL's name loss_type is accepted as well.", choices=LOSSES)
    rl_beta: float | None = option(
        None, "Coefficient of the KL divergence from the reference model; beta in TRL. 0: no reference model is "
        "loaded. Default: 0 for grpo, 0.05 for rloo.", ge=0,
    )  # fmt: skip
