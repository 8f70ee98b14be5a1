"""The head of a reward model, between its files and a run.

In: folders of a model and its adapters. Out: the head that training begins with; and after it, LLaMA-Factory's
``value_head.safetensors`` beside the language model or the adapter, or a sequence classifier of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from burnish.app.checks import trains
from burnish.app.options import RunOptions
from burnish.core.errors import Problem, UserError
from burnish.core.types import Engine
from burnish.models.reward_files import (
    OLD_VALUE_HEAD,
    VALUE_HEAD,
    add_score_to_adapter,
    read_head,
    save_classifier,
    write_value_head,
)
from burnish.models.source import adapter_folders, find_source
from burnish.objectives.reward import BIAS, RewardObjective, ValueHead


def begin_head(objective: Any, options: RunOptions, engine: Engine) -> list[str]:
    """Give the objective the head that the run begins with; what a person should know of it."""
    if not isinstance(objective, RewardObjective) or not isinstance(objective.head, ValueHead):
        return []
    if engine.splits_weights:
        what = "stage: rm writes its head as one file, and each process holds a part of it (FSDP, ZeRO-3)."
        raise UserError(Problem(what, remedy="Train on one process, under DDP, or with ZeRO-1 or ZeRO-2."))
    found = read_head(head_folders(options))
    if found is None and not trains(options):
        folder = (options.adapter_name_or_path or [options.model_name_or_path or ""])[-1]
        raise UserError(
            Problem(
                f'{folder} has no {VALUE_HEAD} and no "score" weights: it is not a reward model.',
                remedy="Was it exported without its head? Copy that file beside it, or train with stage: rm.",
            )
        )
    if found is None:
        return ["The reward head is new: random weights, bias 0."]
    weights, file = found
    objective.came_as_score = file.name not in (VALUE_HEAD, OLD_VALUE_HEAD)
    if objective.came_as_score and objective.options.reward_head is None:
        objective.head.summary.register_parameter("bias", None)  # a classifier, as which it is saved again, has none
    objective.head.take(weights)
    return [f"The reward head is that of {file}."]


def head_folders(options: RunOptions) -> list[Path]:
    """List the folders that may hold a reward head, the likeliest last: the model, then its adapters in order."""
    try:
        model = find_source(options.model_name_or_path, options).folder
    except UserError:
        model = None
    return [*([model] if model is not None else []), *adapter_folders(options)]


def save_head(objective: Any, model: nn.Module, tokenizer: Any, folder: Path, is_adapter: bool) -> None:
    """Write the head of what was saved in ``folder``, so that its owner's readers find it."""
    if not isinstance(objective, RewardObjective) or not isinstance(objective.head, ValueHead):
        return
    weights = {name: value.detach().cpu() for name, value in objective.head.weights().items()}
    asked = objective.options.reward_head or ("score" if objective.came_as_score else "value_head")
    has_bias = BIAS in weights and bool(weights[BIAS].any())
    if asked == "value_head" or has_bias:  # a classifier has no place for a bias
        write_value_head(folder, weights)
    elif is_adapter:
        add_score_to_adapter(folder, weights)
    else:
        save_classifier(model, tokenizer, weights, folder)
