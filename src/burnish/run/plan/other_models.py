"""Check the reference and the reward model of a run before any weights are read. Models that are on the hub and not in
its cache are checked when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from burnish.config.errors import Problem, UserError
from burnish.loop.types import Row
from burnish.models.check import check_model, weight_files
from burnish.models.load import load_config
from burnish.models.options import REFERENCE_MODEL, REWARD_MODEL, ModelOptions
from burnish.models.reward_files import head_of_reward_model, reward_model_folders
from burnish.models.source import find_source
from burnish.rollouts.options import draws_completions
from burnish.rollouts.prompts import prompts_of
from burnish.rollouts.rewards.models import check_conversations, tokenizer_of_reward_model
from burnish.run.plan.options import RunOptions


def check_other_models(options: RunOptions) -> list[Problem]:
    """Return problems of ``ref_model`` and ``reward_model``."""
    try:
        return [*_check_reference(options), *_check_reward_model(options)]
    except UserError as error:
        return list(error.problems)


def check_reward_model_template(options: RunOptions, sets: Iterable[Iterable[Row]]) -> Iterator[Problem]:
    """Yield a problem if ``reward_model`` cannot read completions of the prompts: they have images, or they are
    conversations, and its tokenizer has no chat template that renders them.

    Args:
        sets: rows of prompts.
    """
    if options.reward_model is None or not draws_completions(options.stage):
        return
    rows = list(chain.from_iterable(sets))
    if any(row.get("images") for row in rows):
        remedy = "Use reward functions (reward_funcs), or remove the images."
        yield Problem("Reward models score text, but prompts have images.", remedy=remedy, option="reward_model")
        return
    if options.reward_model_type == "api":
        return
    adapters = options.reward_model_adapters or ()
    try:
        folders = reward_model_folders(options.reward_model, adapters, options, _find_folder)
        tokenizer = tokenizer_of_reward_model(options.reward_model, folders, len(adapters))
    except UserError as error:
        yield from error.problems
        return
    if tokenizer is None:
        return
    yield from check_conversations(tokenizer, Path(options.reward_model).name, prompts_of(rows))


def check_reference_vocabulary(options: RunOptions, config: Any) -> list[Problem]:
    """Return a problem if the vocabulary sizes of ``ref_model`` and the policy differ.

    Args:
        config: config of the policy in transformers' form, with the tokens that the run adds.
    """
    if options.ref_model is None:
        return []
    try:
        reference = load_config(reference_options(options), names=REFERENCE_MODEL).get_text_config().vocab_size
    except UserError as error:
        return list(error.problems)
    policy = config.get_text_config().vocab_size
    return [] if policy == reference else [other_vocabulary(policy, reference)]


def other_vocabulary(policy_size: int, reference_size: int) -> Problem:
    """Return the problem of a reference with another vocabulary size than the policy."""
    what = f"The vocabulary sizes of the reference model ({reference_size}) and the policy ({policy_size}) differ."
    return Problem(what, remedy="Set ref_model to a model with the vocabulary of the policy.", option="ref_model")


def reference_options(options: RunOptions) -> RunOptions:
    """Return the options for loading ``ref_model``."""
    return replace(
        options, model_name_or_path=options.ref_model, adapter_name_or_path=options.ref_model_adapters,
        quantization_bit=options.ref_model_quantization_bit, train_from_scratch=False,
    )  # fmt: skip


def _check_reference(options: RunOptions) -> list[Problem]:
    if options.ref_model is None:
        return []
    for name in options.ref_model_adapters or ():
        find_source(name, options, "ref_model_adapters")
    if find_source(options.ref_model, options, "ref_model").folder is None:
        return []
    problems = check_model(reference_options(options), names=REFERENCE_MODEL)
    return [one if one.option else replace(one, option="ref_model") for one in problems]


def _check_reward_model(options: RunOptions) -> list[Problem]:
    if options.reward_model is None or options.reward_model_type == "api":
        return []
    folders = reward_model_folders(options.reward_model, options.reward_model_adapters or (), options, _find_folder)
    known = [folder for folder in folders if folder is not None]
    if len(known) == len(folders):
        head_of_reward_model(options.reward_model, known)
    try:
        for folder in known[:1]:
            weight_files(folder, REWARD_MODEL)
    except UserError as error:
        return [replace(one, option="reward_model") for one in error.problems]
    return []


def _find_folder(name: str, options: ModelOptions, option_name: str, _: Sequence[str]) -> Path | None:
    """Return the folder of a model; None if it is on the hub and not in its cache."""
    return find_source(name, options, option_name).folder
