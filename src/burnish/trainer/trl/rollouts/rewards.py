"""Convert the reward functions and models of a script to those of the objective."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from burnish.config.errors import UserError, did_you_mean, first_line
from burnish.config.options import raise_if
from burnish.models.options import ModelOptions
from burnish.models.reward_files import reward_model_folders
from burnish.rollouts.rewards.builtin import FACTORIES, FUNCTIONS
from burnish.rollouts.rewards.models import (
    RewardModel,
    check_conversations,
    reward_model_of,
    tokenizer_of_reward_model,
)
from burnish.trainer.trl.rollouts.prompts import first_conversation
from burnish.trainer.trl.sft.setup import model_id


def reward_list(functions: Any, tokenizers: Any) -> list[Any]:
    """Return a new list of reward functions, with models converted to functions. The given list is not changed.

    Args:
        functions: one or several: callables, names of functions of ``burnish.rewards``, sequence classifiers, paths or
            ids of reward models.
        tokenizers: tokenizers of the models, one per function. Default: those in the models' folders.
    """
    return [_as_function(one, tokenizer) for one, tokenizer in _with_tokenizers(functions, tokenizers)]


def check_reward_models(functions: Any, tokenizers: Any, datasets: Iterable[Any]) -> None:
    """Raise UserError if a reward model cannot read completions of the prompts of ``datasets``: they are conversations,
    and its tokenizer has no chat template that renders them. Reads no weights. Models that have to be downloaded are
    not checked. The arguments are those of ``reward_list``.
    """
    readers = [_tokenizer_by_name(one, tokenizer) for one, tokenizer in _with_tokenizers(functions, tokenizers)]
    if not (known := [reader for reader in readers if reader is not None]):
        return
    prompts = [prompt for dataset in datasets if (prompt := first_conversation(dataset)) is not None]
    remedy = "Save its tokenizer with a chat template, or pass a tokenizer with one in `reward_processing_classes`."
    raise_if(problem for name, tokenizer in known for problem in check_conversations(tokenizer, name, prompts, remedy))


def _tokenizer_by_name(function: Any, tokenizer: Any) -> tuple[str, Any] | None:
    """Return name and tokenizer of a reward model. None for a function, or a model that has to be downloaded."""
    if isinstance(function, RewardModel):
        return function.__name__, function.tokenizer
    if _is_model(function):
        return Path(model_id(function)).name, tokenizer or _tokenizer_of(function)
    if not isinstance(function, str | os.PathLike) or not os.path.isdir(function):
        return None
    name = os.fspath(function)
    if tokenizer is None:
        tokenizer = tokenizer_of_reward_model(name, reward_model_folders(name, (), ModelOptions()), 0)
    return Path(name).name, tokenizer


def _with_tokenizers(functions: Any, tokenizers: Any) -> list[tuple[Any, Any]]:
    """Return each reward function with its tokenizer or None. The arguments are those of ``reward_list``."""
    listed = [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
    if tokenizers is None:
        tokenizers = [None] * len(listed)
    tokenizers = tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers]
    if len(tokenizers) != len(listed):
        raise ValueError(
            f"The number of reward processing classes ({len(tokenizers)}) must match the number of reward functions "
            f"({len(listed)})."
        )
    return list(zip(listed, tokenizers, strict=True))


def _is_model(function: Any) -> bool:
    """Return whether this is a model of transformers, rather than a module of a script that returns rewards."""
    return isinstance(function, nn.Module) and getattr(function, "config", None) is not None


def _as_function(function: Any, tokenizer: Any) -> Any:
    if isinstance(function, str | os.PathLike):
        return _of_name(os.fspath(function), tokenizer)
    return RewardModel(function, tokenizer or _tokenizer_of(function)) if _is_model(function) else function


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
    name = str(getattr(model.config, "_name_or_path", "") or "")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = f"No tokenizer can be loaded for the reward model {type(model).__name__} from {name!r}."
        remedy = "Pass it in `reward_processing_classes`."
        raise UserError(what, why=first_line(error), remedy=remedy, option="reward_processing_classes") from error
