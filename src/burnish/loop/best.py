"""Track the best evaluation of a run: its metric, whether higher is better, and its checkpoint.

Names and semantics follow transformers: ``metric_for_best_model``, ``greater_is_better``, ``load_best_model_at_end``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from burnish.checkpoint.checkpoint import CheckpointOptions, Checkpoints
from burnish.config.errors import MissingMetricError, Problem, did_you_mean
from burnish.loop.events import IntervalOptions
from burnish.loop.state import TrainerState


class BestChoices(CheckpointOptions, IntervalOptions):
    """Options that define the best evaluation."""


def remember_best(
    state: TrainerState, checkpoints: Checkpoints, metrics: Mapping[str, float], options: BestChoices
) -> bool:
    """Update ``state`` if this evaluation is the best so far. Returns whether it is."""
    if not (options.load_best_model_at_end or options.save_strategy == "best" or options.metric_for_best_model):
        return False
    value, best = best_model_metric(options, metrics), state.best_metric
    if best is not None and not (value > best if is_higher_better(options) else value < best):
        return False
    if value != value:  # a NaN would stay the best for ever: every comparison with it is false
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    if checkpoints.last_step == state.global_step:  # already saved in this step, before the evaluation
        state.best_model_checkpoint = str(checkpoints.path(state.global_step))
    return True


def eval_prefix(name: str) -> str:
    """The prefix of the metrics of the evaluation set ``name``, without the underscore; "" is the name of a single
    set."""
    return f"eval_{name}" if name else "eval"


def best_model_metric_name(options: BestChoices) -> str:
    """The name of the metric that selects the best evaluation, with the prefix ``eval_``."""
    name: str = options.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def best_model_metric(options: BestChoices, metrics: Mapping[str, float]) -> float:
    """The value of the metric that selects the best evaluation.

    Raises:
        MissingMetricError: if the evaluation has no metric of that name.
    """
    name = best_model_metric_name(options)
    if name not in metrics:
        raise MissingMetricError(missing_metric(name, metrics))
    return metrics[name]


def missing_metric(name: str, metrics: Iterable[str]) -> Problem:
    """The problem for a ``metric_for_best_model`` that is not among ``metrics``."""
    return Problem(
        f'metric_for_best_model "{name}" is not among the metrics of the evaluation.{did_you_mean(name, metrics)}',
        remedy=f"Available: {', '.join(sorted(metrics))}.",
        option="metric_for_best_model",
    )


def is_higher_better(options: BestChoices) -> bool:
    """``greater_is_better``. Default: true unless the metric name ends with "loss"."""
    if options.greater_is_better is not None:
        return bool(options.greater_is_better)
    return not best_model_metric_name(options).endswith("loss")
