"""Arguments of TRL's trainers in earlier versions: constructor arguments that are fields of the config today, and old
fields that a script sets on a config.

In: the arguments of a constructor. Out: the config and the processing class, after one warning for all old names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from burnish.config.errors import did_you_mean
from burnish.trainer import notes
from burnish.trainer.arguments.old_names import RENAMED
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.trl.sft.setup import resolve_config

Config = TypeVar("Config", bound=TrlArguments)

_RENAMED_ARGUMENTS = {
    "config": "args", "policy": "model", "reward_model": "reward_funcs",
    "reward_processing_class": "reward_processing_classes",
}  # fmt: skip
"""Argument of a constructor in earlier versions of TRL -> current argument."""

_OF_TRAINING_ARGUMENTS = frozenset({"neftune_noise_alpha"})
"""Fields of ``TrainingArguments`` that constructors of TRL accepted."""


def resolve_arguments(
    kind: type, config_class: type[Config], args: Any, model: Any, processing_class: Any, old: Mapping[str, Any]
) -> tuple[Config, Any]:
    """The config of a trainer and its processing class.

    Args:
        kind: class of the trainer. config_class: class of its arguments.
        args, model, processing_class: as passed to the constructor.
        old: further arguments of the constructor. None as a value means the default.

    Raises:
        TypeError: for an unknown argument.
        ValueError: for an old argument without a current equivalent.
    """
    assigned = _old_attributes(args) if isinstance(args, config_class) else {}
    values: dict[str, Any] = {}
    advice: dict[str, str] = {}
    for name, value in {**assigned, **old}.items():
        field = config_class.renamed.get(name, name)
        if name == "tokenizer":
            advice[name] = "use processing_class="
            processing_class = value if processing_class is None else processing_class
        elif name in config_class.without_effect:
            advice[name] = f"no effect: {config_class.without_effect[name].rstrip('.')}"
        elif name in config_class.refused:
            if value is not None and value is not False:
                raise ValueError(f"`{name}` was removed from {kind.__name__}. {config_class.refused[name]}")
        elif _was_argument(field, config_class):
            advice[name] = f"use {config_class.__name__}({field}=...)"
            if value is not None:
                values[field] = value
        else:
            raise unexpected_argument(name, kind, config_class)
    if advice:
        names = ", ".join(f"`{name}` ({what})" for name, what in advice.items())
        notes.warn(f"Deprecated arguments of {kind.__name__}: {names}.", FutureWarning)
    return resolve_config(config_class, args, model, values), processing_class


def _old_attributes(args: TrlArguments) -> dict[str, Any]:
    """Old names that a script set on a config: name -> value."""
    kind = type(args)
    old = {*kind.renamed, *kind.without_effect, *kind.refused} - kind.__dataclass_fields__.keys()
    return {name: value for name, value in vars(args).items() if name in old}


def _was_argument(field: str, config_class: type[TrlArguments]) -> bool:
    own = config_class.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
    return field in own or field in _OF_TRAINING_ARGUMENTS


def unexpected_argument(name: str, kind: type, config_class: type) -> TypeError:
    """The error for an unknown argument of a constructor, which says where it belongs.

    Args:
        name: the argument. kind: class of the trainer. config_class: class of its arguments.
    """
    field, arguments = RENAMED.get(name, name), inspect.signature(kind).parameters
    renamed = _RENAMED_ARGUMENTS.get(name)
    if field in inspect.signature(config_class).parameters:
        where = f" Use {config_class.__name__}({field}=...)."
    else:
        where = f" Use `{renamed}`." if renamed in arguments else did_you_mean(name, arguments)
    return TypeError(f"{kind.__name__}.__init__() got an unexpected keyword argument {name!r}.{where}")
