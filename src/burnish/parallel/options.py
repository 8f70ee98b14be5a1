"""Options of the backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from burnish.config.options import option
from burnish.loop.loop import LoopOptions
from burnish.loop.schedule import StepOptions

DEEPSPEED_NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""DeepSpeed configs by name."""


@dataclass
class ParallelOptions:
    """Devices, precision, parallelism and seeds."""

    engine: str = option(
        "auto",
        "Parallelism: one device (single), data parallelism (ddp), sharded weights (fsdp, deepspeed), or data "
        "parallelism set up by accelerate (accelerate). auto: as configured, otherwise ddp for several processes.",
        choices=("auto", "single", "ddp", "accelerate", "fsdp", "deepspeed"),
    )  # fmt: skip
    num_processes: int | str = option(
        "auto", "Number of processes to start on this machine. auto: one per GPU.", ge=1,
    )  # fmt: skip
    max_restarts: int = option(0, "Maximum number of restarts after a failure, from the latest checkpoint.", ge=0)
    stall_timeout_s: float | None = option(
        None,
        "Stop the run if no step or evaluation batch finishes within this time, and print the stacks of all "
        "processes.", unit="s", gt=0,
    )  # fmt: skip
    use_cpu: bool = option(False, "Use the CPU even if a GPU is available.", aliases=("no_cuda",))
    bf16: bool | None = option(
        None, "Mixed precision in bfloat16 (autocast), with trainable weights in float32. false: compute in float32. "
        "Default: no autocast; frozen weights keep the dtype of their files if the device computes fast in that dtype.",
    )  # fmt: skip
    fp16: bool = option(False, "Mixed precision training in float16 with dynamic loss scaling.")
    pure_bf16: bool = option(False, "Keep weights, gradients and optimizer state in bfloat16, without autocast.")
    tf32: bool | None = option(None, "Allow TF32 for float32 matrix multiplications on Ampere and newer GPUs.")
    bf16_full_eval: bool = option(
        False, "Convert the weights to bfloat16 for evaluations and predictions outside of training."
    )
    fp16_full_eval: bool = option(
        False, "Convert the weights to float16 for evaluations and predictions outside of training."
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory.",
        aliases=("activation_checkpointing",),
    )  # fmt: skip
    gradient_checkpointing_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of torch.utils.checkpoint, such as use_reentrant. Additional keys: every_n_layers (recompute every "
        "n-th layer only), offload (keep the inputs of layers in CPU memory), selective (recompute everything but "
        "matrix products and attention).",
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
    ddp_bucket_cap_mb: int | None = option(None, "Size of the gradient buckets of DDP.", unit="MiB", gt=0)
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
        f"DeepSpeed config, or a JSON file with it, or one of {', '.join(DEEPSPEED_NAMES)}.",
        names_place=True,
        risky="its settings can specify programs to run",
        harmless=DEEPSPEED_NAMES,
    )
    accelerator_config: dict[str, Any] | str | None = option(
        None, "Settings of accelerate, or a JSON file with them.",
        ignored="these settings only control how examples are distributed to processes, which burnish does "
        "itself.", names_place=True,
    )  # fmt: skip
    seed: int = option(
        42,
        "Random seed for weight initialization, dropout and (unless data_seed is set) data order.",
        ge=0,
        le=2**32 - 1,
    )
    data_seed: int | None = option(None, "Random seed for the data order.", ge=0, le=2**32 - 1)
    full_determinism: bool = option(False, "Use deterministic algorithms only. Slower.")


class ParallelChoices(ParallelOptions, StepOptions, LoopOptions):
    """All options that backends read."""
