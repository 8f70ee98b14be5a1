"""Hyperparameter search with Optuna: one run per trial, each with a new model, rated by its last evaluation.

In: ``model_init``, a function from a trial to argument values. Out: transformers' ``BestRun``. Refuses other backends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import BestRun, HPSearchBackend, number_of_arguments

from burnish.config.errors import MissingExtraError
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.notes import logger


@dataclass
class Search:
    """A running search.

    Args:
        space: trial -> values of arguments.
        compute_objective: metrics of an evaluation -> value to minimize or maximize.
    """

    space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None  # of the current trial

    def apply_values(self, trial: Any, args: TrainingArguments) -> None:
        """Set the arguments to the values of ``trial``, converted to their previous types."""
        for name, value in self.space(trial).items():
            if not hasattr(args, name):
                logger.warning(
                    f"Trying to set {name} in the hyperparameter search but there is no corresponding field in "
                    "`TrainingArguments`."
                )
                continue
            old = getattr(args, name)
            setattr(args, name, value if old is None else type(old)(value))
        logger.info(f"Trial: {trial.params}")

    def report(self, trial: Any, step: int, metrics: dict[str, float], give_up: Callable[[], None]) -> None:
        """Report the objective of an evaluation. If the trial is pruned, call ``give_up`` and raise."""
        self.objective = self.compute_objective(dict(metrics))
        import optuna

        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(self.objective, step)
            if trial.should_prune():
                give_up()
                raise optuna.TrialPruned()

    def run(
        self, train: Callable[[Any], Any], evaluate: Callable[[], dict[str, float]], n_trials: int,
        direction: str | list[str], kwargs: dict[str, Any],
    ) -> BestRun | list[BestRun]:  # fmt: skip
        """The best of ``n_trials`` trials; for several objectives all Pareto-optimal ones.

        Args:
            train: runs a trial.
            evaluate: evaluates it.
            n_trials: number of trials.
            direction: "minimize" or "maximize", per objective.
            kwargs: arguments of ``optuna.create_study`` and, as timeout, n_jobs and gc_after_trial, of ``optimize``.
        """
        import optuna

        def run_trial(trial: Any) -> Any:
            self.objective = None
            train(trial)
            if self.objective is None:
                self.objective = self.compute_objective(dict(evaluate()))
            gc.collect()
            return self.objective

        limits = {name: kwargs.pop(name) for name in ("timeout", "n_jobs", "gc_after_trial") if name in kwargs}
        several = isinstance(direction, list)
        study = optuna.create_study(**({"directions": direction} if several else {"direction": direction}), **kwargs)
        study.optimize(run_trial, n_trials=n_trials, **limits)
        if several:
            return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)


def check_backend(backend: Any, model_init: Any) -> HPSearchBackend:
    """The backend of that name. Default: Optuna. Raises if it is another one, or not installed."""
    chosen = HPSearchBackend("optuna" if backend is None else backend)
    if chosen != HPSearchBackend.OPTUNA:
        raise ValueError(f'backend="{chosen.value}" is not supported. Use backend="optuna".')
    if model_init is None:
        raise RuntimeError("To use hyperparameter search, you need to pass your model through a model_init function.")
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("optuna", "hyperparameter_search") from error
    return chosen


def fresh_model(model_init: Callable[..., Any], trial: Any) -> Any:
    """A new model from ``model_init``, which may take the trial as argument."""
    arguments = number_of_arguments(model_init)
    if arguments > 1:
        raise RuntimeError("model_init should have 0 or 1 argument.")
    model = model_init(trial) if arguments == 1 else model_init()
    if model is None:
        raise RuntimeError("model_init should not return None.")
    return model
