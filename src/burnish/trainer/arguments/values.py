"""Values of ``TrainingArguments``: converted from what is given to typed values, and back to plain data.

In: names, lists, JSON with quoted numbers, enumerations of transformers. Out: values for the components, and data that
a file or a tracker can store. Refuses, as transformers does, a class in the place of accelerate's settings.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_pt_utils import AcceleratorConfig

from burnish.config.conversion import GivenTwice, as_type, each_key_once, literal, members
from burnish.config.errors import did_you_mean
from burnish.trainer.arguments.fields import Fields


def take_numbers(args: Fields) -> None:
    """Convert numbers and truth values to the types of their fields: YAML gives 1e-4 as a text, 1e3 steps are a
    thousand, and "False" is false, though Python takes each text for true.

    Raises:
        ValueError: where an integer field was given a fraction, or a text is no number, or neither true nor false.
    """
    for name, spec in args.declared.items():
        value, kinds = getattr(args, name), members(spec.type)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not {int, float, bool} & set(kinds) or not (is_number or (isinstance(value, str) and str not in kinds)):
            continue
        try:
            setattr(args, name, as_type(spec.type, value))
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None


HELD_ELSEWHERE = {
    "trackio_static_space_id", "optim", "lr_scheduler_type", "packing_strategy", "loss_type", "truncation_mode",
}  # fmt: skip
"""Options whose values are not all words, or that a trainer holds against its choices in TRL's own sentences."""


def refuse_other_words(args: Fields) -> None:
    """Raise ValueError for a word that is none of its option's choices, which would be read as another one later."""
    for name, spec in args.declared.items():
        choices, value = spec.choices or [], getattr(args, name)
        word = value.value if isinstance(value, Enum) else value
        if isinstance(word, str) and choices and word not in choices and name not in HELD_ELSEWHERE:
            known = ", ".join(map(str, choices))
            near = did_you_mean(word, [str(choice) for choice in choices])
            raise ValueError(f"`{name}` must be one of {known}. Received: {word!r}.{near}")


def plain_options(args: Any) -> Any:
    """A view of ``args`` in which enumerations are plain strings, for look-ups in registries."""
    view = copy.copy(args)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, Enum):
            setattr(view, field.name, value.value)
    return view


def plain(value: Any) -> Any:
    """Convert a value to JSON data."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, AcceleratorConfig):
        return value.to_dict()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if hasattr(value, "to_dict"):  # a quantization config among model_init_kwargs
        return value.to_dict()
    return value.to_json() if hasattr(value, "to_json") else value


def trackers_of(report_to: Any) -> list[str]:
    """The trackers by name. Kubeflow's is chosen by the platform itself, with an environment variable."""
    names = _asked_trackers(report_to)
    asks = bool(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"))
    return [*names, "kubeflow"] if asks and "kubeflow" not in names else names


def _asked_trackers(report_to: Any) -> list[str]:
    if report_to in ("all", ["all"]):
        from transformers.integrations import get_available_reporting_integrations

        return list(get_available_reporting_integrations())
    if report_to in ("none", ["none"]):
        return []
    return list(report_to) if isinstance(report_to, list) else [report_to]


def accelerator_config_of(given: Any) -> AcceleratorConfig:
    if given is None:
        return AcceleratorConfig()
    if isinstance(given, type):
        raise NotImplementedError(
            "Tried passing in a callable to `accelerator_config`, but this is not supported. "
            f"Pass an object: {given.__name__}()."
        )
    return AcceleratorConfig(**given) if isinstance(given, dict) else AcceleratorConfig.from_json_file(given)


def dictionary_of(name: str, text: str) -> Any:
    """Parse a dictionary from the command line: ``'{"num_cycles": 2}'``.

    Raises:
        ValueError: where it is no JSON, or gives a key twice.
    """
    try:
        return _with_numbers(json.loads(text, object_pairs_hook=each_key_once))
    except GivenTwice as error:
        raise ValueError(f"`{name}` {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` must be a dictionary, as JSON: {error}. Received: {text!r}.") from None


def _with_numbers(value: Any) -> Any:
    """Convert quoted numbers and booleans in JSON, as command lines give them."""
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    return literal(value) if isinstance(value, str) else value
