"""Load and save the head of a reward model, and the value head of PPO.

The head is read from the folder of the model or its adapters, or newly initialized. It is saved as LLaMA-Factory's
``value_head.safetensors``, or as part of a sequence classifier of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from burnish.config.errors import UserError
from burnish.loop.protocols import Objective, Parallel
from burnish.losses.base import StageObjective
from burnish.losses.reward import BIAS, REWARD_HEADS, RewardHead, RewardObjective, ValueHead
from burnish.models.reward_files import (
    OLD_VALUE_HEAD,
    VALUE_HEAD,
    WEIGHT,
    add_score_to_adapter,
    check_head_width,
    head_folders,
    kind_of_head,
    not_a_reward_model,
    read_head,
    save_classifier,
    write_value_head,
)
from burnish.models.source import adapter_folders
from burnish.rollouts.ppo import PpoObjective
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions


def setup_reward_head(objective: StageObjective, options: RunOptions, parallel: Parallel) -> list[str]:
    """Set the objective's reward head or value head, loaded or new. Returns notes for the user."""
    if isinstance(objective, PpoObjective):
        return _setup_value_head(objective, options)
    if not isinstance(objective, RewardObjective) or not isinstance(objective.head, RewardHead):
        return []
    saved = read_head(head_folders(options, adapter_folders(options)))
    if saved is None and not trains(options):
        folder = (options.adapter_name_or_path or [options.model_name_or_path or ""])[-1]
        remedy = (
            "If it was exported without its head, copy the head's file into its folder, or train it with stage: rm."
        )
        raise UserError(not_a_reward_model(folder, remedy))
    if saved is None:
        _refuse_classifier(objective, options, parallel)
        return ["The reward head is newly initialized: random weights, bias 0."]
    weights, file = saved
    if kind := kind_of_head(file):
        objective.head = REWARD_HEADS[objective.options.reward_head or kind[0]](objective.head.width)
        objective.head.take(weights)
        objective.head_kind = kind[0]
        return [f"The reward head was loaded from {file} ({kind[0]})."]
    check_head_width(weights[WEIGHT].numel(), objective.head.width, str(file))
    objective.is_from_classifier = file.name not in (VALUE_HEAD, OLD_VALUE_HEAD)
    if objective.is_from_classifier and objective.options.reward_head is None and isinstance(objective.head, ValueHead):
        objective.head.summary.register_parameter("bias", None)  # it is saved as a classifier, which has no bias
    objective.head.take(weights)
    _refuse_classifier(objective, options, parallel)
    return [f"The reward head was loaded from {file}."]


def _setup_value_head(objective: PpoObjective, options: RunOptions) -> list[str]:
    """Load the value head saved with the policy (from stage rm or an earlier PPO run), or keep the new one."""
    assert objective.value_head is not None
    saved = read_head(head_folders(options, adapter_folders(options)), accepts_critic=True)
    if saved is None or kind_of_head(saved[1]):
        return ["The value head is newly initialized: random weights, bias 0."]
    check_head_width(saved[0][WEIGHT].numel(), objective.value_head.width, str(saved[1]))
    objective.value_head.take(saved[0])
    return [f"The value head was loaded from {saved[1]}."]


def _refuse_classifier(objective: RewardObjective, options: RunOptions, parallel: Parallel) -> None:
    if parallel.shards_weights and trains(options) and saved_head(objective) == "score":
        what = "A sequence classifier is saved by one process, but the weights are sharded (FSDP, ZeRO-3)."
        raise UserError(what, remedy="Set reward_head: value_head, or use DDP, ZeRO-1 or ZeRO-2.")


def saved_head(objective: RewardObjective) -> str:
    """Return the format in which the head is saved: value_head, score, or the name of a custom head."""
    return (
        objective.options.reward_head
        or objective.head_kind
        or ("score" if objective.is_from_classifier else "value_head")
    )


def save_head(
    objective: Objective, model: nn.Module, tokenizer: Any, folder: Path, *, is_adapter: bool, parallel: Parallel
) -> None:
    """Write the head in the format that matches what was saved in ``folder``. All ranks must call this."""
    if isinstance(objective, PpoObjective) and objective.value_head is not None:
        values = {
            name: parallel.full_tensor(value).detach().cpu() for name, value in objective.value_head.weights().items()
        }
        if parallel.rank == 0:
            write_value_head(folder, values, is_critic=True)
        return
    if not isinstance(objective, RewardObjective) or not isinstance(objective.head, RewardHead):
        return
    weights = {name: parallel.full_tensor(value).detach().cpu() for name, value in objective.head.weights().items()}
    if parallel.rank > 0:
        return
    saved = saved_head(objective)
    if saved not in ("value_head", "score"):
        write_value_head(folder, weights, (saved, objective.head.width))
        return
    has_bias = BIAS in weights and bool(weights[BIAS].any())
    if saved == "value_head" or has_bias:  # a classifier cannot store a bias
        write_value_head(folder, weights)
    elif is_adapter:
        add_score_to_adapter(folder, weights)
    else:
        save_classifier(model, tokenizer, weights, folder)
