"""Data parallelism set up by accelerate, for ``engine: accelerate``. All use of that library is in this module.

accelerate determines the rank of the process, opens the process group and wraps the model. Everything else is done by
``Parallel``, as with torch's own wrapper (``ddp``), which ``auto`` selects because it starts faster.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from burnish.parallel.ddp import SYNC_BUFFERS_ARGUMENT, DdpParallel, syncing_arguments
from burnish.parallel.options import ParallelChoices


class AccelerateParallel(DdpParallel):
    """Data parallelism with accelerate, for one or several processes."""

    def open_group(self) -> None:
        self.accelerator = _accelerator(self.options, self.device.type == "cpu")
        self.device = self.accelerator.device
        if not os.environ.get("WORLD_SIZE"):
            super().open_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, self.accelerator.prepare_model(model))


def _accelerator(options: ParallelChoices, is_on_cpu: bool) -> Any:
    """An ``Accelerator`` that only does what the options request."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    syncing = syncing_arguments(options)
    if syncing.pop(SYNC_BUFFERS_ARGUMENT, True) is False:
        syncing["broadcast_buffers"] = False  # accelerate's name of the argument
    return Accelerator(
        cpu=is_on_cpu,
        mixed_precision="no",  # SingleProcess handles autocast and the loss scale
        kwargs_handlers=[
            DistributedDataParallelKwargs(**syncing),
            InitProcessGroupKwargs(backend=options.ddp_backend, timeout=timedelta(seconds=options.ddp_timeout)),
        ],
    )


def blank_tracker() -> Any:
    """A tracker of accelerate that does nothing."""
    from accelerate.tracking import GeneralTracker

    return GeneralTracker(_blank=True)


def initialize_single_process(is_on_cpu: bool) -> None:
    """Initialize accelerate's ``PartialState``, which its loggers require, unless a launcher started this process."""
    from accelerate.state import PartialState

    if not PartialState._shared_state and "LOCAL_RANK" not in os.environ:
        PartialState(cpu=is_on_cpu)


def initialize_accelerator_state(is_on_cpu: bool) -> None:
    """Initialize accelerate's ``AcceleratorState``, which callbacks of TRL read, where ``PartialState`` is initialized
    and the script has no ``Accelerator`` of its own. burnish handles mixed precision itself."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    if PartialState._shared_state and not AcceleratorState._shared_state:
        Accelerator(mixed_precision="no", cpu=is_on_cpu)  # its constructor is the public way to do that


def share_with_accelerate() -> None:
    """Make accelerate's functions and states (``gather_object``, ``PartialState``, ``Accelerator``) use the process
    group of a run on CPUs, which accelerate does not detect."""
    from accelerate.state import AcceleratorState, PartialState

    if PartialState._shared_state.get("num_processes") == dist.get_world_size():
        return
    PartialState._reset_state()
    PartialState(cpu=True)
    if AcceleratorState._shared_state:  # of an Accelerator that the script created before
        AcceleratorState._shared_state.update(PartialState._shared_state)
