"""A state dict as two files that hold no code: tensors in safetensors, everything else in JSON.

``split`` takes a nested state apart, ``join`` puts it together again; ``join(*split(state)) == state`` to the bit, for
dicts (with any hashable simple keys), lists, tuples, numbers, strings, None and tensors. Anything else is refused: what
cannot be written without a pickle does not belong in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LARGE_BYTES = 1 << 20
"""A tensor above this takes long enough to copy that training is not held up for it."""
_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


def split(state: Any, *, copy: bool = True, leave_large: bool = False) -> tuple[dict[str, Tensor], Any]:
    """The tensors by path, and the rest as JSON data in which each tensor is named.

    Args:
        copy: take copies on the CPU, so that training may go on while they are written.
        leave_large: but for tensors above ``LARGE_BYTES``, which ``copy_large`` copies later.
    Raises:
        TypeError: for a value that is neither data nor a tensor, with its path.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            is_copied = copy and not (leave_large and value.nbytes > LARGE_BYTES)
            tensors[path] = _copied(value) if is_copied else value.detach()
            return {_TENSOR: path}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value) and not {_TENSOR, _PAIRS, _TUPLE} & set(value):
                return {key: walk(item, f"{path}.{key}" if path else key) for key, item in value.items()}
            return {_PAIRS: [[walk(key, f"{path}.key"), walk(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [walk(item, f"{path}.{index}") for index, item in enumerate(value)]
            return {_TUPLE: items} if isinstance(value, tuple) else items
        raise TypeError(f"{path or 'state'} holds a {type(value).__name__}; a checkpoint holds data and tensors only.")

    return tensors, walk(state, "")


def join(tensors: Mapping[str, Tensor], data: Any) -> Any:
    """The state that ``split`` took apart."""
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


def copy_large(tensors: dict[str, Tensor]) -> None:
    """Put copies in the place of the tensors that ``split`` left."""
    for path, tensor in tensors.items():
        if tensor.nbytes > LARGE_BYTES:
            tensors[path] = _copied(tensor)


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU. From a GPU the copy is the transfer itself."""
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
    """Put the generators back where ``rng_state`` found them."""
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
