"""Outputs of a model in float32, for functions of a script that compute losses and metrics from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput


@contextmanager
def float32_outputs(model: nn.Module, precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Context for forward passes under autocast: floating-point outputs of the model are converted to float32, as by
    accelerate for transformers' Trainer. Scripts compute losses from them, and NumPy has no bfloat16."""
    hook = model.register_forward_hook(_to_float32)
    try:
        with precision:
            yield
    finally:
        hook.remove()


def _to_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return float32_of(outputs)


def float32_of(outputs: Any) -> Any:
    """Outputs of a model with their half-precision tensors in float32. Other objects are returned unchanged."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, dict):
        values = {name: float32_of(value) for name, value in outputs.items()}
        if isinstance(outputs, ModelOutput):
            return type(outputs)(**values)
        converted_outputs = copy.copy(outputs)
        converted_outputs.update(values)
        return converted_outputs
    if isinstance(outputs, tuple | list):
        converted = map(float32_of, outputs)
        return type(outputs)(*converted) if hasattr(outputs, "_fields") else type(outputs)(converted)
    return outputs


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than that of ``float32_outputs``."""
    hooks = [hook for hook in module._forward_hooks.values() if hook is not _to_float32]
    return bool(hooks or module._forward_pre_hooks)
