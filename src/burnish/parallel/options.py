"""Options of the backends, and their checks.

In: the flat options. Out: problems (``check_parallel``), notes (``parallel_notes``), the choice of backend and device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, did_you_mean
from burnish.config.options import option
from burnish.parallel.accelerate_launch import (
    is_kept_on_cpu,
    launched_notes,
    launched_problems,
    mixed_precision,
)
from burnish.parallel.checkpointing import checkpointing_problems
from burnish.parallel.choices import DeviceChoice, ParallelChoices
from burnish.parallel.deepspeed.settings import (
    NAMES,
    deepspeed_notes,
    deepspeed_problems,
    uses_deepspeed,
    zero_stage,
)
from burnish.parallel.fsdp.settings import fsdp_notes, fsdp_problems, fsdp_settings, uses_fsdp
from burnish.parallel.precision import cpu_instructions, has_fast_bfloat16, slow_products
from burnish.parallel.process_counts import AUTO


@dataclass
class ParallelOptions:
    """Devices, precision, parallelism and seeds."""

    engine: str = option(
        "auto",
        "Backend: one device (single), data parallel (ddp), sharded (fsdp, deepspeed), or ddp set up by "
        "accelerate. auto: as configured, otherwise ddp for several processes.",
        choices=("auto", "single", "ddp", "accelerate", "fsdp", "deepspeed"),
    )  # fmt: skip
    num_processes: int | str = option(
        AUTO, "Number of processes to start on this machine. auto: one per GPU.", ge=1,
    )  # fmt: skip
    max_restarts: int = option(0, "Maximum number of restarts after a failure, from the latest checkpoint.", ge=0)
    stall_timeout_s: float | None = option(
        None,
        "Stop a run in which no step and no evaluation batch finishes for this time, and print the stacks "
        "of all processes.", unit="s", gt=0,
    )  # fmt: skip
    use_cpu: bool = option(False, "Use the CPU even if a GPU is available.", aliases=("no_cuda",))
    bf16: bool | None = option(
        None, "Mixed precision in bfloat16 (autocast), trained weights in float32; false: compute in float32. Default: "
        "no autocast; frozen weights keep the dtype of their files where the device has fast products in it.",
    )  # fmt: skip
    fp16: bool = option(False, "Mixed precision training in float16 with dynamic loss scaling.")
    pure_bf16: bool = option(False, "Keep weights, gradients and optimizer state in bfloat16, without autocast.")
    tf32: bool | None = option(None, "Allow TF32 matrix products for float32 on Ampere and newer GPUs.")
    bf16_full_eval: bool = option(False, "Evaluate with weights in bfloat16, for evaluations outside of training.")
    fp16_full_eval: bool = option(False, "Evaluate with weights in float16, for evaluations outside of training.")
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory.",
        aliases=("activation_checkpointing",),
    )  # fmt: skip
    gradient_checkpointing_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of torch.utils.checkpoint, such as use_reentrant; and every_n_layers, offload, selective.",
        aliases=("activation_checkpointing_kwargs",),
    )
    activation_offloading: bool = option(
        False, "Offload activations to CPU memory until the backward pass.",
        aliases=("use_unsloth_gc",),
    )  # fmt: skip
    torch_compile: bool = option(False, "Compile the layers of the model with torch.compile.")
    torch_compile_backend: str | None = option(
        None,
        "Backend of torch.compile. Default: inductor.",
        risky="it can run code of another package",
        harmless=("inductor", "eager", "aot_eager", "cudagraphs"),
    )
    torch_compile_mode: str | None = option(None, 'Mode of torch.compile, such as "reduce-overhead".')
    ddp_backend: str | None = option(None, "Communication backend: nccl, gloo, ... Default: chosen by device.")
    ddp_timeout: int = option(1800, "Timeout of collective operations.", unit="s", gt=0)
    ddp_bucket_cap_mb: int | None = option(None, "Size of the gradient buckets of DDP.", unit="MB", gt=0)
    ddp_broadcast_buffers: bool | None = option(
        None, "Synchronize buffers at each forward pass. Default: true, as in torch."
    )
    ddp_find_unused_parameters: bool | None = option(
        None,
        "Find parameters that a forward pass does not use. Default: true without gradient checkpointing, as"
        " in transformers.",
    )  # fmt: skip
    ddp_static_graph: bool | None = option(None, "Declare that every forward pass uses the same parameters.")
    fsdp: bool | str | list[str] | None = option(
        None,
        "Fully sharded data parallelism: true or full_shard, shard_grad_op (weights stay gathered between "
        "forward and backward), hybrid_shard (shard within a node); offload keeps shards on the CPU.",
    )  # fmt: skip
    fsdp_config: dict[str, Any] | str | None = option(
        None,
        "FSDP settings, by transformers' and accelerate's names, or a JSON file with them.",
        names_place=True,
    )
    deepspeed: dict[str, Any] | str | None = option(
        None,
        f"DeepSpeed config, or a JSON file with it, or one of {', '.join(NAMES)}.",
        names_place=True,
        risky="its settings can specify programs to run",
        harmless=NAMES,
    )
    accelerator_config: dict[str, Any] | str | None = option(
        None, "Settings of accelerate, or a JSON file with them.",
        ignored="burnish distributes examples to processes itself, which is all that these settings "
        "control.", names_place=True,
    )  # fmt: skip
    seed: int = option(
        42,
        "Random seed for weight initialization, dropout and (unless data_seed is set) data order.",
        ge=0,
        le=2**32 - 1,
    )
    data_seed: int | None = option(None, "Random seed for the data order.", ge=0, le=2**32 - 1)
    full_determinism: bool = option(False, "Use deterministic algorithms only. Slower.")


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
                remedy=f"Known: {', '.join(known[name])}.",
                option=f"torch_compile_{name}",
            )


def _formats(options: ParallelChoices) -> Iterator[Problem]:
    enabled = [name for name in ("bf16", "fp16", "pure_bf16") if getattr(options, name)]
    if "fp16" in enabled and len(enabled) > 1:
        yield Problem(
            f'"{enabled[0]}" and "{enabled[1]}" cannot be combined.',
            why="bfloat16 has the range of float32; float16 does not, and needs loss scaling.",
            remedy="Use bf16 if the device supports it.",
            option=tuple(enabled),
        )
    if options.bf16_full_eval and options.fp16_full_eval:
        yield Problem(
            '"bf16_full_eval" and "fp16_full_eval" cannot be combined.',
            option=("bf16_full_eval", "fp16_full_eval"),
        )
    if mixed_precision(options) == "bf16" and device_of(options).type == "cuda" and not torch.cuda.is_bf16_supported():
        yield Problem('"bf16" requires a GPU that supports bfloat16.', remedy="Set fp16: true instead.", option="bf16")


def _processes(options: ParallelChoices) -> Iterator[Problem]:
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if isinstance(options.num_processes, str) and options.num_processes != AUTO:
        yield Problem(
            f'"num_processes" must be auto or a whole number. Received: "{options.num_processes}".',
            option="num_processes",
        )
    elif options.engine == "single" and options.num_processes not in (AUTO, 1):
        yield Problem(
            f'"engine" is single, but "num_processes" {options.num_processes}.',
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
        yield Problem('"deepspeed" and "fsdp" cannot be combined.', option=("deepspeed", "fsdp"))
    if parallel_name(options) == "deepspeed" and find_spec("deepspeed") is None:
        yield Problem(
            "This run needs the library DeepSpeed, which is not installed.",
            remedy="pip install deepspeed",
            option="deepspeed",
        )
    if options.engine == "accelerate" and find_spec("accelerate") is None:
        yield Problem(
            "This run needs the library accelerate, which is not installed.",
            remedy="pip install accelerate",
            option="engine",
        )


@notes
def parallel_notes(options: ParallelChoices) -> list[str]:
    """Notes on options without effect here, or with another effect than expected."""
    device, notes = device_of(options), []
    asked = mixed_precision(options)
    if asked == "fp16" and device.type == "cpu":
        instead = (
            "bfloat16"
            if has_fast_bfloat16()
            else f"float32: {cpu_instructions()} does not support bfloat16 matrix products"
        )
        notes.append(f'"fp16" on a CPU runs in {instead}.')
    if asked == "bf16" and device.type == "cpu" and not has_fast_bfloat16():
        notes.append(f"{slow_products(torch.bfloat16)} Set bf16: false, unless memory is short.")
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


def parallel_name(options: ParallelChoices, num_processes: int | None = None) -> str:
    """The backend that the options and the number of processes select.

    Args:
        options: the options of the backend.
        num_processes: for a run that is not started yet. Default: the number set by the launcher.
    """
    if options.engine != AUTO:
        return str(options.engine)
    if uses_deepspeed(options) and zero_stage(options) > 0:
        return "deepspeed"
    if uses_fsdp(options):
        return "fsdp"
    count = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
    return "single" if count == 1 else "ddp"


def device_of(options: DeviceChoice) -> torch.device:
    """The device of this process: one of the machine's accelerators, or the CPU."""
    stays = options.use_cpu or is_kept_on_cpu()
    accelerator = None if stays else torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, local_rank()) if accelerator else torch.device("cpu")


def local_rank() -> int:
    """The local rank of this process, set by the launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))
