"""StableAdamW (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013): AdamW that reduces its step if a gradient is
larger than its second moment predicts. From the library optimi (package torch-optimi)."""

from __future__ import annotations

from torch.optim import Optimizer

from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, adam_arguments


@OPTIMIZERS.register("stable_adamw", library="optimi")
def stable_adamw(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW with Adafactor's update clipping (torch-optimi)."""
    from optimi import StableAdamW

    # Its Triton kernels, which it selects wherever Triton is installed, run on a GPU only.
    is_on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    made: Optimizer = StableAdamW(groups, **adam_arguments(options), triton=None if is_on_gpu else False)
    return made
