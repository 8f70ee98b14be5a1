"""Dequantised weights, for operations that need the numbers: the norm of a row of weights (DoRA), a comparison.

In:  a linear layer of bitsandbytes (4 or 8 bits), or of any other library. Out: its weight as a matrix in float32.
Products do not need this: the layer computes them itself.
"""

# O outputs, I inputs

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_quantised(layer: nn.Module) -> bool:
    """Return whether the weight of ``layer`` is anything but a matrix of floating-point numbers."""
    weight = getattr(layer, "weight", None)
    return not (isinstance(weight, Tensor) and weight.is_floating_point())


@torch.no_grad()
def dense(layer: nn.Module) -> Tensor:
    """(O, I) the weight in float32, as a copy."""
    weight: Any = getattr(layer, "weight", None)
    kind = type(weight).__name__
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).float()  # type: ignore[no-any-return]
    if kind == "Int8Params":
        # One scale per output, 127 steps to each side of zero (Dettmers et al. 2022, section 2.1,
        # https://arxiv.org/abs/2208.07339). The scales move into ``state`` at the first product.
        state: Any = layer.state
        scales: Tensor = weight.SCB if weight.SCB is not None else state.SCB
        numbers: Tensor = weight.data.float() * scales.view(-1, 1).float() / 127
        return numbers
    return _asked(layer)


def _asked(layer: nn.Module) -> Tensor:
    """The weight, column by column, from the layer's outputs for unit vectors."""
    held = next(t for t in (*layer.parameters(), *layer.buffers()))
    inputs: Any = layer.in_features
    unit = torch.eye(inputs, device=held.device)
    columns: Tensor = layer(unit)
    bias = getattr(layer, "bias", None)
    return (columns if bias is None else columns - bias).float().t().contiguous()
