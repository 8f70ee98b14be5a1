"""Stop a run whose evaluations no longer improve.

Names and semantics follow transformers' ``EarlyStoppingCallback``; the option is LLaMA-Factory's. Training stops after
``early_stopping_steps`` consecutive evaluations that do not improve on the best value by more than
``early_stopping_threshold``. ``metric_for_best_model`` and ``greater_is_better`` define "best". The counter is saved in
checkpoints, so a resumed run stops at the same evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option, raise_if
from burnish.loop.best import best_model_metric, is_higher_better
from burnish.loop.events import IntervalOptions, TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState


@dataclass
class EarlyStoppingOptions:
    """Early stopping."""

    early_stopping_steps: int | None = option(
        None, "Stop after this many consecutive evaluations without improvement.", unit="evaluations", ge=1
    )
    early_stopping_threshold: float = option(0.0, "Minimum change that counts as an improvement.", ge=0)


class StoppingChoices(EarlyStoppingOptions, IntervalOptions, CheckpointOptions):
    """Options that early stopping depends on."""


@check
def check_early_stopping(options: StoppingChoices) -> Iterable[Problem]:
    return () if options.early_stopping_steps is None else _missing_requirements(options)


def _missing_requirements(options: StoppingChoices) -> Iterator[Problem]:
    """Early stopping requires evaluations and a metric. Yields a problem for each that is missing."""
    if options.eval_strategy == "no":
        what = "Early stopping requires evaluations, but eval_strategy is no."
        yield Problem(
            what,
            remedy="Set eval_strategy: steps with eval_dataset or val_size, or remove early_stopping_steps.",
            option="eval_strategy",
        )
    if not (options.metric_for_best_model or options.load_best_model_at_end or options.save_strategy == "best"):
        what = "Early stopping requires metric_for_best_model, which is not set."
        yield Problem(
            what,
            remedy="Set metric_for_best_model: loss, or load_best_model_at_end: true.",
            option="metric_for_best_model",
        )


def early_stopping_callbacks(options: EarlyStoppingOptions) -> list[EarlyStoppingCallback]:
    """The callback if ``early_stopping_steps`` is set, else an empty list."""
    if options.early_stopping_steps is None:
        return []
    return [EarlyStoppingCallback(options.early_stopping_steps, options.early_stopping_threshold)]


class EarlyStoppingCallback(TrainerCallback):
    """Stops training after consecutive evaluations without improvement.

    Args:
        early_stopping_patience: number of evaluations without improvement after which training stops.
        early_stopping_threshold: minimum change that counts as an improvement.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        raise_if(_missing_requirements(args))
        if state.global_step > 0:  # resumed: the run may have been killed after its last evaluation
            self._stop_without_improvement(control)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Update the counter. ``state.best_metric`` does not include this evaluation yet."""
        value, best = best_model_metric(args, metrics or {}), state.best_metric
        gain = 0.0 if best is None else value - best if is_higher_better(args) else best - value  # NaN is never a gain
        if best is None or gain > self.early_stopping_threshold:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        self._stop_without_improvement(control)

    def _stop_without_improvement(self, control: TrainerControl) -> None:
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Settings and counter for a checkpoint, in the format of transformers' ``ExportableState``."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
