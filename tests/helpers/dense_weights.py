"""Dequantized weights of a layer, for comparisons."""

import torch
from peft.utils.integrations import dequantize_module_weight


@torch.no_grad()
def dense(layer):
    """(O, I) the weight in float32, as a copy; without biases."""
    if type(getattr(layer, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
        return dequantize_module_weight(layer).float()
    stored = next(t for t in (*layer.parameters(), *layer.buffers()))
    columns, bias = layer(torch.eye(layer.in_features, device=stored.device)), getattr(layer, "bias", None)
    return (columns if bias is None else columns - bias).float().t().contiguous()
