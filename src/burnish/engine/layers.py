"""The layers of a model, found by its structure: those of its stacks, which are alike and follow each other."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the outermost stacks; experts in a layer are part of it. Empty where the model has no stack."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(module) for stack in stacks for layer in stack for module in layer.modules()}
    return [layer for stack in stacks if id(stack) not in inside for layer in stack]
