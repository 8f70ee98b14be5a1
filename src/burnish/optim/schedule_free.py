"""Schedule-free optimizers (Defazio et al. 2024, https://arxiv.org/abs/2405.15682): averaging the weights replaces
learning rate decay. From the library schedulefree.

They have two sets of weights: one for training, the other for evaluation and the final model. The loop switches between
them (``optimizer.train()``, ``optimizer.eval()``). A checkpoint holds the training weights, so that a run can resume.
Warmup comes from the schedule as for every optimizer: use lr_scheduler_type constant_with_warmup or constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.optim import Optimizer

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.optim.builtin import ADAM_ONLY, OPTIMIZERS, Groups, OptimOptions, adam_arguments, optim_arguments

LIBRARY = "schedulefree"


class BestAtEnd(Protocol):
    """Options that affect schedule-free optimizers and the best checkpoint."""

    load_best_model_at_end: bool
    optim: str


@check
def check_schedule_free(options: BestAtEnd) -> Iterator[Problem]:
    """Report load_best_model_at_end: the best checkpoint has the training weights, not the evaluated average."""
    if not (options.optim.startswith("schedule_free") and options.load_best_model_at_end):
        return
    yield Problem(
        f'"load_best_model_at_end" cannot be combined with optim "{options.optim}".',
        why="Its checkpoints contain the weights used in training, not the average that is evaluated.",
        remedy="Remove load_best_model_at_end: the averaged weights are saved at the end of training.",
        option=("load_best_model_at_end", "optim"),
    )


@OPTIMIZERS.register("schedule_free_adamw", library=LIBRARY)
def schedule_free_adamw(groups: Groups, options: OptimOptions) -> Optimizer:
    """AdamW without learning rate decay, for lr_scheduler_type constant (schedulefree)."""
    from schedulefree import AdamWScheduleFree

    made: Optimizer = AdamWScheduleFree(groups, **adam_arguments(options))
    return made


@OPTIMIZERS.register("schedule_free_radam", library=LIBRARY)
def schedule_free_radam(groups: Groups, options: OptimOptions) -> Optimizer:
    """RAdam without learning rate decay and warmup (schedulefree)."""
    from schedulefree import RAdamScheduleFree

    made: Optimizer = RAdamScheduleFree(groups, **adam_arguments(options))
    return made


@OPTIMIZERS.register("schedule_free_sgd", library=LIBRARY, leaves_out=ADAM_ONLY)
def schedule_free_sgd(groups: Groups, options: OptimOptions) -> Optimizer:
    """SGD without learning rate decay (schedulefree)."""
    from schedulefree import SGDScheduleFree

    made: Optimizer = SGDScheduleFree(groups, lr=options.learning_rate, **optim_arguments(options))
    return made
