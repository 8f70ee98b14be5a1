"""Dequantized weights of a layer, for comparisons."""

import torch
from peft.utils.integrations import dequantize_module_weight


@torch.no_grad()
def dense(layer):
    """Return a copy of the layer's weight (O, I) in float32."""
    if type(getattr(layer, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
        return dequantize_module_weight(layer).float()
    tensor = next(t for t in (*layer.parameters(), *layer.buffers()))
    columns, bias = layer(torch.eye(layer.in_features, device=tensor.device)), getattr(layer, "bias", None)
    return (columns if bias is None else columns - bias).float().t().contiguous()
