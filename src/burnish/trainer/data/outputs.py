"""Outputs of a model in float32, for functions of a script that compute losses and metrics from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from burnish.trainer.data.in_step import map_tensors


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
    half = (torch.bfloat16, torch.float16)
    return map_tensors(outputs, lambda value: value.float() if value.dtype in half else value)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than that of ``float32_outputs``."""
    hooks = [hook for hook in module._forward_hooks.values() if hook is not _to_float32]
    return bool(hooks or module._forward_pre_hooks)
