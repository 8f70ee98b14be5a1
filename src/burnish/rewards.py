"""Built-in reward functions with TRL's names and results: ``from burnish.rewards import accuracy_reward``."""

from burnish.rollouts.rewards.builtin import (
    CosineScaledReward as get_cosine_scaled_reward,
)
from burnish.rollouts.rewards.builtin import (
    JsonSchemaReward as get_json_schema_reward,
)
from burnish.rollouts.rewards.builtin import (
    RepetitionPenaltyReward as get_repetition_penalty_reward,
)
from burnish.rollouts.rewards.builtin import (
    SoftOverlongPunishment as get_soft_overlong_punishment,
)
from burnish.rollouts.rewards.builtin import (
    accuracy_reward,
    contains_answer_reward,
    exact_match_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)

__all__ = [
    "accuracy_reward",
    "contains_answer_reward",
    "exact_match_reward",
    "get_cosine_scaled_reward",
    "get_json_schema_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
