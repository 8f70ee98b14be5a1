"""Settings of ``accelerate launch`` other than those of FSDP and DeepSpeed: precision, CPU, and others.

In: the environment variables that it sets from its flags and its YAML. Out: their values for options that are not set;
notes on settings without effect; problems for unsupported ones. Options of the run take precedence, as in transformers.

https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from burnish.config.errors import Problem
from burnish.parallel.options import ParallelOptions
from burnish.utils.environment import count_in

_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
_COMPILER = "ACCELERATE_DYNAMO_BACKEND"
_UNSUPPORTED_PARALLELISM = {
    "tensor": "PARALLELISM_CONFIG_TP_SIZE", "context": "PARALLELISM_CONFIG_CP_SIZE",
    "sequence": "PARALLELISM_CONFIG_SP_SIZE",
}  # fmt: skip
"""Unsupported kinds of parallelism -> the variable with their number of processes."""


def mixed_precision(options: ParallelOptions) -> str:
    """The mixed precision of the forward pass: bf16, fp16 or no."""
    if options.fp16:
        return "fp16"
    if options.pure_bf16:
        return "no"
    requested = "bf16" if options.bf16 else _environment_value(_PRECISION_VARIABLE)
    return requested if requested in ("bf16", "fp16") else "no"


def is_kept_on_cpu() -> bool:
    return is_true(os.environ.get("ACCELERATE_USE_CPU"))


def launched_problems(options: ParallelOptions) -> Iterator[Problem]:
    for kind, variable in _UNSUPPORTED_PARALLELISM.items():
        if count_in(os.environ.get(variable, "")) > 1:
            what = f"{variable} is {os.environ[variable]}: burnish does not support {kind} parallelism."
            yield Problem(what, remedy="Set it to 1, and shard the weights with fsdp: full_shard or deepspeed: zero3.")
    if not _sets_precision(options) and _environment_value(_PRECISION_VARIABLE) not in ("", "no", "bf16", "fp16"):
        yield Problem(
            f'{_PRECISION_VARIABLE} is "{_environment_value(_PRECISION_VARIABLE)}": burnish supports bf16 and fp16.',
            remedy="Set mixed_precision: bf16 in accelerate's config file, or bf16: true in the run's YAML file.",
        )
    if is_true(os.environ.get("ACCELERATE_USE_MEGATRON_LM")):
        yield Problem("ACCELERATE_USE_MEGATRON_LM is true: burnish does not run on Megatron.", remedy="Use FSDP.")


def launched_notes(options: ParallelOptions) -> Iterator[str]:
    if not _sets_precision(options) and (requested := mixed_precision(options)) != "no":
        unset = "bf16, fp16 and pure_bf16 are not enabled"
        yield f"{_PRECISION_VARIABLE} is {requested}, and {unset}, so {requested}: true is used."
    if _environment_value(_COMPILER) not in ("", "no"):
        yield f"{_COMPILER} has no effect: set torch_compile and torch_compile_backend instead."


def is_true(value: object) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def _sets_precision(options: ParallelOptions) -> bool:
    return bool(options.bf16 or options.fp16 or options.pure_bf16)


def _environment_value(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()
