"""Convert the reward functions and models of a script to those of the objective."""

from __future__ import annotations

from typing import Any

from torch import nn

from burnish.rollouts.rewards.models import RewardModel, reward_model_of


def reward_list(functions: Any, tokenizers: Any) -> list[Any]:
    """Return a new list of reward functions, with models converted to functions. The given list is not changed.

    Args:
        functions: one or several: callables, sequence classifiers, paths or ids of reward models.
        tokenizers: tokenizers of the models, one per function. Default: those in the models' folders.
    """
    listed = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
    beside = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    beside = [None] * len(listed) if tokenizers is None else beside
    if len(beside) != len(listed):
        raise ValueError(
            f"The number of reward processing classes ({len(beside)}) must match the number of reward functions "
            f"({len(listed)})."
        )
    return [_as_function(one, tokenizer) for one, tokenizer in zip(listed, beside, strict=True)]


def _as_function(function: Any, tokenizer: Any) -> Any:
    if isinstance(function, str):
        function = reward_model_of(function)
        function.tokenizer = tokenizer or function.tokenizer
        return function
    if not isinstance(function, nn.Module):
        return function
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(function.config._name_or_path)  # type: ignore[union-attr]
    return RewardModel(function, tokenizer)
