"""Convert values of ``TrainingArguments`` to their types, and back to plain data.

In: strings, lists, JSON with quoted numbers, enumerations of transformers. Out: typed values for the components, and
data that a file or a tracker can store. Like transformers, refuses a class in place of accelerate's settings.
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

from burnish.config.conversion import DuplicateKeyError, as_type, literal, members, object_without_duplicate_keys
from burnish.config.errors import did_you_mean
from burnish.trainer.arguments.fields import Fields


def convert_numbers(args: Fields) -> None:
    """Convert numbers and booleans to the types of their fields: YAML reads 1e-4 as text, 1e3 steps are 1000, and
    "False" is false, although Python treats a non-empty string as true.

    Raises:
        ValueError: if an integer field has a fraction, or if text is not a number or boolean.
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


CHECKED_ELSEWHERE = {"trackio_static_space_id", "optim", "lr_scheduler_type", "loss_type"}
"""Options that also accept other values, or that a trainer checks itself."""


def refuse_unknown_choices(args: Fields) -> None:
    """Raise ValueError for a value that is not among its option's choices."""
    for name, spec in args.declared.items():
        choices, value = spec.choices or [], getattr(args, name)
        word = value.value if isinstance(value, Enum) else value
        if isinstance(word, str) and choices and word not in choices and name not in CHECKED_ELSEWHERE:
            known = ", ".join(map(str, choices))
            near = did_you_mean(word, [str(choice) for choice in choices])
            raise ValueError(f"`{name}` must be one of {known}. Received: {word!r}.{near}")


def plain_options(args: Any) -> Any:
    """A view of ``args`` in which enumerations are plain strings, for lookups in registries."""
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
    if hasattr(value, "to_dict"):  # a quantization config in model_init_kwargs
        return value.to_dict()
    return value.to_json() if hasattr(value, "to_json") else value


def trackers_of(report_to: Any) -> list[str]:
    """Names of the trackers. Kubeflow's is selected by the platform itself, with an environment variable."""
    names = _requested_trackers(report_to)
    uses_kubeflow = bool(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"))
    return [*names, "kubeflow"] if uses_kubeflow and "kubeflow" not in names else names


def _requested_trackers(report_to: Any) -> list[str]:
    if report_to in ("all", ["all"]):
        from transformers.integrations import get_available_reporting_integrations

        return list(get_available_reporting_integrations())
    if report_to in ("none", ["none"], None):
        return []
    return list(report_to) if isinstance(report_to, list | tuple) else [report_to]


def accelerator_config_of(settings: Any) -> AcceleratorConfig:
    if settings is None:
        return AcceleratorConfig()
    if isinstance(settings, type):
        raise NotImplementedError(f"`accelerator_config` must be an object, not a class. Pass {settings.__name__}().")
    return AcceleratorConfig(**settings) if isinstance(settings, dict) else AcceleratorConfig.from_json_file(settings)


def dictionary_of(name: str, text: str) -> Any:
    """Parse a dictionary from the command line: ``'{"num_cycles": 2}'``.

    Raises:
        ValueError: if it is not JSON, or has a duplicate key.
    """
    try:
        return _with_numbers(json.loads(text, object_pairs_hook=object_without_duplicate_keys))
    except DuplicateKeyError as error:
        raise ValueError(f"`{name}` {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"`{name}` must be a dictionary, or its JSON text: {error}. Received: {text!r}.") from None


def _with_numbers(value: Any) -> Any:
    """Convert quoted numbers and booleans in JSON from a command line."""
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    return literal(value) if isinstance(value, str) else value
