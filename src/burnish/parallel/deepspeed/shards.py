"""Convert the shards of a model under ZeRO for checkpoints that any other backend can read.

In: the backend, which knows this rank's slice of each weight in ZeRO's flat vectors. Out: the state of each part of a
run as pieces, and back. Refuses a checkpoint of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Stateful
from burnish.checkpoint.shards import LocalShard
from burnish.checkpoint.snapshot import named_tensors_without_duplicates
from burnish.config.errors import UserError


class FlatSlice(NamedTuple):
    """A slice of a weight in one of ZeRO's flat vectors."""

    flat: Tensor
    offset: int  # in the flat vector
    begin: int  # in the flattened weight
    length: int


class ZeroVectors(Protocol):
    """The methods of the backend (``parallel.py``) that give access to ZeRO's flat vectors."""

    deepspeed: Any
    runner: Any
    rank: int
    weights: list[nn.Parameter]
    empty_groups: dict[int, dict[str, Any]]

    def place_of(self, weight: nn.Parameter) -> FlatSlice | None: ...
    def piece(self, weight: nn.Parameter, key: str = ...) -> LocalShard: ...
    def spread(self) -> None: ...


class WeightShards:
    """Converts a whole model between ZeRO and a checkpoint. Trainable weights are float32."""

    def __init__(self, engine: ZeroVectors) -> None:
        self.engine = engine

    def state_dict(self, held: Any) -> dict[str, Any]:
        trains = {id(weight) for weight in self.engine.weights}
        weights: dict[str, Any] = named_tensors_without_duplicates(held.model)
        return {
            name: self.engine.piece(weight) if id(weight) in trains else self._of_frozen(weight)
            for name, weight in weights.items()
        }

    def _of_frozen(self, weight: Any) -> Any:
        """A frozen weight or a buffer."""
        if not hasattr(weight, "ds_tensor"):
            return weight.detach()
        size, shard = weight.ds_tensor.ds_numel, weight.ds_tensor.data.flatten()
        count = max(0, min(size, weight.ds_numel - self.engine.rank * size))
        return LocalShard(shard[:count], self.engine.rank * size, tuple(weight.ds_shape))

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        weights: dict[str, Any] = named_tensors_without_duplicates(held.model)
        _raise_unless_same(weights, state)
        trains = {id(weight) for weight in self.engine.weights}
        for name, weight in weights.items():
            if id(weight) in trains:
                place = self.engine.place_of(weight)
                if place is not None:
                    part = state[name].slice_of(place.begin, place.length)
                    place.flat.data[place.offset : place.offset + place.length].copy_(part)
            elif not hasattr(weight, "ds_tensor"):
                weight.data.copy_(state[name].full_tensor())
        self.engine.spread()


class AdapterShards:
    """Converts an adapter, which is small: gathered for saving, and loaded completely on every rank.

    Args:
        engine: processes and devices of the run.
        weights: the weights to gather. Default: all trainable ones.
    """

    def __init__(self, engine: ZeroVectors, weights: Sequence[nn.Parameter] | None = None) -> None:
        self.engine, self.weights = engine, weights

    def state_dict(self, held: Stateful) -> dict[str, Any]:
        with self._whole():
            return {name: value.detach().clone() for name, value in held.state_dict().items()}

    def load_state_dict(self, held: Stateful, state: Mapping[str, Any]) -> None:
        with self._whole(writes=True):
            held.load_state_dict({name: value.full_tensor() for name, value in state.items()})

    @contextmanager
    def _whole(self, writes: bool = False) -> Iterator[None]:
        """Context in which the trainable weights are gathered in float32. With ``writes``, changes are kept."""
        engine, weights = self.engine, self.engine.weights if self.weights is None else self.weights
        before = [weight.data for weight in weights]
        get, put = engine.deepspeed.utils.safe_get_full_fp32_param, engine.deepspeed.utils.safe_set_full_fp32_param
        for weight in weights:
            weight.data = get(weight).reshape(getattr(weight, "ds_shape", weight.shape))
        try:
            yield
        finally:
            for weight, data in zip(weights, before, strict=True):
                original, weight.data = weight.data, data
                if writes:
                    put(weight, original)
            if writes:
                engine.spread()


class StateShards:
    """Converts the optimizer's states, numbered as in torch, between ZeRO and a checkpoint."""

    def __init__(self, engine: ZeroVectors) -> None:
        self.engine = engine

    def state_dict(self, held: Any) -> dict[str, Any]:
        states = {number: self._states_of(weight) for number, weight in enumerate(self.engine.weights)}
        return {
            "state": {number: values for number, values in states.items() if values},
            "param_groups": self._groups(held),
        }

    def _states_of(self, weight: nn.Parameter) -> dict[str, Any]:
        """This rank's slice of each state with the length of the weight. Step counters are copied, because an optimizer
        that loads them increments each separately.
        """
        place, states = self.engine.place_of(weight), self.engine.runner.optimizer.optimizer.state
        state = states.get(place.flat, {}) if place else next((values for values in states.values() if values), {})
        return {key: self.engine.piece(weight, key) if value.dim() else value.clone() for key, value in state.items()}

    def _groups(self, held: Any) -> list[dict[str, Any]]:
        numbers = {id(weight): number for number, weight in enumerate(self.engine.weights)}
        groups = []
        for group, members in zip(held.param_groups, self._weights_by_group(held), strict=True):
            settings = {name: value for name, value in group.items() if name != "params"}
            groups.append({**settings, "params": [numbers[id(weight)] for weight in members]})
        for number, group in sorted(self.engine.empty_groups.items()):
            groups.insert(number, {**group, "lr": held.param_groups[0]["lr"]})
        return groups

    def _weights_by_group(self, held: Any) -> list[list[nn.Parameter]]:
        rest, groups = list(self.engine.weights), []
        for group in held.param_groups:
            count = len(group.get("param_names", rest))
            groups.append(rest[:count])
            rest = rest[count:]
        return groups

    def load_state_dict(self, held: Any, state: Mapping[str, Any]) -> None:
        with_weights = [group for group in state["param_groups"] if group["params"]]
        for group, saved in zip(held.param_groups, with_weights, strict=True):
            group.update({name: value for name, value in saved.items() if name not in ("params", "param_names")})
        states = self.engine.runner.optimizer.optimizer.state
        for number, weight in enumerate(self.engine.weights):
            place, saved = self.engine.place_of(weight), state["state"].get(number)
            if place is None or saved is None:
                continue
            state_of_weight = states[place.flat]
            for key, value in saved.items():
                if prod(value.shape) == 1 and not len(value.shape):
                    state_of_weight[key] = value.full_tensor()
                    continue
                flat = state_of_weight.setdefault(
                    key, torch.zeros_like(place.flat, dtype=value.dtype, requires_grad=False)
                )
                flat[place.offset : place.offset + place.length].copy_(value.slice_of(place.begin, place.length))


def _raise_unless_same(weights: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    apart = [
        name for name in weights.keys() | state.keys()
        if name not in weights or name not in state
        or tuple(getattr(weights[name], "ds_shape", weights[name].shape)) != tuple(state[name].shape)
    ]  # fmt: skip
    if apart:
        raise UserError(
            f"the weights of the checkpoint do not match this model: {', '.join(sorted(apart)[:3])}.",
            remedy="Use the model and the adapter options that the checkpoint was saved with.",
        )
