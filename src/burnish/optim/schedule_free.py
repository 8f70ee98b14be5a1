"""Schedule-free optimizers (Defazio et al. 2024, https://arxiv.org/abs/2405.15682): an average of the weights takes the
place of a falling learning rate. From the library schedulefree.

They keep two sets of weights: training runs at one, evaluation and the finished model at the other. The loop tells them
which (``optimizer.train()``, ``optimizer.eval()``). A checkpoint holds the weights of training, so that it can go on.
The warmup is the schedule's, as for every optimizer: choose lr_scheduler_type constant_with_warmup, or constant.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from burnish.core.errors import Problem
from burnish.optim.builtin import ADAM_ONLY, OPTIMIZERS, Groups, adam_arguments, arguments_of

LIBRARY = "schedulefree"


def check_schedule_free(options: Any) -> list[Problem]:
    """The best checkpoint holds the weights of training, not the average that was evaluated."""
    if not (options.optim.startswith("schedule_free") and options.load_best_model_at_end):
        return []
    return [
        Problem(
            f'"load_best_model_at_end" cannot be had with optim "{options.optim}".',
            why="Its checkpoints hold the weights it trains at; the average that was evaluated is made of later steps.",
            remedy="Leave load_best_model_at_end out: the run ends with the average.",
        )
    ]


@OPTIMIZERS.register("schedule_free_adamw", library=LIBRARY)
def schedule_free_adamw(groups: Groups, options: Any) -> Optimizer:
    """AdamW without a falling learning rate; with lr_scheduler_type constant (schedulefree)."""
    from schedulefree import AdamWScheduleFree

    made: Optimizer = AdamWScheduleFree(groups, **adam_arguments(options))
    return made


@OPTIMIZERS.register("schedule_free_radam", library=LIBRARY)
def schedule_free_radam(groups: Groups, options: Any) -> Optimizer:
    """RAdam without a falling learning rate, and without warmup (schedulefree)."""
    from schedulefree import RAdamScheduleFree

    made: Optimizer = RAdamScheduleFree(groups, **adam_arguments(options))
    return made


@OPTIMIZERS.register("schedule_free_sgd", library=LIBRARY, leaves_out=ADAM_ONLY)
def schedule_free_sgd(groups: Groups, options: Any) -> Optimizer:
    """Stochastic gradient descent without a falling learning rate (schedulefree)."""
    from schedulefree import SGDScheduleFree

    made: Optimizer = SGDScheduleFree(groups, lr=options.learning_rate, **arguments_of(options))
    return made
