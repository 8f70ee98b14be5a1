"""StableAdamW (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013): AdamW that reduces its step if a gradient is
larger than its second moment predicts. From the library optimi (package torch-optimi)."""

from __future__ import annotations

from torch.optim import Optimizer

from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, adam_arguments


@OPTIMIZERS.register("stable_adamw", library="optimi")
def stable_adamw(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with Adafactor's update clipping (torch-optimi)."""
    from optimi import StableAdamW

    made: Optimizer = StableAdamW(groups, **adam_arguments(options))
    return made
