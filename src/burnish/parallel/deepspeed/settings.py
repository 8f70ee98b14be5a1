"""DeepSpeed's settings: the user's own JSON or the name of a preset, with every "auto" filled in.

In: ``deepspeed`` (a file, an object, or zero0 ... zero3, zero2_offload, zero3_offload), or the environment variables of
``accelerate launch``; the options of the run. Out: the settings for DeepSpeed; notes; problems, if a file contradicts
the options, or enables a feature that burnish implements itself and that would change results.

"auto" is filled in as in transformers (transformers 5.23, ``HfTrainerDeepSpeedConfig``): from the corresponding
arguments, and bucket sizes from the model's hidden size. Keys: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import Problem, did_you_mean
from burnish.parallel.accelerate_launch import mixed_precision
from burnish.parallel.options import DEEPSPEED_NAMES, ParallelChoices
from burnish.utils.json_files import json_beside, read_settings

AUTO = "auto"
_DUPLICATED_OPTIONS: dict[str, tuple[str, Callable[[ParallelChoices], Any]]] = {
    "train_micro_batch_size_per_gpu": (
        "per_device_train_batch_size", lambda options: options.per_device_train_batch_size
    ),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda options: options.gradient_accumulation_steps),
    "gradient_clipping": ("max_grad_norm", lambda options: options.max_grad_norm),
    "bf16": ("bf16", lambda options: options.pure_bf16 or mixed_precision(options) == "bf16"),
    "fp16": ("fp16", lambda options: mixed_precision(options) == "fp16"),
}  # fmt: skip
"""Key -> the option with the same meaning, and its value."""
_ALLOWED_KEYS = {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "train_batch_size",
    "activation_checkpointing", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "sparse_gradients", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler",
    "comms_logger", "aio", "checkpoint", "torch_autocast", "bfloat16",
}  # fmt: skip
"""Settings of memory, communication and printing. The batch size follows from the options."""
_OFFLOADS = ("offload_optimizer", "offload_param")
"""Sections of ``zero_optimization``."""
_LOGGING_KEYS = {"comms_config", "monitor_config", "tensorboard", "wandb", "csv_monitor", "comet"}
"""Settings of DeepSpeed's monitors, which do not affect results. They are ignored."""
_REPLACED_BY_OPTIONS = {
    "optimizer": "use optim, learning_rate and weight_decay instead",
    "scheduler": "use lr_scheduler_type and warmup_steps instead",
}


def uses_deepspeed(options: ParallelChoices) -> bool:
    return bool(_source(options))


def zero_stage(options: ParallelChoices) -> int:
    """The ZeRO stage, 0 to 3. 1 if the settings are invalid, which their check reports."""
    try:
        return int(raw_settings(options).get("zero_optimization", {}).get("stage", 0))
    except (ValueError, TypeError):
        return 1


def raw_settings(options: ParallelChoices) -> dict[str, Any]:
    """The settings as given, without comments (keys that begin with an underscore).

    Raises:
        ValueError: a clause, if a file cannot be read, or does not contain an object with its sections.
    """
    source = _source(options)
    if isinstance(source, str) and source in DEEPSPEED_NAMES:
        return zero_preset(source)
    if isinstance(source, str):
        source = read_settings(Path(source))
    if not isinstance(source, Mapping):
        raise ValueError(f"does not contain a JSON object. Received: {source!r}")
    zero = source.get("zero_optimization", {})
    sections = {"zero_optimization": zero}
    if isinstance(zero, Mapping):
        sections |= {name: zero[name] for name in _OFFLOADS if zero.get(name) is not None}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f'must have an object as "{name}". Received: {section!r}')
    return copy.deepcopy({key: value for key, value in source.items() if not str(key).startswith("_")})


def zero_preset(name: str) -> dict[str, Any]:
    """Preset for a ZeRO stage. Everything else is filled in from the options."""
    stage, _, offload = name.removeprefix("zero").partition("_")
    zero: dict[str, Any] = {"stage": int(stage), "overlap_comm": True, "contiguous_gradients": True}
    if stage == "3":
        zero |= {"reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
                 "stage3_param_persistence_threshold": AUTO}  # fmt: skip
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == "3":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": zero, "gradient_clipping": AUTO, "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO},
        "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO, "train_batch_size": AUTO,
    }  # fmt: skip


def fill_settings(options: ParallelChoices, hidden_size: int, world_size: int, on_cpu: bool = False) -> dict[str, Any]:
    """The settings for ``deepspeed.initialize``.

    Args:
        options: the options of the run.
        hidden_size: hidden size of the model, which determines the bucket sizes of ZeRO-3.
        world_size: number of ranks.
        on_cpu: whether to disable pinned memory and overlapping streams, which require a GPU.
    """
    settings = raw_settings(options)
    for name in ("optimizer", "scheduler", *_LOGGING_KEYS):
        settings.pop(name, None)
    settings["train_micro_batch_size_per_gpu"] = options.per_device_train_batch_size
    # burnish decides at each micro-batch whether the step ends. The last step of an epoch may have fewer micro-batches.
    settings["gradient_accumulation_steps"] = 1
    settings["train_batch_size"] = options.per_device_train_batch_size * world_size
    settings["gradient_clipping"] = options.max_grad_norm
    settings["zero_allow_untested_optimizer"] = True  # torch's optimizers are elementwise, like DeepSpeed's
    settings["zero_force_ds_cpu_optimizer"] = False
    settings.setdefault("steps_per_print", 10**9)
    for name in ("bf16", "fp16"):
        settings.setdefault(name, {})["enabled"] = bool(_DUPLICATED_OPTIONS[name][1](options))
    if on_cpu and settings["fp16"]["enabled"]:  # a CPU has no fast float16 kernels
        settings["fp16"]["enabled"], settings["bf16"]["enabled"] = False, True
    zero = settings.setdefault("zero_optimization", {"stage": 0})
    sizes = {
        "reduce_bucket_size": hidden_size**2, "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }  # fmt: skip
    for name, size in sizes.items():
        if zero.get(name) == AUTO:
            zero[name] = size
    if on_cpu:
        zero["overlap_comm"] = False
        for name in _OFFLOADS:
            if zero.get(name) is not None:
                zero[name]["pin_memory"] = False
    return {name: value for name, value in settings.items() if value != AUTO}


def deepspeed_problems(options: ParallelChoices) -> Iterator[Problem]:
    source = _source(options)
    if not source:
        return
    where = f"deepspeed {source}" if isinstance(source, str) else "deepspeed"
    if isinstance(source, str) and source not in DEEPSPEED_NAMES and not Path(source).exists():
        yield Problem(
            f'"deepspeed": the file {Path(source).absolute()} does not exist.{did_you_mean(source, DEEPSPEED_NAMES)}',
            remedy=f"{_built_in(Path(source).name)} {json_beside(Path(source))}".rstrip(),
            option="deepspeed",
        )
        return
    try:
        settings = raw_settings(options)
    except ValueError as error:
        yield Problem(f"the DeepSpeed config file {error}.", where, option="deepspeed")
        return
    for key, value in settings.items():
        if key in _DUPLICATED_OPTIONS:
            yield from _difference(where, key, value, options)
        elif key in _REPLACED_BY_OPTIONS:
            yield from _own_section(where, key, value)
        elif key not in _ALLOWED_KEYS | _LOGGING_KEYS:
            yield Problem(
                f'"{key}" of the DeepSpeed config is not supported.',
                where,
                remedy="Remove it from the config.",
                option="deepspeed",
            )
    yield from _offloads(where, settings)


def _built_in(file_name: str) -> str:
    """Name the built-in config in place of a file: of an example of LLaMA-Factory, or else all of them."""
    example = re.fullmatch(r"ds_z(\d(?:_offload)?)_config\.json", file_name)
    if example and f"zero{example[1]}" in DEEPSPEED_NAMES:
        return f"Set deepspeed: zero{example[1]}, the built-in config like LLaMA-Factory's {file_name}."
    return f"Built-in configs: {', '.join(DEEPSPEED_NAMES)}."


def deepspeed_notes(options: ParallelChoices) -> Iterator[str]:
    if not uses_deepspeed(options):
        return
    if zero_stage(options) == 0:
        yield '"deepspeed": ZeRO stage 0 shards nothing, so torch\'s DDP is used instead.'
    for key in sorted(_LOGGING_KEYS & raw_settings(options).keys()):
        yield f'"{key}" of the DeepSpeed config has no effect: logging is configured with report_to.'
    yield from (
        f'"{key}" of the DeepSpeed config is "auto": {_REPLACED_BY_OPTIONS[key]}.'
        for key in _REPLACED_BY_OPTIONS
        if key in raw_settings(options)
    )


def _source(options: ParallelChoices) -> Any:
    """``deepspeed``, or else the file or stage that accelerate was configured with."""
    if options.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return options.deepspeed
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file and file != "none":
        return file
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    offload = "_offload" if os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu" else ""
    return f"zero{stage}{offload}"


def _difference(where: str, key: str, value: Any, options: ParallelChoices) -> Iterator[Problem]:
    """Report a setting of the file that contradicts an option."""
    requested = value.get("enabled", AUTO) if isinstance(value, Mapping) else value
    name, value_of = _DUPLICATED_OPTIONS[key]
    option = value_of(options)
    if requested not in (AUTO, option):
        yield Problem(
            f'"{key}" is {json.dumps(requested)}, but the option "{name}" is {json.dumps(option)}.',
            where,
            remedy=f'Set {name}: {json.dumps(requested)}, or set it to "auto" in the config.',
            option=("deepspeed", name),
        )


_USUAL_PARAMS = (("torch_adam", True), ("adam_w_mode", True))
"""Parameters of DeepSpeed's Adam that choose torch's AdamW."""


def _own_section(where: str, key: str, value: Any) -> Iterator[Problem]:
    """Report an optimizer or scheduler of DeepSpeed, unless it only repeats the options."""
    section = value if isinstance(value, Mapping) else {}
    params = section.get("params", {})
    is_usual = section.get("type") in ("Adam", "AdamW", "WarmupLR", "WarmupDecayLR") and isinstance(params, Mapping)
    if not is_usual or any(item != AUTO and (name, item) not in _USUAL_PARAMS for name, item in params.items()):
        yield Problem(
            f'"{key}" of the DeepSpeed config is not supported.',
            where,
            remedy=f"Remove it from the config; {_REPLACED_BY_OPTIONS[key]}.",
            option="deepspeed",
        )


def _offloads(where: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    zero = settings.get("zero_optimization", {})
    for name in _OFFLOADS:
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            yield Problem(
                f'"{name}": burnish offloads only to the CPU. Received: "{device}".', where, option="deepspeed"
            )
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        yield Problem(
            f'"zero_optimization": ZeRO has stages 0 to 3. Received: {zero["stage"]!r}.', where, option="deepspeed"
        )
