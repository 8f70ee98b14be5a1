"""The engine for several processes: data-parallel training, set up by accelerate. The only door to that library.

In: what ``SingleEngine`` takes, in each process. Out: the same, with gradients averaged over the processes on the last
micro-batch of a step, sums over all ranks, and an update that all of them apply or none.

accelerate finds its place among the launched processes, opens the process group and wraps the model. Number formats,
clipping and the guard against NaN stay ``SingleEngine``'s, so that one process gives the same weights to the bit.
Run on gloo and CPUs; nothing here is particular to them, and nothing has been run on several GPUs yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.core.types import IGNORE_INDEX
from burnish.engine.base import SingleEngine


class AccelerateEngine(SingleEngine):
    """One of several processes.

    Args:
        options: the flat options; those of ``EngineOptions`` are read.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.accelerator = _accelerator(options, self.device)
        self.device = self.accelerator.device
        self.rank = self.accelerator.process_index
        self.world_size = self.accelerator.num_processes

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        """The model wrapped for its kind of parallelism. The optimizer stays as it is: its gradients are synced."""
        model, optimizer = super().prepare(model, optimizer)
        return cast(nn.Module, self.accelerator.prepare_model(model)), optimizer

    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients add up on each rank, and are averaged over ranks in the backward pass of the last micro-batch."""
        no_sync = getattr(model, "no_sync", None)
        return no_sync() if no_sync is not None and not last else nullcontext()

    def step(self, optimizer: Optimizer, is_finite: Tensor) -> bool:
        """One update on all ranks or on none: a loss can be infinite on one of them while the gradients are not."""
        return super().step(optimizer, self.sum((~is_finite).float()) == 0)

    def sum(self, value: Tensor) -> Tensor:
        summed: Tensor = self.accelerator.reduce(value, "sum")
        return summed

    def gather(self, value: Tensor) -> Tensor:
        if value.ndim > 1:
            value = self.accelerator.pad_across_processes(value, dim=1, pad_index=IGNORE_INDEX)
        gathered: Tensor = self.accelerator.gather(value)
        return gathered

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return super().unwrap(getattr(model, "module", model))


def _accelerator(options: Any, device: torch.device) -> Any:
    """An ``Accelerator`` that does what the options say and nothing of its own accord."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    parallel = {
        "broadcast_buffers": bool(options.ddp_broadcast_buffers),
        "find_unused_parameters": bool(options.ddp_find_unused_parameters),
        "static_graph": bool(options.ddp_static_graph),
        "gradient_as_bucket_view": True,  # gradients lie in the parcels that are sent: one copy less
    }
    if options.ddp_bucket_cap_mb is not None:
        parallel["bucket_cap_mb"] = options.ddp_bucket_cap_mb
    return Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # autocast and the loss scale are SingleEngine's
        kwargs_handlers=[
            DistributedDataParallelKwargs(**parallel),
            InitProcessGroupKwargs(backend=options.ddp_backend, timeout=timedelta(seconds=options.ddp_timeout)),
        ],
    )
