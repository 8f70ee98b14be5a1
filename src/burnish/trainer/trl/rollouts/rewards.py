"""Convert the reward functions and models of a script to those of the objective."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from burnish.config.errors import UserError, did_you_mean, first_line
from burnish.rollouts.rewards.builtin import FACTORIES, FUNCTIONS
from burnish.rollouts.rewards.models import RewardModel, reward_model_of


def reward_list(functions: Any, tokenizers: Any) -> list[Any]:
    """Return a new list of reward functions, with models converted to functions. The given list is not changed.

    Args:
        functions: one or several: callables, names of functions of ``burnish.rewards``, sequence classifiers, paths or
            ids of reward models.
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
    if isinstance(function, str | os.PathLike):
        return _of_name(os.fspath(function), tokenizer)
    if not isinstance(function, nn.Module) or getattr(function, "config", None) is None:
        return function  # also a module of a script that returns rewards
    return RewardModel(function, tokenizer or _tokenizer_of(function))


def _of_name(name: str, tokenizer: Any) -> Any:
    """The built-in reward function of that name, or a reward model, if there is such a folder or model."""
    if not os.path.isdir(name):
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in FACTORIES:
            creator = f"get_{name.removeprefix('get_')}"
            what = f'The reward function "{name}" has to be created with its arguments. Received: its name.'
            raise UserError(what, remedy=f"Pass burnish.rewards.{creator}(...).", option="reward_funcs")
    try:
        function = reward_model_of(name)
    except UserError as error:
        if os.path.isdir(name):
            raise
        what = f"{error.problems[0].what}{did_you_mean(name, FUNCTIONS)}"
        remedy = (
            "Pass a function, the name of a function of burnish.rewards, or the folder or Hub ID of a reward model."
        )
        raise UserError(what, remedy=remedy, option="reward_funcs") from error
    function.tokenizer = tokenizer or function.tokenizer
    return function


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    name = str(getattr(model.config, "_name_or_path", "") or "")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = f"No tokenizer can be loaded for the reward model {type(model).__name__} from {name!r}."
        remedy = "Pass it in `reward_processing_classes`."
        raise UserError(what, why=first_line(error), remedy=remedy, option="reward_processing_classes") from error
