"""DeepSpeed: ZeRO, which spreads optimizer states (1), gradients (2) and weights (3) over processes. The only door to
that library.

In: a model, an optimizer, the settings (``deepspeed_settings``). Out: the module that DeepSpeed runs; this rank's
pieces of weights and optimizer states, for a checkpoint that any other engine reads. DeepSpeed clips and moves weights
when it is told to; the loss, the micro-batches and the decision not to apply a step stay the loop's.

``bf16: true`` means here what it means to DeepSpeed and transformers: the forward pass runs on weights in bfloat16,
and float32 copies are spread over the processes. DeepSpeed keeps its affairs in attributes of weights and optimizers
that are not documented; the version that this was tested with is in ``TESTED``. Run on gloo and CPUs alone.

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
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.core.errors import Problem, UserError
from burnish.core.parts import Part
from burnish.core.pieces import Piece
from burnish.core.types import Loss, Stateful
from burnish.engine.base import set_precision
from burnish.engine.choices import EngineChoices
from burnish.engine.deepspeed_settings import filled, zero_stage
from burnish.engine.parallel import ParallelEngine, with_weights

TESTED = "0.19"
_USER = -1
"""Number of a module that uses a weight: ZeRO-3 lets go of a weight behind the last module that uses it."""


class DeepSpeedEngine(ParallelEngine):
    """One of several processes, under ZeRO."""

    is_sharded = True

    def __init__(self, options: EngineChoices) -> None:
        super().__init__(options)
        self.dtype = None  # DeepSpeed makes the weights what they are to be; autocast would undo it
        self.scaler, self.scales_loss = None, bool(options.fp16 and self.device.type != "cpu")
        self.deepspeed = _library(self.device.type)
        self.runner: Any = None
        self.weights: list[nn.Parameter] = []  # that train, in the order of the optimizer's groups
        self.empty_groups: dict[int, dict[str, Any]] = {}  # number -> a group without weights, which DeepSpeed drops
        self.offloaded: list[tuple[Tensor, Tensor | None]] = []  # weights of which the machine's memory has gradients
        self.stage = zero_stage(options)
        self.splits_weights = self.frees_weights = self.stage == 3

    def place(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """DeepSpeed moves this rank's parts, and keeps float32 copies of its own where it computes in half precision:
        weights are raised only where it does not."""
        if not (self.options.bf16 or self.options.pure_bf16 or self.options.fp16):
            set_precision(model, trained_in)

    def settle(self, model: nn.Module) -> None:
        return None

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        model, optimizer = super().prepare(model, optimizer)
        if optimizer is None:
            return model.to(self.device), None
        settings = filled(self.options, _hidden_size(model), self.world_size, self.device.type == "cpu")
        self.weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        groups = enumerate(optimizer.param_groups)
        self.empty_groups = {number: dict(group) for number, group in groups if not group["params"]}
        gives_loss = inspect.signature(type(model).forward).return_annotation in (Loss, "Loss")
        self.runner, *_ = self.deepspeed.initialize(
            model=_AsTuple(model) if gives_loss else model, optimizer=optimizer, config=settings,
            dist_init_required=False,
        )  # fmt: skip
        if self.stage in (1, 2) and getattr(self.runner.optimizer, "cpu_offload", False):
            self.offloaded = [(part, part.grad) for part in self.runner.optimizer.single_partition_of_fp32_groups]
        if self.stage in (1, 2) and getattr(self.runner.optimizer, "round_robin_gradients", False):
            _link_as_laid(self.runner.optimizer)
        return (_FromTuple(self.runner, model) if gives_loss else self.runner), optimizer

    @contextmanager
    def microbatch(self, model: nn.Module, last: bool) -> Iterator[None]:
        if self.runner is not None and model.training:
            for part, gradient in self.offloaded:
                part.grad = gradient  # which the optimizer's zero_grad took away, and ZeRO copies gradients into
            self.runner.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.runner.backward(loss, scale_wrt_gas=False)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """() the norm before clipping. Gradients are scaled when the update is made, to the ``max_grad_norm`` that the
        settings were filled with."""
        zero = self.runner.optimizer
        norm = zero.scaled_global_norm() if self.stage < 3 else _combined(zero._get_norm_groups())
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device) / zero.loss_scale
        return torch.where(norm < 0, torch.nan, norm)  # -1 stands for a norm that is not finite

    def step(self, optimizer: Optimizer, is_finite: Tensor) -> bool:
        applied = bool(self.sum((~is_finite).float()) == 0)  # a read; DeepSpeed reads the norm anyway
        if applied:
            self.runner.step()
            return not (self.scales_loss and self.runner.optimizer.overflow)
        self._drop_gradients()
        return False

    def _drop_gradients(self) -> None:
        zero = self.runner.optimizer
        zero.zero_grad(set_to_none=True)
        for held in (getattr(zero, "averaged_gradients", {}), getattr(zero, "all_grad_tensors", {})):
            for group in held:
                held[group] = None
        if self.stage < 3:
            zero._release_preflattened_grad_buffers()
            zero.micro_step_id = -1

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = model.given if isinstance(model, _FromTuple) else getattr(model, "module", model)
        return super().unwrap(inner)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        """Whole weights on every rank: answers end at different lengths, and no rank waits for another's."""
        weights: list[Any] = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
        with self.other_modules(), self._gathered(weights):
            for weight in weights:
                weight.ds_active_sub_modules.add(_USER)
            try:
                yield
            finally:
                for weight in weights:
                    weight.ds_active_sub_modules.discard(_USER)

    def whole(self, tensor: Tensor) -> Tensor:
        with self._gathered([tensor]):
            return tensor.detach().clone()

    def _gathered(self, tensors: Sequence[Tensor]) -> Any:
        lies_apart = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        return self.deepspeed.zero.GatheredParameters(lies_apart, enabled=bool(lies_apart))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def sharded(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        found = dict(parts)
        is_adapter = parts["model"].stem != "model"
        weights = AdapterShards(self) if is_adapter else WeightShards(self)
        found["model"] = replace(parts["model"], shards=weights, is_collective=is_adapter)
        if "optimizer" in parts:
            found["optimizer"] = replace(parts["optimizer"], shards=StateShards(self))
        for name in with_weights(parts):
            of_part: Any = parts[name].held
            shards = AdapterShards(self, list(of_part.parameters()))
            found[name] = replace(parts[name], shards=shards, is_collective=True)
        return found

    def pieces(self, model: nn.Module) -> list[Tensor]:
        trained: list[Any] = [weight for weight in model.parameters() if weight.requires_grad]
        return [weight.ds_tensor.data for weight in trained]

    def drop_gathered(self, model: nn.Module) -> None:
        self.runner.empty_partition_cache()

    @contextmanager
    def other_modules(self) -> Iterator[None]:
        """ZeRO-3 learns the order in which modules are called, to fetch their weights ahead, and takes another one for
        an error where an adapter is off: it learns anew at both ends."""
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

    def place_of(self, weight: nn.Parameter) -> Place | None:
        """This rank's stretch of a weight that trains, in the vector in which ZeRO keeps it; None where it has none."""
        zero = self.runner.optimizer
        if self.stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(weight)]
            size = weight.ds_tensor.ds_numel  # type: ignore[attr-defined]
            begin = self.rank * size
            count = max(0, min(size, weight.ds_numel - begin))  # type: ignore[attr-defined]
            return Place(zero.fp32_partitioned_groups_flat[group], offset, begin, count)
        mapping = getattr(weight, "_hp_mapping", None)
        if mapping is None:
            return None
        here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
        flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
        return Place(flat, here.start, there.start, here.numel)

    def piece(self, weight: nn.Parameter, key: str = "") -> Piece:
        """This rank's stretch of a weight, or of a state that the optimizer keeps for it."""
        place, shape = self.place_of(weight), tuple(getattr(weight, "ds_shape", weight.shape))
        if place is None:
            return Piece(torch.empty(0), 0, shape)
        flat = self.runner.optimizer.optimizer.state[place.flat][key] if key else place.flat
        return Piece(flat.detach()[place.offset : place.offset + place.length], place.begin, shape)

    def spread(self) -> None:
        """The forward pass's weights from the float32 ones, after those were loaded."""
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


class Place(NamedTuple):
    """A stretch of a weight within one of ZeRO's long vectors."""

    flat: Tensor
    offset: int  # in the vector
    begin: int  # in the weight, laid flat
    length: int


class WeightShards:
    """A whole model between ZeRO and a checkpoint: float32 where it trains."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def state_dict(self, held: Any) -> dict[str, Any]:
        trains = {id(weight) for weight in self.engine.weights}
        return {
            name: self.engine.piece(weight) if id(weight) in trains else self._still(weight)
            for name, weight in _named_once(held.model).items()
        }

    def _still(self, weight: Any) -> Any:
        """A weight that does not train, or a buffer."""
        if not hasattr(weight, "ds_tensor"):
            return weight.detach()
        size, own = weight.ds_tensor.ds_numel, weight.ds_tensor.data.flatten()
        count = max(0, min(size, weight.ds_numel - self.engine.rank * size))
        return Piece(own[:count], self.engine.rank * size, tuple(weight.ds_shape))

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        weights = _named_once(held.model)
        _raise_unless_same(weights, state)
        trains = {id(weight) for weight in self.engine.weights}
        for name, weight in weights.items():
            if id(weight) in trains:
                place = self.engine.place_of(weight)
                if place is not None:
                    part = state[name].stretch(place.begin, place.length)
                    place.flat.data[place.offset : place.offset + place.length].copy_(part)
            elif not hasattr(weight, "ds_tensor"):
                weight.data.copy_(state[name].whole())
        self.engine.spread()


class AdapterShards:
    """An adapter, which is small: gathered to be written, and loaded whole on every rank.

    Args:
        weights: that are gathered, all that train if not given.
    """

    def __init__(self, engine: DeepSpeedEngine, weights: Sequence[nn.Parameter] | None = None) -> None:
        self.engine, self.weights = engine, weights

    def state_dict(self, held: Stateful) -> dict[str, Any]:
        with self._whole():
            return {name: value.detach().clone() for name, value in held.state_dict().items()}

    def load_state_dict(self, held: Stateful, state: Mapping[str, Any]) -> None:
        with self._whole(writes=True):
            held.load_state_dict({name: value.whole() for name, value in state.items()})

    @contextmanager
    def _whole(self, writes: bool = False) -> Iterator[None]:
        """Inside it the weights that train are whole and float32; what was written to them is taken over."""
        engine, weights = self.engine, self.engine.weights if self.weights is None else self.weights
        before = [weight.data for weight in weights]
        get, put = engine.deepspeed.utils.safe_get_full_fp32_param, engine.deepspeed.utils.safe_set_full_fp32_param
        for weight in weights:
            weight.data = get(weight).reshape(getattr(weight, "ds_shape", weight.shape))
        try:
            yield
        finally:
            for weight, data in zip(weights, before, strict=True):
                given, weight.data = weight.data, data
                if writes:
                    put(weight, given)
            if writes:
                engine.spread()


class StateShards:
    """The states of the optimizer, numbered as torch numbers them, between ZeRO and a checkpoint."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def state_dict(self, held: Any) -> dict[str, Any]:
        states = {number: self._states_of(weight) for number, weight in enumerate(self.engine.weights)}
        return {"state": {number: own for number, own in states.items() if own}, "param_groups": self._groups(held)}

    def _states_of(self, weight: nn.Parameter) -> dict[str, Any]:
        """A copy of each counter, since an optimizer that loads them counts each by itself; of what is as long as the
        weight, this rank's stretch."""
        place, states = self.engine.place_of(weight), self.engine.runner.optimizer.optimizer.state
        kept = states.get(place.flat, {}) if place else next((own for own in states.values() if own), {})
        return {key: self.engine.piece(weight, key) if value.dim() else value.clone() for key, value in kept.items()}

    def _groups(self, held: Any) -> list[dict[str, Any]]:
        numbers = {id(weight): number for number, weight in enumerate(self.engine.weights)}
        found = []
        for group, own in zip(held.param_groups, self._weights_by_group(held), strict=True):
            settings = {name: value for name, value in group.items() if name != "params"}
            found.append({**settings, "params": [numbers[id(weight)] for weight in own]})
        for number, group in sorted(self.engine.empty_groups.items()):
            found.insert(number, {**group, "lr": held.param_groups[0]["lr"]})
        return found

    def _weights_by_group(self, held: Any) -> list[list[nn.Parameter]]:
        rest, found = list(self.engine.weights), []
        for group in held.param_groups:
            count = len(group.get("param_names", rest))
            found.append(rest[:count])
            rest = rest[count:]
        return found

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        with_weights = [group for group in state["param_groups"] if group["params"]]
        for group, given in zip(held.param_groups, with_weights, strict=True):
            group.update({name: value for name, value in given.items() if name not in ("params", "param_names")})
        states = self.engine.runner.optimizer.optimizer.state
        for number, weight in enumerate(self.engine.weights):
            place, given = self.engine.place_of(weight), state["state"].get(number)
            if place is None or given is None:
                continue
            kept = states[place.flat]
            for key, value in given.items():
                if prod(value.shape) == 1 and not len(value.shape):
                    kept[key] = value.whole()
                    continue
                flat = kept.setdefault(key, torch.zeros_like(place.flat, dtype=value.dtype, requires_grad=False))
                flat[place.offset : place.offset + place.length].copy_(value.stretch(place.begin, place.length))


def _named_once(model: nn.Module) -> dict[str, Any]:
    """Every weight and stored buffer; a tied weight once, under its first name, as ``adapters.base`` has it."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _raise_unless_same(weights: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    apart = [
        name for name in weights.keys() | state.keys()
        if name not in weights or name not in state
        or tuple(getattr(weights[name], "ds_shape", weights[name].shape)) != tuple(state[name].shape)
    ]  # fmt: skip
    if apart:
        raise UserError(
            Problem(
                f"the weights of the checkpoint are not this model's: {', '.join(sorted(apart)[:3])}.",
                remedy="Continue with the model and the adapter options that the checkpoint was written with.",
            )
        )


class _AsTuple(nn.Module):
    """A module that gives a ``Loss``, as one that gives a tuple: DeepSpeed looks for tensors in tuples and dicts.

    The module's forward pass is called within this one's, so that weights which it uses beside its own modules (the
    head's) are fetched for the whole of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> tuple[Any, ...]:
        loss = self.module.forward(batch)
        return loss.total, dict(loss.sums), loss.outputs


class _FromTuple(nn.Module):
    """The module that the loop calls: from a batch to a ``Loss``."""

    def __init__(self, runner: nn.Module, given: nn.Module) -> None:
        super().__init__()
        self.runner, self.given = runner, given

    def forward(self, batch: Any) -> Loss:
        return Loss(*self.runner(batch))


def _link_as_laid(zero: Any) -> None:
    """Tell each weight again where its float32 stretch is.

    Under ``round_robin_gradients`` DeepSpeed 0.19.8 lays weights in another order than they have in their group, and
    looks for them in that of the group unless they are padded (runtime/zero/stage_1_and_2.py, ``_link_all_hp_params``).
    """
    from deepspeed.utils import link_hp_params

    for number, weights in enumerate(zero.bit16_groups):
        laid = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True)
        offsets = {id(weight): offset for weight, offset in laid}
        processes = zero.real_dp_process_group[number]
        size = zero.bit16_groups_flat[number].numel() // dist.get_world_size(processes)
        link_hp_params(
            lp_param_list=weights, flat_hp_partition=zero.single_partition_of_fp32_groups[number],
            gradient_dict=zero.averaged_gradients, offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload, param_group_index=number,
            partition_start=dist.get_rank(processes) * size, partition_size=size, dp_group=processes,
            param_offsets=[offsets[id(weight)] for weight in weights],
        )  # fmt: skip


def _combined(norms: Any) -> Any:
    from deepspeed.runtime.zero.stage3 import combine_grad_norm_groups

    return combine_grad_norm_groups(norms)


def _hidden_size(model: nn.Module) -> int:
    """The hidden size of the model inside, from its config; 1024 where it has none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    sizes = (getattr(config, "hidden_size", None) for config in configs)
    return next((size for size in sizes if isinstance(size, int)), 1024)


_OLD_LOCK_S = 120.0


def raise_if_locked(cache: Path) -> None:
    """A compilation that was killed leaves its lock in torch's cache of extensions, and every later start waits for it
    without a word and without end. One takes under a minute (40 s on two cores).

    Raises:
        UserError: with the lock to remove.
    """
    now = time.time()
    for lock in cache.glob("*/deepspeed_*/lock"):
        age_s = now - lock.stat().st_mtime
        if age_s > _OLD_LOCK_S:
            raise UserError(
                Problem(
                    f"DeepSpeed would wait for a compilation that began {age_s / 60:.0f} minutes ago and seems to have "
                    "been killed.",
                    where=str(lock),
                    remedy=f"Remove the folder {lock.parent}, and start again.",
                )
            )


def _library(device_type: str) -> Any:
    """DeepSpeed, told the device before it is loaded, and quiet."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    raise_if_locked(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser())
    # torch 2.13 has other names for three collectives, and warns of the old ones at every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    if not version("deepspeed").startswith(TESTED):
        logging.getLogger("burnish").warning(
            f"DeepSpeed is {version('deepspeed')}; burnish was tested with {TESTED}, and reads attributes of it that "
            "may have changed."
        )
    deepspeed.utils.logging.logger.setLevel("ERROR")
    return deepspeed
