"""Checks of the options of the backends: problems (``check_parallel``) and notes (``parallel_notes``)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, did_you_mean
from burnish.parallel.accelerate_launch import launched_notes, launched_problems, mixed_precision
from burnish.parallel.checkpointing import checkpointing_problems
from burnish.parallel.deepspeed.settings import deepspeed_notes, deepspeed_problems, uses_deepspeed
from burnish.parallel.fsdp.settings import fsdp_notes, fsdp_problems, fsdp_settings, uses_fsdp
from burnish.parallel.options import ParallelChoices
from burnish.parallel.precision import has_fast_bfloat16, slow_products
from burnish.parallel.process_counts import AUTO
from burnish.parallel.selection import device_of, parallel_name, untested_accelerator
from burnish.utils.environment import launcher_number


@check
def check_parallel(options: ParallelChoices) -> list[Problem]:
    """Report options that this machine, or any machine, does not support."""
    return [
        *_formats(options), *checkpointing_problems(options), *deepspeed_problems(options), *fsdp_problems(options),
        *launched_problems(options), *_processes(options),
        *_compiling(options),
    ]  # fmt: skip


def _compiling(options: ParallelChoices) -> Iterator[Problem]:
    """Report an unknown backend or mode of torch's compiler. If one is set, the compiler is imported to list them."""
    settings = {"backend": options.torch_compile_backend, "mode": options.torch_compile_mode}
    if not options.torch_compile or set(settings.values()) <= {None, "inductor"}:
        return
    import torch._dynamo
    import torch._inductor

    known = {"backend": torch._dynamo.list_backends(exclude_tags=()), "mode": [*torch._inductor.list_mode_options()]}
    for name, value in settings.items():
        if value is not None and value not in known[name]:
            yield Problem(
                f'"torch_compile_{name}": unknown value "{value}".{did_you_mean(value, known[name])}',
                remedy=f"Available: {', '.join(known[name])}.",
                option=f"torch_compile_{name}",
            )


def _formats(options: ParallelChoices) -> Iterator[Problem]:
    enabled = [name for name in ("bf16", "fp16", "pure_bf16") if getattr(options, name)]
    if "fp16" in enabled and len(enabled) > 1:
        yield Problem(
            f'"{enabled[0]}" and "{enabled[1]}" cannot be combined.',
            why="bfloat16 has the range of float32; float16 does not, and requires loss scaling.",
            remedy="Use bf16 if the device supports it.",
            option=tuple(enabled),
        )
    if options.bf16_full_eval and options.fp16_full_eval:
        yield Problem(
            '"bf16_full_eval" and "fp16_full_eval" cannot be combined.',
            remedy="Remove one of them.",
            option=("bf16_full_eval", "fp16_full_eval"),
        )
    if mixed_precision(options) == "bf16" and device_of(options).type == "cuda" and not torch.cuda.is_bf16_supported():
        yield Problem('"bf16" requires a GPU that supports bfloat16.', remedy="Set fp16: true instead.", option="bf16")


def _processes(options: ParallelChoices) -> Iterator[Problem]:
    num_processes = launcher_number("WORLD_SIZE", 1)
    if isinstance(options.num_processes, str) and options.num_processes != AUTO:
        yield Problem(
            f'"num_processes" must be auto or an integer. Received: "{options.num_processes}".',
            option="num_processes",
        )
    elif options.engine == "single" and options.num_processes not in (AUTO, 1):
        yield Problem(
            f'"engine" is single, but "num_processes" is {options.num_processes}.',
            remedy="Remove engine.",
            option=("engine", "num_processes"),
        )
    if options.engine == "single" and num_processes > 1:
        yield Problem(
            f'"engine" is single, but {num_processes} processes were started.',
            remedy="Remove engine.",
            option=("engine", "num_processes"),
        )
    if uses_deepspeed(options) and uses_fsdp(options):
        what = '"deepspeed" and "fsdp" cannot be combined.'
        yield Problem(what, remedy="Remove one of them.", option=("deepspeed", "fsdp"))
    if parallel_name(options) == "deepspeed" and find_spec("deepspeed") is None:
        yield Problem(
            '"deepspeed" requires the library DeepSpeed, which is not installed.',
            remedy="Install it with pip install deepspeed, or remove deepspeed to run without sharding.",
            option="deepspeed",
        )
    if options.engine == "accelerate" and find_spec("accelerate") is None:
        yield Problem(
            "engine: accelerate requires the library accelerate, which is not installed.",
            remedy="Install it with: pip install accelerate",
            option="engine",
        )


@notes
def parallel_notes(options: ParallelChoices) -> list[str]:
    """Notes on options without effect here, or with another effect than expected."""
    device, notes = device_of(options), []
    if unused := untested_accelerator(options):
        notes.append(f'The "{unused}" device of this machine is not used: burnish has not been tested on it.')
    precision = mixed_precision(options)
    if precision == "fp16" and device.type == "cpu":
        instead = "bfloat16." if has_fast_bfloat16() else f"float32. {slow_products(torch.bfloat16)}"
        notes.append(f'"fp16" is not used on a CPU: the run computes in {instead}')
    if (precision == "bf16" or options.pure_bf16) and device.type == "cpu" and not has_fast_bfloat16():
        name = "pure_bf16" if options.pure_bf16 else "bf16"
        notes.append(f"{slow_products(torch.bfloat16)} Set {name}: false, unless memory is limited.")
    if options.gradient_checkpointing_kwargs and not options.gradient_checkpointing:
        notes.append('"gradient_checkpointing_kwargs" has no effect without "gradient_checkpointing".')
    if device.type == "cpu" and (options.gradient_checkpointing_kwargs or {}).get("offload"):
        notes.append('"gradient_checkpointing_kwargs": "offload" has no effect on a CPU.')
    if options.activation_offloading and device.type == "cpu":
        notes.append('"activation_offloading" has no effect on a CPU.')
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if getattr(options, name) is not None and not options.torch_compile:
            notes.append(f'"{name}" has no effect without "torch_compile".')
    notes += [*launched_notes(options), *deepspeed_notes(options), *fsdp_notes(options)]
    if device.type == "cpu" and uses_fsdp(options) and fsdp_settings(options).offloads:
        notes.append('"fsdp": offload has no effect on a CPU.')
    if options.tf32 and device.type == "cpu":
        notes.append('"tf32" has no effect on a CPU.')
    return notes
