"""Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235): second moments as one row and one column.

transformers' implementation at the learning rate of the run, set as in its own Trainer: step sizes depend neither on
the number of steps taken nor on the size of the weights. ``optim_args`` sets ``beta1``, ``clip_threshold``,
``decay_rate``.
"""

from __future__ import annotations

from torch.optim import Optimizer

from burnish.optim.builtin import ADAM_ONLY, OPTIMIZERS, Groups, OptimOptions, optim_arguments


@OPTIMIZERS.register("adafactor", leaves_out=ADAM_ONLY)
def adafactor(groups: Groups, options: OptimOptions) -> Optimizer:
    """Adafactor at a given learning rate."""
    from transformers.optimization import Adafactor

    arguments = {"scale_parameter": False, "relative_step": False, **optim_arguments(options)}
    made: Optimizer = Adafactor(groups, lr=options.learning_rate, **arguments)
    return made
