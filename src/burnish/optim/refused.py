"""Optimizer names of transformers that burnish does not support, with the reason and an alternative."""

from __future__ import annotations

from torch.optim import Optimizer

from burnish.config.errors import UserError
from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions

_IN_BACKWARD = (
    "it updates each weight during the backward pass, so gradient accumulation, gradient clipping and skipping "
    "of non-finite steps are not possible"
)
_NOT_THIS_DEVICE = "it requires a device that burnish does not support"
_REFUSED = {
    "lomo": (_IN_BACKWARD, "To reduce memory, set use_badam or use_galore, or set optim: adafactor."),
    "adalomo": (_IN_BACKWARD, "To reduce memory, set use_badam or use_galore, or set optim: adafactor."),
    "galore_adamw_layerwise": (_IN_BACKWARD, "Set optim: galore_adamw."),
    "galore_adamw_8bit_layerwise": (_IN_BACKWARD, "Set optim: galore_adamw_8bit."),
    "galore_adafactor_layerwise": (_IN_BACKWARD, "Set optim: galore_adafactor."),
    "apollo_adamw_layerwise": (_IN_BACKWARD, "Set optim: apollo_adamw."),
    "adamw_torch_xla": (_NOT_THIS_DEVICE, "Set optim: adamw_torch."),
    "adamw_torch_npu_fused": (_NOT_THIS_DEVICE, "Set optim: adamw_torch_fused."),
    "adamw_anyprecision": (
        "its library (torchdistx) has not been maintained since torch 2.0",
        "Set optim: stable_adamw with pure_bf16: true, which compensates for rounding in bfloat16, or adamw_torch.",
    ),
}


def _refuse(groups: Groups, options: OptimOptions) -> Optimizer:
    """Raise UserError for an unsupported optimizer."""
    raise UserError(f'burnish does not support optim "{options.optim}".', option="optim")


for _name, _why in _REFUSED.items():
    OPTIMIZERS.register(_name, refused=_why)(_refuse)
