"""Disable dropout, for objectives that compare two passes of a model."""

from __future__ import annotations

from torch import nn

from burnish.utils.patching import Reason, patch

NO_DROPOUT = Reason("dropout", "two forward passes of the model are compared, so both must be deterministic")


def switch_off_dropout(model: nn.Module) -> bool:
    """Set the probability of every dropout in ``model`` to 0: torch's modules, those of adapters, and attention with
    its own probability. Returns whether any was above 0.
    """
    was_on = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            was_on |= module.p > 0
            patch(module, "p", 0.0, NO_DROPOUT)
        for name in ("attention_dropout", "dropout_p"):
            value = vars(module).get(name)
            if isinstance(value, float) and value > 0:
                was_on = True
                patch(module, name, 0.0, NO_DROPOUT)
    return was_on
