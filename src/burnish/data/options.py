"""Options of the data, and the checks of them that need no file.

Names and defaults are LLaMA-Factory's, where it has the option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.data.sets.formats import FORMATS


@dataclass
class DataOptions:
    """Data."""

    dataset: list[str] | None = option(
        None, "Data sets to train on: names in dataset_info.json, or paths of files and folders.", names_place=True
    )
    eval_dataset: list[str] | None = option(None, "Data sets to evaluate on.", names_place=True)
    dataset_dir: str | dict[str, Any] = option(
        "data",
        "The folder of dataset_info.json; or ONLINE, where names are hub ids, or REMOTE:<hub repository>.",
        names_place=True,
    )
    formatting: str | None = option(
        None, "The format of data sets given as paths; recognised from their columns by default.", choices=FORMATS.names
    )
    columns: dict[str, Any] | None = option(
        None, 'Which column is which, for data sets given as paths: {"prompt": "question", "response": "answer"}.'
    )
    tags: dict[str, Any] | None = option(None, "What roles and keys are called in them, as in dataset_info.json.")
    max_samples: int | None = option(None, "The first so many records of each data set.", ge=1, unit="records")
    val_size: float = option(0.0, "Held out for evaluation: a share below 1, or a number of rows.", ge=0)
    mix_strategy: str = option(
        "concat", "How several data sets become one: one after the other, or interleaved until the first is used up "
        "(under), all are (over), each row once (once).",
        choices=("concat", "interleave_under", "interleave_over", "interleave_once"),
    )  # fmt: skip
    interleave_probs: list[float] | None = option(None, "How often each of the interleaved data sets is drawn from.")
    eval_on_each_dataset: bool = option(False, "Evaluate on each data set of eval_dataset by itself.")
    preprocessing_batch_size: int = option(1000, "Records that are encoded together.", ge=1, unit="records")
    preprocessing_num_workers: int | None = option(
        None, "Processes that encode, at most one per core; one by default, as the tokenizer has threads.", ge=1
    )
    overwrite_cache: bool = option(False, "Encode again what is in the cache.")
    tokenized_path: str | None = option(
        None, "A folder for the encoded rows: written if it is not there, read if it is.", names_place=True
    )
    streaming: bool = option(
        False, "Leave the records where they are, read them one by one, encode them when they are wanted, and keep no "
        "encoded rows; needs max_steps.",
    )  # fmt: skip
    buffer_size: int = option(
        16384, "Records that are shuffled among each other when streaming: so many that lie together.", ge=1,
        unit="records",
    )  # fmt: skip
    on_bad_record: Literal["raise", "drop"] = option(
        "raise", "A record that breaks its format: stop and name it, or drop and count it."
    )
    on_empty_target: Literal["drop", "raise", "keep"] = option(
        "drop", "A record whose answers are all empty: drop and count it, stop, or learn to say nothing."
    )


@check
def check_data(options: DataOptions) -> list[Problem]:
    """Find what is wrong with the options without reading a file."""
    problems = []
    if not (options.dataset or options.eval_dataset or options.tokenized_path):
        problems.append(
            Problem(
                '"dataset" is missing.',
                remedy="Name one: dataset: <name in dataset_info.json, or a path>",
                option="dataset",
            )
        )
    return problems + _check_val_size(options) + _check_mix(options)


def _check_val_size(options: DataOptions) -> list[Problem]:
    if not options.val_size:
        return []
    if options.eval_dataset:
        remedy = "Keep one: eval_dataset to evaluate on a set of its own, val_size to hold out a part of dataset."
        return [
            Problem("val_size and eval_dataset are both given.", remedy=remedy, option=("val_size", "eval_dataset"))
        ]
    if options.val_size > 1 and options.val_size != int(options.val_size):
        return [
            Problem(
                f"val_size must be a share below 1 or a whole number of rows. Received: {options.val_size}.",
                option="val_size",
            )
        ]
    return []


def _check_mix(options: DataOptions) -> list[Problem]:
    weights = options.interleave_probs
    if weights is None:
        return []
    if options.mix_strategy == "concat":
        remedy = "Set mix_strategy: interleave_under, or leave interleave_probs out."
        return [
            Problem(
                "interleave_probs is given, and mix_strategy is concat, which draws nothing.",
                remedy=remedy,
                option=("interleave_probs", "mix_strategy"),
            )
        ]
    problems = [
        Problem(
            f"interleave_probs must have a number for each set in {name}. Received: {len(weights)} for {len(sets)}.",
            option="interleave_probs",
        )
        for name, sets in (("dataset", options.dataset), ("eval_dataset", options.eval_dataset))
        if sets and len(sets) != len(weights)
    ]
    if any(weight <= 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        received = f"{', '.join(map(str, weights))}, which add up to {sum(weights):g}"
        problems.append(
            Problem(
                f"interleave_probs must be greater than 0 and add up to 1. Received: {received}.",
                option="interleave_probs",
            )
        )
    return problems
