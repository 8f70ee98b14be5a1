"""Fully sharded data parallelism (FSDP2): each process holds a shard of every weight, gradient and optimizer state.

In: a model, and an optimizer over its weights, in each process. Out: the same model with torch's ``fully_shard``
applied to each layer of its stacks and to the rest; the optimizer over this rank's shards. A layer's weights are
gathered before it runs and released after it, so a process holds one whole layer in addition to its shards.

A step gives the same result as with one process, up to rounding. Gradients are reduced in float32, and clipped by the
norm of the whole model. Tested with gloo on CPUs; not tested on several GPUs.

Source: torch.distributed.fsdp.fully_shard, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import register_pytree_node

from burnish.checkpoint.parts import Part, Stateful
from burnish.checkpoint.shards import LocalShard, ShardedTensor
from burnish.config.errors import UserError, did_you_mean
from burnish.loop.types import Loss
from burnish.parallel.fsdp.settings import FsdpSettings, fsdp_settings
from burnish.parallel.multi_process import MultiProcess, with_shards
from burnish.parallel.options import ParallelChoices
from burnish.parallel.single import layers_of

# fully_shard searches a module's output for tensors, to hook into the backward pass.
register_pytree_node(
    Loss,
    lambda loss: ([loss.total, dict(loss.sums), loss.outputs], None),
    lambda parts, _: Loss(*parts),
    serialized_type_name="burnish.loop.types.Loss",
)


class FsdpParallel(MultiProcess):
    """FSDP in one of several processes."""

    def __init__(self, options: ParallelChoices) -> None:
        super().__init__(options)
        self.settings = fsdp_settings(options)
        self.trained_in: torch.dtype | None = None
        self.checkpoints_layers = self.settings.checkpoints
        self.mesh = _mesh(self.settings, self.device.type, self.world_size)

    def move_model(self, model: nn.Module, trained_in: torch.dtype) -> None:
        """Store ``trained_in`` only. ``fully_shard`` moves this rank's shards layer by layer, and each layer is
        converted just before. Until then weights are memory-mapped, and all processes of a machine share them.
        """
        self.trained_in = trained_in

    def ensure_on_device(self, model: nn.Module) -> None:
        return None

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        if isinstance(model, FSDPModule):  # a script calls train() again
            return model, optimizer
        model, optimizer = super().prepare(model, optimizer)
        before = dict(model.named_parameters(remove_duplicate=False))
        self.shard(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        if optimizer is not None:
            replace_parameters(optimizer, {id(parameter): after[name] for name, parameter in before.items()})
        return model, optimizer

    def shard(self, model: nn.Module) -> None:
        """Shard the layers first, then the remaining modules: embeddings, head, the last norm."""
        is_away = self.settings.offloads and self.device.type != "cpu"
        arguments: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if is_away else OffloadPolicy(),
        }
        for module in _wrapped_alone(model, self.settings):
            self._raise(module)
            fully_shard(module, reshard_after_forward=self.settings.reshards, **arguments)
        self._raise(model)
        # The root is used at both ends of a forward pass. If released in between, it would be gathered again.
        fully_shard(model, reshard_after_forward=False, **arguments)

    def _raise(self, module: nn.Module) -> None:
        """Convert the unsharded trainable weights of ``module`` to the training dtype. The memory of the whole layer is
        freed when it is sharded.
        """
        for parameter in module.parameters():
            if self.trained_in is not None and parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(self.trained_in)

    # Gradients are reduced after each micro-batch. If kept until the last one, each process would hold all of them.

    def local(self, gradient: Tensor) -> Tensor:
        return local(gradient)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """() the norm over the shards of all ranks, in float32."""
        square = super().total_norm(gradients).square()
        dist.all_reduce(square, group=self.mesh["shard"].get_group())
        return square.sqrt()

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[None]:
        """Context for generation with gathered weights on every rank, so that no rank waits for another's responses."""
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded[:1]:
            # Before the first step a layer would be called first here, and torch would take it for the root.
            module._get_fsdp_state()._lazy_init()
        for module in sharded:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_reshard_after_forward(self.settings.reshards and module is not model, recurse=False)
                module.reshard()

    is_sharded = True
    shards_weights = True

    def sharded_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        weights = ModelShards(gathers=parts["model"].stem != "model")
        return with_shards(parts, weights, OptimizerShards(), lambda held: ModelShards(gathers=True))

    def local_shards(self, model: nn.Module) -> list[Tensor]:
        return [local(weight.detach()) for weight in model.parameters() if weight.requires_grad]

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return _gather(tensor)  # type: ignore[no-any-return]


class ModelShards:
    """Converts between the weights and this rank's shards.

    Args:
        gathers: gather whole weights, for a file that only rank 0 writes.
    """

    def __init__(self, gathers: bool = False) -> None:
        self.gathers = gathers

    def state_dict(self, held: Stateful) -> dict[str, Any]:
        state = held.state_dict()
        return {name: _gather(value) if self.gathers else local_shard_of(value) for name, value in state.items()}

    def load_state_dict(self, held: Stateful, state: Mapping[str, Any]) -> None:
        current = held.state_dict()
        held.load_state_dict({name: place_tensor(value, current.get(name)) for name, value in state.items()})


class OptimizerShards:
    """Converts between the states of the optimizer and this rank's shards."""

    def state_dict(self, held: Any) -> dict[str, Any]:
        state = held.state_dict()
        states = {
            number: {name: local_shard_of(value) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        return {**state, "state": states}

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        """Load states. A state with the shape of its weight is sharded like the weight."""
        weights = [weight for group in held.param_groups for weight in group["params"]]
        states = {
            number: {name: place_tensor(value, weights[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        held.load_state_dict({**state, "state": states})


def local_shard_of(value: Any) -> Any:
    """This rank's piece of a sharded tensor. Other values are returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    shard, begin = local(value.detach()), _first_element_of_shard(value)
    is_copy = begin is None  # another replica stores the same shard
    return LocalShard(shard.flatten()[:0] if is_copy else shard, begin or 0, tuple(value.shape))


def place_tensor(value: Any, like: Any) -> Any:
    """Convert a checkpoint's tensor to this rank's form: a shard if ``like`` is sharded, else the whole tensor."""
    if not isinstance(value, ShardedTensor):
        return value
    if not isinstance(like, DTensor) or like.shape != value.shape:
        return value.full_tensor()
    shard = local(like.detach())
    width = prod(like.shape[1:])
    rows, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = value.slice_of(offset[0] * width if rows[0] else 0, shard.numel()).reshape(shard.shape).to(shard.device)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _first_element_of_shard(tensor: DTensor) -> int | None:
    """Position of the first element of this rank's rows; None if an earlier replica has the same rows."""
    where = tensor.device_mesh.get_coordinate() or [0]
    if len(where) == 2 and where[0] > 0:
        return None
    rows, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * prod(tensor.shape[1:]) if rows[0] else 0


def _gather(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replace_parameters(optimizer: Optimizer, moved: Mapping[int, nn.Parameter]) -> None:
    """Make the optimizer update the sharded weights instead of the original ones.

    Args:
        optimizer: the optimizer, without state.
        moved: ``id`` of a weight -> its sharded replacement.

    Raises:
        UserError: if it already has a state, which only the optimizer itself could shard.
    """
    if optimizer.state:
        raise UserError(
            f"The optimizer {type(optimizer).__name__} creates its states from full weights, but fsdp shards them.",
            remedy="Set optim: adamw_torch_fused.",
        )
    for group in optimizer.param_groups:
        group["params"] = [moved[id(parameter)] for parameter in group["params"]]


def _mesh(settings: FsdpSettings, device_type: str, world_size: int) -> DeviceMesh:
    """The device mesh: a dimension of shards, preceded by a dimension of replicas if there are several."""
    copies = settings.copies
    if copies is None:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    copies = copies or world_size // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if world_size % copies:
        raise UserError(f"{world_size} processes cannot be divided into {copies} replicas of a sharded model.")
    return init_device_mesh(device_type, (copies, world_size // copies), mesh_dim_names=("copy", "shard"))


def _wrapped_alone(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first."""
    if settings.layer_classes:
        names = {type(module).__name__ for module in model.modules()}
        for class_name in settings.layer_classes:
            if class_name not in names:
                raise UserError(
                    f'fsdp_config: "transformer_layer_cls_to_wrap" names {class_name}, but the model has no such '
                    f"layer.{did_you_mean(class_name, names)}",
                    remedy="Remove it: layers are detected automatically.",
                    option="fsdp_config",
                )
        wrapped = [module for module in model.modules() if type(module).__name__ in settings.layer_classes]
        return wrapped[::-1]
    if settings.min_num_params:
        modules: list[nn.Module] = []
        _select_modules(model, model, settings.min_num_params, modules)
        return modules
    return layers_of(model)


def _select_modules(module: nn.Module, model: nn.Module, least: int, selected: list[nn.Module]) -> int:
    """Append modules with at least ``least`` parameters to ``selected``, inner ones first. Returns the number of
    parameters of ``module`` outside of them."""
    inside = sum(_select_modules(child, model, least, selected) for child in module.children())
    remaining = sum(p.numel() for p in module.parameters(recurse=False)) + inside
    if remaining < least or module is model or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return remaining
    selected.append(module)
    return 0
