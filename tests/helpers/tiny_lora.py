"""A layer under a PEFT LoRA adapter, with or without burnish's forward pass."""

from __future__ import annotations

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from burnish.kernels.lora import LoraForward
from burnish.models.patches.fused import ADAPTED
from burnish.utils.patching import patch


def add_lora_adapters(base: nn.Module, *names: str, is_patched: bool = True, seed: int = 0, **settings) -> nn.Module:
    """Return ``base`` with LoRA adapters of these names (by default "one") and nonzero factors. The first is active."""
    holder = nn.ModuleDict({"layer": base})
    generator = torch.Generator().manual_seed(seed)
    for name in names or ("one",):
        config = LoraConfig(**{"r": 4, "lora_alpha": 4, "target_modules": ["layer"], **settings})
        inject_adapter_in_model(config, holder, name)
        layer = holder["layer"]
        for factor in lora_factors(layer, name):
            factor.data = torch.randn(factor.shape, generator=generator)
    layer.set_adapter([*names, "one"][:1])
    base.requires_grad_(False)
    if is_patched:
        patch(layer, "forward", LoraForward(layer).forward, ADAPTED)
    return layer


def lora_factors(layer: nn.Module, name: str = "one") -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (r, I) and B (O, r)."""
    return layer.lora_A[name].weight, layer.lora_B[name].weight
