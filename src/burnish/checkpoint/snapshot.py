"""Split a state dict into tensors (safetensors) and JSON data. Neither file contains code.

``join(*split(state)) == state`` exactly, for dicts (with simple hashable keys), lists, tuples, numbers, strings, None
and tensors. Other values are refused, because they would require pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from burnish.checkpoint.shards import LocalShard

LARGE_BYTES = 1 << 20
"""Tensors above this size are copied in the background, because training would wait for the copy otherwise."""
_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


def split(state: Any, *, copy: bool = True, leave_large: bool = False) -> tuple[dict[str, Any], Any]:
    """Split a state into tensors (or this rank's pieces) by path, and JSON data that refers to them.

    Args:
        state: a nested state dict.
        copy: copy tensors to the CPU, so that training may continue while they are written.
        leave_large: do not copy tensors above ``LARGE_BYTES`` yet; ``copy_large`` does it later.

    Raises:
        TypeError: for a value that is neither data nor a tensor, with its path.
    """
    splitter = _Splitter(copy, leave_large)
    data = splitter.without_tensors(state, "")
    return splitter.tensors, data


class _Splitter:
    """The tensors that were found in a state so far. (A nested function that calls itself would be a reference cycle,
    which would keep the copies until a garbage collection.)"""

    def __init__(self, copy: bool, leave_large: bool) -> None:
        self.copy, self.leave_large = copy, leave_large
        self.tensors: dict[str, Tensor | LocalShard] = {}
        self.first_at: dict[Any, str] = {}  # path under which a shared tensor is written, once

    def without_tensors(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON data in which the paths of tensors replace them."""
        if isinstance(value, Tensor | LocalShard):
            while path in self.tensors:  # keys with a dot, and numbers beside their text, can give equal paths
                path += "_"
            place = self.first_at.setdefault(_tensor_key(value) or path, path)
            if place == path:
                is_large = self.leave_large and value.nbytes > LARGE_BYTES
                is_copied = (self.copy and not is_large) or _may_share_storage(value)
                self.tensors[path] = _cpu_copy(value) if is_copied else value.detach()
            return {_TENSOR: place}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value) and not {_TENSOR, _PAIRS, _TUPLE} & set(value):
                return {
                    key: self.without_tensors(item, f"{path}.{key}" if path else key) for key, item in value.items()
                }
            pairs = [
                [self.without_tensors(key, f"{path}.key"), self.without_tensors(item, f"{path}.{key}")]
                for key, item in value.items()
            ]
            return {_PAIRS: pairs}
        if isinstance(value, list | tuple):
            items = [self.without_tensors(item, f"{path}.{index}") for index, item in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        raise TypeError(
            f"{path or 'state'} contains an object of type {type(value).__name__}; checkpoints may contain only data "
            "and tensors."
        )


def join(tensors: Mapping[str, Any], data: Any) -> Any:
    """Rebuild the state from the result of ``split``."""
    if isinstance(data, list):
        return [join(tensors, item) for item in data]
    if not isinstance(data, dict):
        return data
    if _TENSOR in data:
        return tensors[data[_TENSOR]]
    if _PAIRS in data:
        return {join(tensors, key): join(tensors, item) for key, item in data[_PAIRS]}
    if _TUPLE in data:
        return tuple(join(tensors, item) for item in data[_TUPLE])
    return {key: join(tensors, item) for key, item in data.items()}


def named_tensors_without_duplicates(model: nn.Module, left_out: Collection[str] = ()) -> dict[str, Tensor]:
    """Every weight and persistent buffer of a model, without copies. A shared tensor is listed under its first name
    only.
    """
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen and name not in left_out:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _tensor_key(tensor: Tensor | LocalShard) -> Any:
    """A key that is equal for two names of the same tensor, such as the shared code table of 8-bit moments. None if the
    tensor is empty or has no address.
    """
    if (
        not isinstance(tensor, Tensor)
        or not tensor.numel()
        or tensor.layout is not torch.strided
        or tensor.device.type == "meta"
    ):
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _may_share_storage(tensor: Tensor | LocalShard) -> bool:
    """Whether other tensors may share its storage, which a file cannot express."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def copy_large(tensors: dict[str, Any]) -> None:
    """Replace the tensors that ``split`` did not copy with copies."""
    for path, tensor in tensors.items():
        if tensor.nbytes > LARGE_BYTES:
            tensors[path] = _cpu_copy(tensor)


def _cpu_copy(tensor: Any) -> Any:
    """A contiguous copy on the CPU. From a GPU the copy is the transfer itself."""
    if isinstance(tensor, LocalShard):
        return replace(tensor, tensor=_cpu_copy(tensor.tensor))
    tensor = tensor.detach()
    on_cpu = tensor.to("cpu")
    return (on_cpu.clone() if on_cpu.data_ptr() == tensor.data_ptr() else on_cpu).contiguous()


def rng_state() -> dict[str, Any]:
    """The state of every global generator of this process: Python's, numpy's if it is loaded, torch's."""
    import random
    import sys

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to the result of ``rng_state``."""
    import random

    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, numbers, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, numbers.numpy().astype("uint32"), position, has_gauss, gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
