"""Hyperparameter search: a run per trial, each from a fresh model, judged by its last evaluation. Through Optuna.

In: ``model_init``, a function from a trial to argument values. Out: transformers' ``BestRun``. Refuses the backends
that burnish does not have, by name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import (
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space_optuna,
    number_of_arguments,
)
from transformers.utils import logging

from burnish.core.errors import MissingExtraError
from burnish.hf.face import Face

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class SearchMethods(Face):
    """Hyperparameter search."""

    hp_space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None

    def hyperparameter_search(
        self, hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None, n_trials: int = 20,
        direction: str | list[str] = "minimize", backend: Any = None, hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:  # fmt: skip
        """The best of ``n_trials`` runs.

        Args:
            hp_space: trial -> values of arguments; learning rate, epochs, seed and batch size if not given.
            compute_objective: the metrics of an evaluation -> what is made small or large; the loss, or the sum of the
                metrics where there are some.
            direction: "minimize" or "maximize", or one for each of several objectives.
            kwargs: of ``optuna.create_study`` and, as timeout, n_jobs and gc_after_trial, of ``optimize``.
        """
        backend = HPSearchBackend("optuna" if backend is None else backend)
        if backend != HPSearchBackend.OPTUNA:
            raise ValueError(f'backend="{backend.value}" is not part of burnish; a search runs through "optuna".')
        if self.model_init is None:
            raise RuntimeError(
                "To use hyperparameter search, you need to pass your model through a model_init function."
            )
        try:
            import optuna
        except ImportError as error:
            raise MissingExtraError("optuna", "hyperparameter_search") from error
        self.hp_search_backend, self.hp_name = backend, hp_name
        self.hp_space = hp_space or default_hp_space_optuna
        self.compute_objective = compute_objective or default_compute_objective
        limits = {name: kwargs.pop(name) for name in ("timeout", "n_jobs", "gc_after_trial") if name in kwargs}
        several = isinstance(direction, list)
        study = optuna.create_study(**({"directions": direction} if several else {"direction": direction}), **kwargs)
        study.optimize(self._trial_objective, n_trials=n_trials, **limits)
        self.hp_search_backend = None
        if several:
            return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)

    def _trial_objective(self, trial: Any) -> Any:
        self.objective = None
        self.train(trial=trial)  # type: ignore[attr-defined]
        if self.objective is None:
            self.objective = self.compute_objective(dict(self.evaluate()))  # type: ignore[attr-defined]
        gc.collect()
        return self.objective

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from ``model_init``, which may take the trial."""
        assert self.model_init is not None
        arguments = number_of_arguments(self.model_init)
        if arguments > 1:
            raise RuntimeError("model_init should have 0 or 1 argument.")
        model = self.model_init(trial) if arguments == 1 else self.model_init()
        if model is None:
            raise RuntimeError("model_init should not return None.")
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        """The values of this trial into the arguments, each in the type that it had."""
        self._trial = trial
        if self.hp_search_backend is None or trial is None:
            return
        for name, value in self.hp_space(trial).items():
            if not hasattr(self.args, name):
                logger.warning(
                    f"Trying to set {name} in the hyperparameter search but there is no corresponding field in "
                    "`TrainingArguments`."
                )
                continue
            old = getattr(self.args, name)
            setattr(self.args, name, value if old is None else type(old)(value))
        logger.info(f"Trial: {trial.params}")

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """An evaluation's objective to the trial, which may be given up for it."""
        if self.hp_search_backend is None or trial is None:
            return
        self.objective = self.compute_objective(dict(metrics))
        import optuna

        if hasattr(trial, "study") and not trial.study._is_multi_objective():
            trial.report(self.objective, step)
            if trial.should_prune():
                self.callback_handler.call_event("on_train_end", self.args, self.state, self.control)
                raise optuna.TrialPruned()
