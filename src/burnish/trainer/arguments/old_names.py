"""Earlier names of ``TrainingArguments`` that scripts still use. Each is replaced with the current name, with one
warning.

In: the keyword arguments of a call. Out: the same under current names. Unknown names are kept, so that the constructor
refuses them as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.run.plan.unsupported import REMOVED_OPTIONS
from burnish.trainer import notes

Arguments = dict[str, Any]

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "kept_seats": "max_concurrent_completions",
}
"""Earlier name -> current name."""

WITHOUT_EFFECT = {**REMOVED_OPTIONS, "push_to_hub_organization": "set the organization in hub_model_id."}
"""Earlier name -> the reason why it has no effect."""

FLAGS = {current: [f"--{old}" for old in RENAMED if RENAMED[old] == current] for current in RENAMED.values()}
"""Current name -> the command-line flags of earlier versions with the same meaning."""


def value_by_old_name(args: Any, name: str) -> Any:
    """The value of an argument under an earlier name.

    Raises:
        AttributeError: if there never was such a name.
    """
    if name in RENAMED:
        return getattr(args, RENAMED[name])
    if name in WITHOUT_EFFECT:
        return None
    raise AttributeError(f"{type(args).__name__!r} object has no attribute {name!r}")


def current_names(kwargs: Arguments) -> Arguments:
    """Return the arguments under current names, with a warning for each earlier name."""
    arguments = dict(kwargs)
    for name in list(arguments):
        if name in RENAMED:
            _warn(f"`{name}` is deprecated. Use `{RENAMED[name]}` instead.")
            arguments.setdefault(RENAMED[name], arguments.pop(name))
        elif name in WITHOUT_EFFECT:
            if arguments.pop(name):
                _warn(f"`{name}` has no effect: {WITHOUT_EFFECT[name]}")
        elif name == "warmup_ratio" and (value := arguments.pop(name)):
            _warn(f"`{name}` is deprecated. Use {_warmup_ratio(value, arguments)} instead.")
        elif name in _MEANING and (value := arguments.pop(name)):
            current, value_of, notation = _MEANING[name]
            arguments[current] = value_of(value, arguments.get(current))
            _warn(f"`{name}` is deprecated. Use {notation} instead.")
    return arguments


def _warn(message: str) -> None:
    notes.warn(message, FutureWarning)


def _warmup_ratio(value: float, arguments: Arguments) -> str:
    if not 0 <= value <= 1:  # as `warmup_steps` it would be a count
        raise ValueError(f"`warmup_ratio` must be in [0, 1]. Received: {value}.")
    if value == 1 and not arguments.get("warmup_steps"):  # `warmup_steps=1` would be one step
        arguments["warmup_ratio"] = value
        return "`warmup_steps` with a number below 1 or the total number of steps (used in this run)"
    arguments["warmup_steps"] = arguments.get("warmup_steps") or value
    return "`warmup_steps` with a number below 1"


_MEANING: dict[str, tuple[str, Callable[[Any, Any], Any], str]] = {
    "group_by_length": (
        "train_sampling_strategy", lambda value, now: "group_by_length", '`train_sampling_strategy="group_by_length"`'
    ),
    "include_inputs_for_metrics": (
        "include_for_metrics", lambda value, now: [*(now or []), "inputs"], '`include_for_metrics=["inputs"]`'
    ),
    "include_tokens_per_second": (
        "include_num_input_tokens_seen", lambda value, now: True if now is None else now,
        "`include_num_input_tokens_seen`",
    ),
    "adafactor": ("optim", lambda value, now: "adafactor", '`optim="adafactor"`'),
    "logging_dir": (
        "logging_dir", lambda value, now: value,
        "the environment variable TENSORBOARD_LOGGING_DIR",
    ),
}  # fmt: skip
"""Earlier name -> current name, (earlier value, value under the current name) -> current value, and the current
notation."""
