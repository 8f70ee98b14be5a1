"""The backend in plain torch, for one process and one device: the reference for all other backends.

In: a model, an optimizer, micro-batches, losses. Out: all on the device, gradients, an update unless the loss or a
gradient is not finite. The loop (``loop/loop.py``) calls it. The backend does not depend on the objective.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.checkpoint.parts import Part, Stateful
from burnish.loop.types import Batch
from burnish.parallel.checkpointing import checkpoint_activations
from burnish.parallel.checks import check_parallel
from burnish.parallel.memory import keep_few_kernels, keep_freed_memory
from burnish.parallel.offloading import Offloading
from burnish.parallel.options import ParallelChoices, ParallelOptions
from burnish.parallel.precision import autocast_dtype
from burnish.parallel.selection import device_of

__all__ = ["ParallelOptions", "SingleProcess", "check_parallel", "set_seed"]


class SingleProcess:
    """Backend for one process and one device.

    Args:
        options: the flat options; those of ``ParallelOptions`` are read.
    """

    rank: int = 0
    world_size: int = 1
    is_sharded = False  # these three: see ``Parallel``
    shards_weights = False
    frees_weights = False
    checkpoints_layers = False  # a backend's own settings may enable gradient checkpointing as well

    def __init__(self, options: ParallelChoices) -> None:
        self.options = options
        self.device = device_of(options)
        self.dtype = autocast_dtype(options, self.device)
        if self.device.type == "cpu":
            keep_few_kernels()
            use_fixed_order()
        self.scaler = torch.amp.GradScaler(self.device.type) if self.dtype == torch.float16 else None
        self.scales_loss = self.scaler is not None
        self.optimizer: Any = None
        self._offloading: Offloading | None = None
        if options.tf32 is not None and self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if options.tf32 else "highest")

    @property
    def parts(self) -> dict[str, Stateful]:
        """The backend's own parts of a checkpoint: the loss scale, if there is one."""
        return {"scaler": cast(Stateful, self.scaler)} if self.scaler else {}

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        """Move the model to the device, and enable checkpointing and compilation. Returns it and the optimizer."""
        self.optimizer = optimizer
        if self.device.type == "cpu" and optimizer is not None:
            keep_freed_memory(is_sharded=self.is_sharded)
        self.ensure_on_device(model)
        if self.options.gradient_checkpointing or self.checkpoints_layers:
            checkpoint_activations(model, self.options.gradient_checkpointing_kwargs)
        if self.options.activation_offloading and self.device.type != "cpu":
            self._offloading = Offloading(model, self.device)
        if self.options.torch_compile:
            backend = self.options.torch_compile_backend or "inductor"
            compile_layers(model, backend=backend, mode=self.options.torch_compile_mode)
        return model, optimizer

    def move_model(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Convert trainable weights and move the model to the device, before the optimizer is created.

        Args:
            trained_in: dtype of trainable weights.
        """
        set_precision(model, trained_in)
        model.to(self.device)

    def ensure_on_device(self, model: nn.Module) -> None:
        """Move a model for which ``move_model`` was not called to the backend's device."""
        model.to(self.device)

    def to_device(self, batch: Batch) -> Batch:
        values: Any = batch
        if not isinstance(values, MutableMapping):  # a script's own type, which its Trainer moves
            return batch
        moved = copy.copy(batch)  # keeps the class of the dict, which a script may depend on
        for name, value in batch.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(self.device, non_blocking=True)
        return moved

    def microbatch(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of one micro-batch. A single process syncs nothing."""
        return nullcontext()

    def generating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context for generation with the bare model, outside of the module that ``prepare`` returned."""
        return nullcontext()

    def sharded_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts of a run in the form that a checkpoint stores, if tensors are sharded."""
        return dict(parts)

    def local_shards(self, model: nn.Module) -> list[Tensor]:
        return [weight.data for weight in model.parameters() if weight.requires_grad]

    def reshard(self, model: nn.Module) -> None:
        return None

    def other_modules(self) -> AbstractContextManager[None]:
        return nullcontext()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A whole weight, gathered if it is sharded. Collective: all ranks call it in the same order."""
        return tensor

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Context for a forward pass: autocast and activation offloading, if enabled."""
        with torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext():
            if self._offloading is None:
                yield
            else:
                with self._offloading.forward():
                    yield

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss) if self.scaler else loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``; 0: no clipping.

        Returns:
            () the norm before clipping, on the device.
        """
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        gradients = [self.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        norm = self.total_norm(gradients)
        # On a CPU reading the norm is free, so gradients are only scaled if needed. On a GPU a read waits for the
        # device, so gradients are always multiplied by the factor, which is at most 1.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch uses the same epsilon
        if max_norm > 0 and gradients and (norm.device.type != "cpu" or factor != 1):
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def local(self, gradient: Tensor) -> Tensor:
        """The part of a gradient that this process holds."""
        return gradient

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the total norm of all gradients, as a float32 scalar on the device.

        Args:
            gradients: those that this process holds.
        """
        if not gradients:
            return torch.zeros((), device=self.device)
        lengths = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([length.to(self.device) for length in lengths]))
        return norm

    def step(self, optimizer: Optimizer, is_valid: Tensor) -> bool:
        """Update once, unless ``is_valid`` () bool is false. See ``Parallel.step`` for the return value."""
        if self.scaler:
            # Reads one number from the device, as torch's own GradScaler.step does.
            applied = bool(is_valid)
            if applied:
                optimizer.step()
            self.scaler.update()
            return applied
        if self.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
            # The fused kernel skips the update if found_inf is 1, so no device read is needed.
            optimizer.found_inf, optimizer.grad_scale = (~is_valid).float(), None  # type: ignore[attr-defined]
            optimizer.step()
            return True
        # Free on a CPU. On a GPU an optimizer without fused kernels costs one device read per step.
        if not is_valid:
            return False
        optimizer.step()
        return True

    def sum(self, value: Tensor) -> Tensor:
        return value

    def any(self, flag: bool) -> bool:
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def gather(self, value: Tensor) -> Tensor:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that was passed to ``prepare``."""
        inner: nn.Module = getattr(model, "_orig_mod", model)
        return inner


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the model's outermost module lists. Experts are part of their layer. Empty if it has none."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(module) for stack in stacks for layer in stack for module in layer.modules()}
    return [layer for stack in stacks if id(stack) not in inside for layer in stack]


def compile_layers(model: nn.Module, **arguments: Any) -> None:
    """Compile each layer in place, so that equal layers are compiled only once and names of weights do not change. A
    model without layers is compiled as a whole.

    Args:
        arguments: arguments of ``torch.compile``.
    """
    for module in layers_of(model) or [model]:
        module.compile(**arguments)


def set_precision(model: nn.Module, trainable_dtype: torch.dtype) -> None:
    """Convert trainable parameters to ``trainable_dtype``. Frozen ones keep the dtype in which they were loaded.

    A relative update of 1e-4 needs float32: bfloat16 has eight bits and would lose it (pure_bf16 accepts this). Tied
    weights stay tied.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trainable_dtype)


def use_fixed_order() -> None:
    """Make a CPU add the gradients of repeated indices in a fixed order.

    Otherwise its threads add them in any order, so that two runs of a model with experts, which reads the hidden state
    of a token once for each expert, differ in the last bits
    (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html). Deterministic algorithms
    that are already enabled keep their settings.
    """
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_seed(seed: int, full_determinism: bool = False) -> None:
    """Seed all generators of a run: Python's, numpy's if it is imported, torch's on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # otherwise cuBLAS selects kernels at run time
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
