"""Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235): factorized second moments, one row and one
column.

transformers' implementation with the learning rate of the run and the settings of its Trainer: step sizes depend
neither on the number of steps nor on the scale of the weights. ``optim_args`` sets ``beta1``, ``clip_threshold``,
``decay_rate``.
"""

from __future__ import annotations

from torch.optim import Optimizer

from burnish.optim.builtin import ADAM_ONLY, OPTIMIZERS, Groups, OptimOptions, optim_arguments


@OPTIMIZERS.register("adafactor", leaves_out=ADAM_ONLY)
def adafactor(groups: Groups, options: OptimOptions) -> Optimizer:
    """Adafactor with an external learning rate."""
    from transformers.optimization import Adafactor

    arguments = {"scale_parameter": False, "relative_step": False, **optim_arguments(options)}
    made: Optimizer = Adafactor(groups, lr=options.learning_rate, **arguments)
    return made
