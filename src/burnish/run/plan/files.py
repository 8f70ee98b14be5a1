"""The requirements of a run for its records, and a fast check of the files of model and data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from burnish.config.errors import Problem, UserError
from burnish.data.images.options import limits_of
from burnish.data.images.sources import MediaReader
from burnish.data.sets.records import RecordNeeds
from burnish.losses.base import OBJECTIVES
from burnish.models.source import find_source
from burnish.run.plan.options import RunOptions
from burnish.utils.json_files import read_object

_NUM_CHECKED_RECORDS = 1000


ANY_RECORDS = "any"
"""In place of a stage: records of any kind that has prompts."""


def record_needs(options: RunOptions, records_of: str = "") -> RecordNeeds:
    """Return the requirements for the records of a run's datasets.

    Args:
        options: options of the run.
        records_of: stage for whose objective the records are read, or ANY_RECORDS. Default: the stage of the run.
    """
    objective = OBJECTIVES[options.stage]
    if records_of == ANY_RECORDS:
        return RecordNeeds("any", (), options.stage, _media_reader(options, objective.reads_images))
    own = OBJECTIVES[records_of or options.stage]
    return RecordNeeds(
        own.records,
        tuple(own.record_columns),
        records_of or options.stage,
        _media_reader(options, objective.reads_images),
        own.without_pairs,
    )


def _media_reader(options: RunOptions, reads_images: bool) -> MediaReader | None:
    """Return how images are found, or the type of a text-only model; None if the model's files are not readable."""
    if not reads_images:
        return MediaReader(model_type=f"stage {options.stage}")
    try:
        folder = find_source(options.model_name_or_path, options).folder
        config = {} if folder is None else read_object(folder / "config.json")
    except (UserError, OSError):  # reported by the check of the model
        return None
    if config and "vision_config" not in config:
        return MediaReader(model_type=str(config.get("model_type", "the model")))
    folders = [Path(options.media_dir)] if options.media_dir else []
    return limits_of(options, folders)


def problems_in_files(options: RunOptions) -> list[Problem]:
    """Return problems in the files of model and data.

    ``prepare`` finds the same and more. This is a fast check that completes a list of problems, without importing
    transformers or accessing a hub.
    """
    from burnish.data.options import check_data
    from burnish.data.sets.sources import load_datasets
    from burnish.data.stats import DataStats
    from burnish.models.check import check_model

    problems = check_model(options, checks_library=False, needs_head=OBJECTIVES[options.stage].uses_lm_head)
    if any(check_data(options)):  # already reported
        return problems
    try:
        num_records = min(options.max_samples or _NUM_CHECKED_RECORDS, _NUM_CHECKED_RECORDS)
        first_records = replace(options, max_samples=num_records, val_size=0.0)
        load_datasets(first_records, options.seed, DataStats(), searches_hubs=False, needs=record_needs(options))
    except UserError as error:
        problems += error.problems
    return problems
