"""AdamW with 8-bit or 4-bit moments, from the library torchao. Unlike bitsandbytes it is written in torch: it is
compiled at first use, which takes seconds, and runs wherever torch.compile does.

The library stores moments in its own tensor class and the learning rate in a tensor. Both are converted here: a
checkpoint holds the plain tensors of a moment, and the scheduler sees a number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, adam_arguments
from burnish.optim.delegating import Delegating, copy_groups
from burnish.utils.patching import Reason, hook

LIBRARY = "torchao"
_KIND = "quantized as"
_PLAIN_MOMENTS = Reason("optimizer", "its moments are saved in checkpoints as plain tensors")


@OPTIMIZERS.register("adamw_torch_8bit", library=LIBRARY, compiles=True)
def adamw_8bit(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with 8-bit moments (torchao)."""
    from torchao.optim import AdamW8bit

    return _wrap_optimizer(AdamW8bit, groups, options)


@OPTIMIZERS.register("adamw_torch_4bit", library=LIBRARY, compiles=True)
def adamw_4bit(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with 4-bit moments (torchao)."""
    from torchao.optim import AdamW4bit

    return _wrap_optimizer(AdamW4bit, groups, options)


def _wrap_optimizer(kind: Any, groups: Groups, options: OptimOptions) -> Optimizer:
    made: Optimizer = kind(copy_groups(groups), **adam_arguments(options))
    hook(made, "state_dict_post", partial(_map_moments, _to_plain), _PLAIN_MOMENTS)
    hook(made, "load_state_dict_pre", partial(_map_moments, _from_plain), _PLAIN_MOMENTS)
    return Delegating(groups, options.learning_rate, [made])


def _map_moments(change: Callable[[Any], Any], optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Apply ``change`` to every moment of every parameter."""
    moments = state["state"].items()
    return {**state, "state": {index: {n: change(value) for n, value in own.items()} for index, own in moments}}


def _to_plain(value: Any) -> Any:
    """Convert a tensor of the library's own class to plain tensors and data. Other values are returned unchanged."""
    if not isinstance(value, Tensor) or type(value) is Tensor:
        return value
    names, attributes = value.__tensor_flatten__()  # type: ignore[attr-defined]
    plain = [str(a) if isinstance(a, torch.dtype) else list(a) if isinstance(a, torch.Size) else a for a in attributes]
    return {_KIND: type(value).__name__, "parts": {name: getattr(value, name) for name in names}, "attributes": plain}


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict) or _KIND not in value:
        return value
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    kind: Any = {"OptimState8bit": OptimState8bit, "OptimState4bit": OptimState4bit}[value[_KIND]]
    attributes = [
        getattr(torch, a.removeprefix("torch.")) if isinstance(a, str) else torch.Size(a) if isinstance(a, list) else a
        for a in value["attributes"]
    ]
    return kind.__tensor_unflatten__(value["parts"], attributes)
