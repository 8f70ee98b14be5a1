"""Data parallelism in plain torch: each process holds the whole model, and gradients are averaged over them.

In: a model and its optimizer, in each process. Out: the model in torch's ``DistributedDataParallel``. Gradients are
accumulated on each rank and averaged in the backward pass of the last micro-batch of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from burnish.parallel.multi_process import MultiProcess
from burnish.parallel.options import ParallelChoices


class DdpParallel(MultiProcess):
    """Data parallelism: each process has the whole model."""

    averages_itself = False

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        """Wrap the model. The optimizer is not changed, because gradients are synced."""
        model, optimizer = super().prepare(model, optimizer)
        # torch's wrapper only syncs weights that require a gradient when it is created.
        self.averages_itself = bool(getattr(optimizer, "changes_what_trains", False))
        return (model if self.averages_itself else self.wrap(model)), optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # torch refuses to wrap a model without trainable weights
        frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
        if frozen and self._are_same_everywhere(frozen.values()):
            leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            leave_out(model, list(frozen))
        return DistributedDataParallel(
            model, device_ids=None if self.device.type == "cpu" else [self.device], **syncing_arguments(self.options)
        )

    def _are_same_everywhere(self, weights: Iterable[Tensor]) -> bool:
        """Whether all ranks have the same weights, judged by their sums. If so, none are sent. torch would broadcast
        all of them once, which would turn memory-mapped weights into a copy per process.
        """
        sums = torch.stack([_sum(weight.detach()).to(self.device) for weight in weights])
        of_ranks = self.gather(sums[None])
        return bool((of_ranks == of_ranks[:1]).all())

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        if self.averages_itself:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            average(gradients, self.world_size)
        return super().clip(parameters, max_norm)

    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context for a micro-batch. Gradients are averaged over ranks only in the last backward pass of a step."""
        no_sync = getattr(model, "no_sync", None)
        return no_sync() if no_sync is not None and not last else nullcontext()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return super().unwrap(model.module if isinstance(model, DistributedDataParallel) else model)


def _sum(weight: Tensor) -> Tensor:
    """() sum in float64, 65,536 elements at a time, because torch copies what it sums to float64."""
    return torch.stack([part.sum(dtype=torch.float64) for part in torch.split(weight.flatten(), 2**16)]).sum()


def average(gradients: Sequence[Tensor], world_size: int) -> None:
    """Replace gradients with their means over ranks, with one collective per dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        parcel = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(parcel)
        parcel /= world_size
        sizes = [gradient.numel() for gradient in alike]
        for gradient, mean in zip(alike, torch.split(parcel, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))


_DDP_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS_ARGUMENT = (
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"
)  # before torch 2.13


def syncing_arguments(options: ParallelChoices) -> dict[str, Any]:
    """The ``ddp_*`` options as torch's arguments. Defaults are those of transformers."""
    finds = options.ddp_find_unused_parameters
    if finds is None:
        # The search for unused weights does not work with a checkpointed layer, whose forward pass runs twice
        # (https://github.com/huggingface/transformers/pull/4659, and Trainer since).
        finds = not options.gradient_checkpointing
    arguments: dict[str, Any] = {
        "find_unused_parameters": bool(finds),
        "static_graph": bool(options.ddp_static_graph),
        "gradient_as_bucket_view": True,  # gradients are views of the communication buckets, which saves a copy
    }
    if options.ddp_broadcast_buffers is False:  # true is torch's default
        arguments[SYNC_BUFFERS_ARGUMENT] = False
    if options.ddp_bucket_cap_mb is not None:
        arguments["bucket_cap_mb"] = options.ddp_bucket_cap_mb
    return arguments
