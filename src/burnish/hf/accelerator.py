"""``trainer.accelerator``: the part of accelerate's ``Accelerator`` that overrides and scripts call, over the engine.

It moves tensors, goes backward, clips and gathers; it decides nothing. Where accelerate itself runs below (several
processes), it does so inside the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import AcceleratorConfig

from burnish.core.types import IGNORE_INDEX, Engine


class EngineAccelerator:
    """Names and meaning are accelerate's."""

    def __init__(self, engine: Engine, mixed_precision: str = "no", config: Any = None) -> None:
        self.engine = engine
        self.mixed_precision = mixed_precision
        self._keep(AcceleratorConfig() if config is None else config)
        self.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, num_processes=engine.world_size)
        self.parallelism_config = None
        self.sync_gradients = True

    def _keep(self, config: AcceleratorConfig) -> None:
        """The settings of ``accelerator_config``, for whoever reads them here. burnish deals rows to processes itself,
        and accumulates by itself: one step of accelerate's is a micro-batch, as in transformers."""
        self.split_batches, self.dispatch_batches = config.split_batches, config.dispatch_batches
        self.even_batches, self.use_seedable_sampler = config.even_batches, config.use_seedable_sampler
        accumulation = {**(config.gradient_accumulation_kwargs or {}), "num_steps": 1}
        self.gradient_state = SimpleNamespace(
            end_of_dataloader=False, remainder=-1, sync_gradients=True, plugin_kwargs=accumulation
        )

    device = property(lambda self: self.engine.device)
    num_processes = property(lambda self: self.engine.world_size)
    process_index = property(lambda self: self.engine.rank)
    local_process_index = property(lambda self: self.engine.rank)
    is_main_process = property(lambda self: self.engine.rank == 0)
    is_local_main_process = property(lambda self: self.engine.rank == 0)
    scaler = property(lambda self: getattr(self.engine, "scaler", None))

    @property
    def distributed_type(self) -> str:
        return "NO" if self.engine.world_size == 1 else "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss)

    def clip_grad_norm_(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: int = 2) -> Tensor:
        return self.engine.clip(list(parameters), max_norm)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model inside what the engine, or a script's own ``DataParallel``, put around it."""
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        return self.engine.unwrap(model.module if isinstance(model, wrappers) else model)

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return self.engine.unwrap(model).state_dict()

    def prepare(self, *parts: Any) -> Any:
        """What the engine prepares it has prepared, and loaders come as they are made."""
        return parts[0] if len(parts) == 1 else parts

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model

    def gather(self, values: Any) -> Any:
        """Tensors of all processes laid end to end, in tuples, lists and dicts too."""
        return self._each(values, self.engine.gather)

    gather_for_metrics = gather

    def pad_across_processes(self, values: Any, dim: int = 1, pad_index: int = IGNORE_INDEX) -> Any:
        """The engine's gather pads; nothing is left to do before it."""
        return values

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        total = self.engine.sum(tensor)
        return total / self.engine.world_size if reduction == "mean" else total

    def _each(self, values: Any, function: Any) -> Any:
        if isinstance(values, Tensor):
            return function(values[None] if values.dim() == 0 else values)
        if isinstance(values, list | tuple):
            return type(values)(self._each(value, function) for value in values)
        if isinstance(values, dict):
            return {name: self._each(value, function) for name, value in values.items()}
        return values

    def autocast(self) -> AbstractContextManager[Any]:
        return self.engine.precision()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait_for_everyone(self) -> None:
        self.engine.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_local_main_process:
            print(*args, **kwargs)

    def free_memory(self, *parts: Any) -> tuple[()]:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return ()

    def end_training(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
