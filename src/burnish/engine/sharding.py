"""Settings of DeepSpeed and FSDP: what they ask for beside their place in memory.

Both spread weights, gradients and optimizer state over processes. burnish does not, so each process holds the whole
model, which is said; what a step learns is the same, and the rest of such a file repeats the options. In: the options.
Out: problems, where a file is missing, says other than the options, or asks for what would change the numbers; notes.

Keys: https://www.deepspeed.ai/docs/config-json/, as transformers fills them ("auto" stands for its own argument).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.core.conversion import GivenTwice, each_key_once
from burnish.core.errors import Problem

_SAYS_AGAIN = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16": "bf16",
    "fp16": "fp16",
}
"""Key -> the option that says the same."""
_OF_THE_MACHINE = {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "train_batch_size",
    "activation_checkpointing", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "sparse_gradients", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler",
    "comms_logger", "aio", "checkpoint", "torch_autocast", "bfloat16",
}  # fmt: skip
"""Where numbers lie, how they travel, what is printed; the size of a step follows from the options."""


def sharding_problems(options: Any) -> Iterator[Problem]:
    for name in ("deepspeed", "fsdp_config"):
        value = getattr(options, name)
        if isinstance(value, str) and not Path(value).is_file():
            yield Problem(
                f'"{name}" names a file that does not exist: {Path(value).absolute()}.',
                remedy=_files_beside(Path(value)),
            )
        elif name == "deepspeed" and value:
            yield from _problems_within(value, options)
    if options.fsdp_config and not _is_asked(options.fsdp):
        yield Problem('"fsdp_config" has no effect without "fsdp".', remedy="Leave it out.")


def sharding_notes(options: Any) -> Iterator[str]:
    for name in ("deepspeed", "fsdp"):
        if _is_asked(getattr(options, name)):
            yield (
                f'"{name}": weights are not sharded over processes. Each process holds the whole model, and learns the '
                "same; with less memory: finetuning_type: lora, use_badam, gradient_checkpointing."
            )


def _is_asked(value: Any) -> bool:
    return value not in (None, False, "", [], {}, "no_shard")


def _problems_within(given: str | Mapping[str, Any], options: Any) -> Iterator[Problem]:
    where = f"deepspeed {given}" if isinstance(given, str) else "deepspeed"
    try:
        settings = _read(Path(given)) if isinstance(given, str) else given
    except GivenTwice as error:
        yield Problem(f"the file of DeepSpeed's settings {error}", where)
        return
    except ValueError as error:
        yield Problem(f"the file of DeepSpeed's settings is not JSON: {error}.", where)
        return
    if not isinstance(settings, Mapping):
        yield Problem(f"DeepSpeed's settings are an object. Received: {settings!r}.", where)
        return
    for key, value in settings.items():
        if key in _SAYS_AGAIN:
            yield from _difference(where, key, value, options)
        elif key not in _OF_THE_MACHINE:
            yield Problem(
                f'"{key}" of DeepSpeed\'s settings is not part of burnish.',
                where,
                remedy="Take it out of the file; optim, learning_rate and lr_scheduler_type take its place.",
            )


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=each_key_once)


def _difference(where: str, key: str, value: Any, options: Any) -> Iterator[Problem]:
    """The file and the options may not say two things."""
    asked = value.get("enabled", "auto") if isinstance(value, Mapping) else value
    name = _SAYS_AGAIN[key]
    if asked != "auto" and asked != getattr(options, name):
        yield Problem(
            f'"{key}" is {json.dumps(asked)}, and the option "{name}" is {json.dumps(getattr(options, name))}.',
            where,
            remedy=f'Set {name}: {json.dumps(asked)}, or write "auto" into the file.',
        )


def _files_beside(path: Path) -> str:
    there = sorted(str(found) for found in path.parent.glob("*.json")) if path.parent.is_dir() else []
    return f"There are: {', '.join(there[:5])}." if there else ""
