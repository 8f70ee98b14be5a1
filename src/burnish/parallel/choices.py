"""Protocols of the options that backends read. A function takes the narrowest protocol with the options that it
reads."""

from __future__ import annotations

from typing import Any, Protocol

from burnish.parallel.accelerate_launch import MixedChoices
from burnish.parallel.deepspeed.settings import DeepspeedChoices
from burnish.parallel.fsdp.settings import FsdpChoices
from burnish.parallel.process_counts import ProcessOptions


class DeviceChoice(Protocol):
    """The option that selects the CPU."""

    use_cpu: bool


class FormatChoices(MixedChoices, Protocol):
    """Options that set the compute dtype."""

    bf16_full_eval: bool
    fp16_full_eval: bool


class ParallelChoices(DeepspeedChoices, FsdpChoices, FormatChoices, DeviceChoice, ProcessOptions, Protocol):
    """All options that backends read."""

    activation_offloading: bool
    ddp_backend: str | None
    ddp_broadcast_buffers: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_find_unused_parameters: bool | None
    ddp_static_graph: bool | None
    ddp_timeout: int
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | None
    tf32: bool | None
    torch_compile: bool
    torch_compile_backend: str | None
    torch_compile_mode: str | None
