"""The backend and the device that the options, the launcher and the machine select."""

from __future__ import annotations

import torch

from burnish.parallel.accelerate_launch import is_kept_on_cpu
from burnish.parallel.deepspeed.settings import uses_deepspeed, zero_stage
from burnish.parallel.fsdp.settings import uses_fsdp
from burnish.parallel.options import ParallelChoices, ParallelOptions
from burnish.parallel.process_counts import AUTO
from burnish.utils.environment import launcher_number


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
    count = launcher_number("WORLD_SIZE", 1) if num_processes is None else num_processes
    return "single" if count == 1 else "ddp"


def device_of(options: ParallelOptions) -> torch.device:
    """The device of this process: a GPU (NVIDIA's, or AMD's through ROCm), or the CPU."""
    return torch.device("cuda", local_rank()) if _accelerator(options) == "cuda" else torch.device("cpu")


def untested_accelerator(options: ParallelOptions) -> str:
    """The type of an accelerator that is not used because burnish has not been tested on it, such as mps; or ""."""
    found = _accelerator(options)
    return "" if found == "cuda" else found


def _accelerator(options: ParallelOptions) -> str:
    if options.use_cpu or is_kept_on_cpu():
        return ""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else ""


def local_rank() -> int:
    """The local rank of this process, set by the launcher."""
    return launcher_number("LOCAL_RANK", 0)
