"""Muon: orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

It trains the matrices inside the layers. As the authors recommend, AdamW trains embeddings, the head, norms and biases.
The step is scaled to the norm of AdamW's (Liu et al. 2025, section 2.2, https://arxiv.org/abs/2502.16982), so learning
rates for AdamW can be used. The implementation is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.optim.builtin import OPTIMIZERS, Groups, OptimOptions, only_adamw, optim_arguments, switch_arguments
from burnish.optim.delegating import Delegating, copy_groups
from burnish.optim.low_rank import in_layers, split_groups


@dataclass
class MuonOptions:
    """Muon."""

    use_muon: bool = option(
        False, "Use Muon for the weight matrices of the layers, and AdamW for all other parameters."
    )


@check
def check_muon(options: OptimOptions) -> Iterator[Problem]:
    return only_adamw(options, "use_muon", "muon")


@OPTIMIZERS.register("muon", options=MuonOptions, **switch_arguments("use_muon"))
def muon(groups: Groups, options: OptimOptions) -> Optimizer:
    """Muon for the matrices in layers, AdamW for the rest."""
    matrices, rest = split_groups(groups, in_layers)
    moved: list[Optimizer] = []
    if matrices:
        arguments = {"adjust_lr_fn": "match_rms_adamw", **optim_arguments(options)}
        moved.append(torch.optim.Muon(copy_groups(matrices), lr=options.learning_rate, **arguments))
    if rest:
        betas = (options.adam_beta1, options.adam_beta2)
        moved.append(
            torch.optim.AdamW(copy_groups(rest), lr=options.learning_rate, betas=betas, eps=options.adam_epsilon)
        )
    return Delegating([*matrices, *rest], options.learning_rate, moved)
