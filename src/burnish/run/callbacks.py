"""The callbacks of a run, in the order in which every event is sent to them.

The order is: the callback that decides when to log, evaluate and save; early stopping; trackers; the log file;
callbacks of the caller; and the terminal output, which is last so that it shows the decisions of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.checkpoint.checkpoint import output_folder
from burnish.loop.early_stopping import early_stopping_callbacks
from burnish.loop.events import CallbackHandler, DefaultFlowCallback, TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.losses.base import OBJECTIVES
from burnish.report.console import note, warn
from burnish.report.jsonl import JsonlCallback
from burnish.report.progress import RunFacts, progress_callback
from burnish.report.trackers import tracker_callbacks
from burnish.run.plan.checks import evaluates, trains
from burnish.run.plan.options import RunOptions

IN_ORDER = (
    "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step",
    "on_optimizer_step", "on_step_end", "on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end",
    "on_predict", "on_push_begin", "on_train_end",
)  # fmt: skip
"""Events in order, for a step that is logged, evaluated and saved."""


_FACTOR = 2.0
_IN_A_ROW = 3
"""Number of consecutive logs that must agree, because a single one is noise."""
FALLING_CHOSEN = (
    "The rewards of chosen responses fall while the margin grows: both responses become less likely, the rejected "
    "ones faster. If logps/chosen falls sharply, set pref_ftx: 0.1, pref_loss: dpop, or a lower learning_rate."
)


class DivergenceCallback(TrainerCallback):
    """Warns if three consecutive logged losses are at least twice the first one and more than 1 above it."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._times = 0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if not isinstance(loss, int | float) or not math.isfinite(loss) or self._times >= _IN_A_ROW:
            return
        if self._first is None:
            self._first = loss
        has_grown = loss > max(_FACTOR * self._first, self._first + 1)
        self._times = self._times + 1 if has_grown else 0
        if self._times == _IN_A_ROW and state.is_world_process_zero:
            warn(
                f"The loss has grown from {self._first:.4g} to {loss:.4g} at step {state.global_step}: training is "
                "diverging. Stop the run, and lower learning_rate or add warmup_steps."
            )


class ChosenFallsCallback(TrainerCallback):
    """Reports once that rewards of chosen responses are negative and falling while margins grow.

    The loss optimizes the margin, not the likelihood of chosen responses, so this is expected. Users often ask about it
    (LLaMA-Factory #7643, #6153, TRL #1311). The message says what helps.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._times = 0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not logs:
            return
        if "rewards/chosen" not in logs or "rewards/margins" not in logs or self._times >= _IN_A_ROW:
            return
        before, self._before = self._before, dict(logs)
        falls = logs["rewards/chosen"] < min(0.0, before.get("rewards/chosen", 0.0))
        grows = logs["rewards/margins"] > max(0.0, before.get("rewards/margins", 0.0))
        self._times = self._times + 1 if falls and grows else 0
        if self._times == _IN_A_ROW and state.is_world_process_zero:
            note(FALLING_CHOSEN)


class LastStepCallback(TrainerCallback):
    """Logs the last step, also if ``logging_steps`` does not divide the number of steps or exceeds it."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            control.should_log = True


def callbacks_of(options: RunOptions, facts: RunFacts | None = None, added: Sequence[Any] = ()) -> list[Any]:
    """Return the callbacks of a run.

    Args:
        options: options of the run.
        facts: facts for the first lines of output.
        added: callbacks of the caller, such as the one that handles Ctrl-C.
    """
    return [
        DefaultFlowCallback(),
        *early_stopping_callbacks(options),
        *tracker_callbacks(options.report_to, options.logging_dir),
        JsonlCallback(output_folder(options)),
        *([LastStepCallback()] if options.logging_strategy == "steps" else []),
        DivergenceCallback(),
        *([ChosenFallsCallback()] if OBJECTIVES[options.stage].logs_rewards else []),
        *added,
        progress_callback(options, facts),
    ]


def events_of(options: RunOptions) -> Sequence[str]:
    """Return the events of a run in order. A run that only evaluates or predicts has fewer."""
    if trains(options):
        return IN_ORDER
    measures = evaluates(options) or not options.predict_with_generate
    requested = {
        "on_init_end": True, "on_prediction_step": True, "on_log": measures, "on_evaluate": evaluates(options),
        "on_predict": options.do_predict,
    }  # fmt: skip
    return [event for event in IN_ORDER if requested.get(event)]


def listeners_of(options: RunOptions, added: Sequence[Any] = ()) -> dict[str, list[str]]:
    """Return event -> names of the callbacks that handle it, in order. Events without callbacks are omitted."""
    handler = CallbackHandler(callbacks_of(options, None, added), options, TrainerState(), TrainerControl())
    return {event: names for event in events_of(options) if (names := handler.listeners(event))}
