"""The DeepSpeed backend: ZeRO, which shards optimizer states (1), gradients (2) and weights (3) over processes.

In: a model, an optimizer, the settings (``deepspeed/settings.py``). Out: the module that DeepSpeed runs, and the
location of this rank's slices of weights and optimizer states (``deepspeed/shards.py`` converts them for checkpoints).
DeepSpeed clips gradients and updates weights when it is called. The loop computes the loss, handles micro-batches and
decides whether a step is applied. Only this module imports DeepSpeed.

``bf16: true`` has the meaning of DeepSpeed and transformers: the forward pass uses weights in bfloat16, and float32
copies are sharded. Several attributes of DeepSpeed that are used here are not documented; ``TESTED_VERSION`` is the
version that was tested. Tested with gloo on CPUs only.

Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
"""

# R ranks

from __future__ import annotations

import inspect
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.checkpoint.parts import Part
from burnish.checkpoint.shards import LocalShard
from burnish.config.errors import UserError
from burnish.loop.types import Loss
from burnish.parallel.accelerate_launch import mixed_precision
from burnish.parallel.deepspeed.settings import fill_settings, zero_stage
from burnish.parallel.deepspeed.shards import AdapterShards, FlatSlice, StateShards, WeightShards
from burnish.parallel.multi_process import MultiProcess, with_shards
from burnish.parallel.options import ParallelChoices
from burnish.parallel.single import set_precision
from burnish.utils.files import expand_user

TESTED_VERSION = "0.19"
_GENERATION_MODULE_ID = -1
"""Id of a module that uses a weight. ZeRO-3 releases a weight after the last module that uses it."""


class DeepSpeedParallel(MultiProcess):
    """ZeRO with DeepSpeed, in one of several processes."""

    is_sharded = True

    def __init__(self, options: ParallelChoices) -> None:
        super().__init__(options)
        self.dtype = None  # DeepSpeed converts the weights itself; autocast would revert this
        self.scaler, self.scales_loss = None, bool(mixed_precision(options) == "fp16" and self.device.type != "cpu")
        self.deepspeed = _library(self.device.type)
        self.runner: Any = None
        self.weights: list[nn.Parameter] = []  # trainable weights, in the order of the optimizer's groups
        self.empty_groups: dict[int, dict[str, Any]] = {}  # index -> a group without weights, which DeepSpeed drops
        self.offloaded: list[tuple[Tensor, Tensor | None]] = []  # weights whose gradients are in main memory
        self.stage = zero_stage(options)
        self.shards_weights = self.frees_weights = self.stage == 3

    def move_model(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Convert trainable weights only if DeepSpeed does not compute in half precision. Otherwise it keeps its own
        float32 copies, and moves this rank's shards itself.
        """
        if not self.options.pure_bf16 and mixed_precision(self.options) == "no":
            set_precision(model, trained_in)

    def ensure_on_device(self, model: nn.Module) -> None:
        return None

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        model, optimizer = super().prepare(model, optimizer)
        if optimizer is None:
            return model.to(self.device), None
        settings = fill_settings(self.options, _hidden_size(model), self.world_size, self.device.type == "cpu")
        self.weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        groups = enumerate(optimizer.param_groups)
        self.empty_groups = {number: dict(group) for number, group in groups if not group["params"]}
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it, also in a single process without a launcher
        gives_loss = inspect.signature(type(model).forward).return_annotation in (Loss, "Loss")
        self.runner, *_ = self.deepspeed.initialize(
            model=_AsTuple(model) if gives_loss else model, optimizer=optimizer, config=settings,
            dist_init_required=False,
        )  # fmt: skip
        if self.stage in (1, 2) and getattr(self.runner.optimizer, "cpu_offload", False):
            self.offloaded = [(part, part.grad) for part in self.runner.optimizer.single_partition_of_fp32_groups]
        if self.stage in (1, 2) and getattr(self.runner.optimizer, "round_robin_gradients", False):
            _link_in_storage_order(self.runner.optimizer)
        return (_FromTuple(self.runner, model) if gives_loss else self.runner), optimizer

    @contextmanager
    def microbatch(self, model: nn.Module, last: bool) -> Iterator[None]:
        if self.runner is not None and model.training:
            for part, gradient in self.offloaded:
                part.grad = gradient  # the optimizer's zero_grad removed it, and ZeRO copies gradients into it
            self.runner.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.runner.backward(loss, scale_wrt_gas=False)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """() the norm before clipping. DeepSpeed scales gradients during the update, to the ``max_grad_norm`` of its
        settings.
        """
        from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

        zero = self.runner.optimizer
        norm = zero.scaled_global_norm() if self.stage < 3 else combine_grad_norm_groups(zero._get_norm_groups())
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device) / zero.loss_scale
        return torch.where(norm < 0, torch.nan, norm)  # -1 means that the norm is not finite

    def step(self, optimizer: Optimizer, is_valid: Tensor) -> bool:
        applied = bool(self.sum((~is_valid).float()) == 0)  # a device read; DeepSpeed reads the norm anyway
        if applied:
            self.runner.step()
            return not (self.scales_loss and self.runner.optimizer.overflow)
        self._drop_gradients()
        return False

    def _drop_gradients(self) -> None:
        zero = self.runner.optimizer
        zero.zero_grad(set_to_none=True)
        for gradients in (getattr(zero, "averaged_gradients", {}), getattr(zero, "all_grad_tensors", {})):
            for group in gradients:
                gradients[group] = None
        if self.stage < 3:
            zero._release_preflattened_grad_buffers()
            zero.micro_step_id = -1

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = model.original if isinstance(model, _FromTuple) else getattr(model, "module", model)
        return super().unwrap(inner)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights on every rank, because responses have different lengths, and no rank must wait for
        another."""
        weights: list[Any] = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
        with self.other_modules(), self._gather(weights):
            for weight in weights:
                weight.ds_active_sub_modules.add(_GENERATION_MODULE_ID)
            try:
                yield
            finally:
                for weight in weights:
                    weight.ds_active_sub_modules.discard(_GENERATION_MODULE_ID)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        with self._gather([tensor]):
            return tensor.detach().clone()

    def _gather(self, tensors: Sequence[Tensor]) -> Any:
        lies_apart = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        return self.deepspeed.zero.GatheredParameters(lies_apart, enabled=bool(lies_apart))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def sharded_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        weights = WeightShards(self) if parts["model"].stem == "model" else AdapterShards(self)
        return with_shards(parts, weights, StateShards(self), lambda held: AdapterShards(self, list(held.parameters())))

    def local_shards(self, model: nn.Module) -> list[Tensor]:
        trained: list[Any] = [weight for weight in model.parameters() if weight.requires_grad]
        return [weight.ds_tensor.data for weight in trained]

    def reshard(self, model: nn.Module) -> None:
        if self.runner is not None:  # a script may save a model before it is trained
            self.runner.empty_partition_cache()

    @contextmanager
    def other_modules(self) -> Iterator[None]:
        """ZeRO-3 records the order in which modules are called, to prefetch their weights, and raises an error for
        another order, such as with a disabled adapter. So the recorded order is reset before and after the block.
        """
        self._forget_order()
        try:
            yield
        finally:
            self._forget_order()

    def _forget_order(self) -> None:
        if self.stage == 3 and self.runner is not None:
            coordinator = self.runner.optimizer.parameter_offload.get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    def place_of(self, weight: nn.Parameter) -> FlatSlice | None:
        """This rank's slice of a trainable weight in ZeRO's flat vector; None if it has none."""
        zero = self.runner.optimizer
        if self.stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(weight)]
            size = weight.ds_tensor.ds_numel  # type: ignore[attr-defined]
            begin = self.rank * size
            count = max(0, min(size, weight.ds_numel - begin))  # type: ignore[attr-defined]
            return FlatSlice(zero.fp32_partitioned_groups_flat[group], offset, begin, count)
        mapping = getattr(weight, "_hp_mapping", None)
        if mapping is None:
            return None
        here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
        flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
        return FlatSlice(flat, here.start, there.start, here.numel)

    def piece(self, weight: nn.Parameter, key: str = "") -> LocalShard:
        """This rank's slice of a weight, or of the optimizer state ``key`` of the weight."""
        place, shape = self.place_of(weight), tuple(getattr(weight, "ds_shape", weight.shape))
        if place is None:
            return LocalShard(torch.empty(0), 0, shape)
        flat = self.runner.optimizer.optimizer.state[place.flat][key] if key else place.flat
        return LocalShard(flat.detach()[place.offset : place.offset + place.length], place.begin, shape)

    def spread(self) -> None:
        """Update the weights of the forward pass from the float32 ones, after loading the latter."""
        zero = self.runner.optimizer
        if self.stage == 3:
            for weight in self.weights:
                place = self.place_of(weight)
                assert place is not None
                weight.ds_tensor.data[: place.length].copy_(  # type: ignore[attr-defined]
                    place.flat.detach()[place.offset : place.offset + place.length]
                )
        else:
            zero.update_lp_params()


class _AsTuple(nn.Module):
    """Wraps a module that returns a ``Loss`` to return a tuple, because DeepSpeed searches tuples and dicts for
    tensors.

    The wrapped module's forward pass is called inside this one's, so that weights used outside of its submodules (the
    head's) stay gathered for its whole duration.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> tuple[Any, ...]:
        loss = self.module.forward(batch)
        return loss.total, dict(loss.sums), loss.outputs


class _FromTuple(nn.Module):
    """The module that the loop calls: batch -> ``Loss``."""

    def __init__(self, runner: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.runner, self.original = runner, module

    def forward(self, batch: Any) -> Loss:
        return Loss(*self.runner(batch))


def _link_in_storage_order(zero: Any) -> None:
    """Link each weight to its float32 slice again.

    With ``round_robin_gradients`` DeepSpeed 0.19.8 stores weights in another order than that of their group, but looks
    them up in the order of the group unless they are padded (runtime/zero/stage_1_and_2.py, ``_link_all_hp_params``).
    """
    from deepspeed.utils import link_hp_params

    for number, weights in enumerate(zero.bit16_groups):
        pairs = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True)
        offsets = {id(weight): offset for weight, offset in pairs}
        processes = zero.real_dp_process_group[number]
        size = zero.bit16_groups_flat[number].numel() // dist.get_world_size(processes)
        link_hp_params(
            lp_param_list=weights, flat_hp_partition=zero.single_partition_of_fp32_groups[number],
            gradient_dict=zero.averaged_gradients, offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload, param_group_index=number,
            partition_start=dist.get_rank(processes) * size, partition_size=size, dp_group=processes,
            param_offsets=[offsets[id(weight)] for weight in weights],
        )  # fmt: skip


def _hidden_size(model: nn.Module) -> int:
    """The hidden size of the inner model, from its config; 1024 if it has none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    sizes = (getattr(config, "hidden_size", None) for config in configs)
    return next((size for size in sizes if isinstance(size, int)), 1024)


_OLD_LOCK_S = 120.0


def raise_if_locked(cache: Path) -> None:
    """Raise UserError for a stale lock of a compilation.

    A killed compilation leaves its lock in torch's extension cache, and every later start silently waits for it
    forever. A compilation takes less than a minute (40 s on two cores).

    Raises:
        UserError: with the lock to remove.
    """
    now = time.time()
    for lock in cache.glob("*/deepspeed_*/lock"):
        age_s = now - lock.stat().st_mtime
        if age_s > _OLD_LOCK_S:
            what = (
                f"DeepSpeed would wait for a compilation that began {age_s / 60:.0f} minutes ago and seems to have "
                "been killed."
            )
            raise UserError(what, where=str(lock), remedy=f"Remove the folder {lock.parent}, and start again.")


def _library(device_type: str) -> Any:
    """Import DeepSpeed for a device type, with fewer messages."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    raise_if_locked(expand_user(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")))
    # torch 2.13 renamed three collectives and warns of the old names in every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    if not version("deepspeed").startswith(TESTED_VERSION):
        logging.getLogger("burnish").warning(
            f"DeepSpeed {version('deepspeed')} is installed. burnish was tested with {TESTED_VERSION}; internal "
            "DeepSpeed attributes that burnish uses may have changed."
        )
    deepspeed.utils.logging.logger.setLevel("ERROR")
    return deepspeed
