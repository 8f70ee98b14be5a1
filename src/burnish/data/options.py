"""Options of the datasets, and the checks of these options that need no file.

Names and defaults are those of LLaMA-Factory where it has the option.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.data.sets.formats import FORMATS


@dataclass
class DataOptions:
    """Datasets."""

    dataset: list[str] | None = option(
        None, "Datasets to train on: names in dataset_info.json, or paths of files and folders.", names_place=True
    )
    eval_dataset: list[str] | None = option(None, "Datasets to evaluate on.", names_place=True)
    dataset_dir: str | dict[str, Any] = option(
        "data",
        "Folder that contains dataset_info.json; ONLINE for dataset IDs on the Hub; or REMOTE:<Hub repository>.",
        names_place=True,
    )
    formatting: str | None = option(
        None, "Record format of datasets given as paths. Default: detected from their columns.", choices=FORMATS.names
    )
    columns: dict[str, Any] | None = option(
        None, 'Column mapping of datasets given as paths, such as {"prompt": "question", "response": "answer"}.'
    )
    tags: dict[str, Any] | None = option(
        None, "Role names and keys of datasets given as paths, as in dataset_info.json."
    )
    max_samples: int | None = option(None, "Use only the first N records of each dataset.", ge=1, unit="records")
    val_size: float = option(
        0.0, "Validation split: a fraction below 1, or a number of examples.", ge=0, aliases=("dev_ratio",)
    )
    mix_strategy: str = option(
        "concat",
        "How datasets are combined: one after the other (concat), or interleaved until the first is exhausted "
        "(interleave_under), until all are exhausted (interleave_over), or with each example once (interleave_once).",
        choices=("concat", "interleave_under", "interleave_over", "interleave_once"),
    )  # fmt: skip
    interleave_probs: list[float] | None = option(None, "Sampling probability of each interleaved dataset.")
    eval_on_each_dataset: bool = option(False, "Evaluate on each dataset of eval_dataset separately.")
    preprocessing_batch_size: int = option(1000, "Number of records tokenized at a time.", ge=1, unit="records")
    preprocessing_num_workers: int | None = option(
        None,
        "Number of tokenization processes, at most one per core. Default: 1; the tokenizer is multithreaded.",
        ge=1,
    )
    overwrite_cache: bool = option(False, "Ignore cached tokenized examples and tokenize again.")
    tokenized_path: str | None = option(
        None, "Folder for tokenized examples: read if it exists, written otherwise.", names_place=True
    )
    streaming: bool = option(
        False, "Read and tokenize records while training, without a cache. Requires max_steps.",
    )  # fmt: skip
    buffer_size: int = option(
        16384, "Size of the shuffle buffer when streaming.", ge=1,
        unit="records",
    )  # fmt: skip
    on_bad_record: Literal["raise", "drop"] = option(
        "raise",
        "What to do with a record that does not match its format: stop with an error that names it, or drop"
        " and count it.",
    )
    on_empty_target: Literal["drop", "raise", "keep"] = option(
        "drop",
        "What to do with a record whose responses are all empty: drop and count it, stop, or train on the "
        "empty response.",
    )


@check
def check_data(options: DataOptions) -> Iterator[Problem]:
    """Yield the problems with the data options. Reads no file."""
    if not (options.dataset or options.eval_dataset or options.tokenized_path):
        yield Problem(
            '"dataset" is missing.', remedy="Set dataset: <name in dataset_info.json, or a path>", option="dataset"
        )
    yield from _check_val_size(options)
    yield from _check_mix(options)
    yield from _check_names(options)


def _check_names(options: DataOptions) -> list[Problem]:
    """Check that ``columns`` and ``tags`` contain texts."""
    found = [
        (option, part, value)
        for option in ("columns", "tags")
        for part, value in (getattr(options, option) or {}).items()
        if not isinstance(value, str | None)
    ]
    return [
        Problem(f'"{part}" in "{option}" must be a string. Received: {value!r}.', option=option)
        for option, part, value in found
    ]


def _check_val_size(options: DataOptions) -> Iterator[Problem]:
    if not options.val_size:
        return
    if options.eval_dataset:
        remedy = (
            "Use eval_dataset for a separate evaluation dataset, or val_size to hold out part of the training data."
        )
        yield Problem(
            "val_size and eval_dataset cannot be combined.", remedy=remedy, option=("val_size", "eval_dataset")
        )
    elif options.val_size > 1 and options.val_size % 1:  # inf % 1 is NaN, which is true
        yield Problem(
            f"val_size must be a fraction below 1 or an integer number of examples. Received: {options.val_size}.",
            option="val_size",
        )


def _check_mix(options: DataOptions) -> Iterator[Problem]:
    weights = options.interleave_probs
    if weights is None:
        return
    if options.mix_strategy == "concat":
        remedy = "Set mix_strategy: interleave_under, or remove interleave_probs."
        yield Problem(
            "interleave_probs has no effect with mix_strategy: concat.",
            remedy=remedy,
            option=("interleave_probs", "mix_strategy"),
        )
        return
    yield from (
        Problem(
            f"interleave_probs must have one number per dataset in {name}. "
            f"Received: {len(weights)} for {len(sets)} dataset{'s' * (len(sets) != 1)}.",
            option="interleave_probs",
        )
        for name, sets in (("dataset", options.dataset), ("eval_dataset", options.eval_dataset))
        if sets and len(sets) != len(weights)
    )
    if any(weight <= 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        received = f"{', '.join(map(str, weights))} (sum {sum(weights):g})"
        yield Problem(
            f"interleave_probs must be greater than 0 and sum to 1. Received: {received}.", option="interleave_probs"
        )
