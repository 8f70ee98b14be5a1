"""Check the reference and the reward model of a run before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from burnish.config.errors import Problem, UserError
from burnish.models.check import check_model
from burnish.models.options import ModelOptions
from burnish.models.reward_files import head_of_reward_model, reward_model_folders
from burnish.models.source import find_source
from burnish.run.plan.options import RunOptions


def check_other_models(options: RunOptions) -> list[Problem]:
    """Return problems of ``ref_model`` and ``reward_model``. Models that are on the hub and not in its cache are
    checked when they are loaded."""
    try:
        return [*_check_reference(options), *_check_reward_model(options)]
    except UserError as error:
        return list(error.problems)


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
    return check_model(reference_options(options))


def _check_reward_model(options: RunOptions) -> list[Problem]:
    if options.reward_model is None or options.reward_model_type == "api":
        return []
    folders = reward_model_folders(options.reward_model, options.reward_model_adapters or (), options, _find_folder)
    known = [folder for folder in folders if folder is not None]
    if len(known) == len(folders):
        head_of_reward_model(options.reward_model, known)
    return []


def _find_folder(name: str, options: ModelOptions, option_name: str, _: Sequence[str]) -> Path | None:
    """Return the folder of a model; None if it is on the hub and not in its cache."""
    return find_source(name, options, option_name).folder
