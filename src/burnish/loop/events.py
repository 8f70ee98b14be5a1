"""The events of a run, their order, and the callback that decides when to log, evaluate and save.

Names, signatures and order are those of transformers (https://huggingface.co/docs/transformers/main_classes/callback),
so its callbacks run unchanged. A run with two micro-batches per step, in which log, evaluation and save are all due,
fires:

    on_init_end, on_train_begin, [eval_on_start: on_prediction_step*, on_log, on_evaluate],
    on_epoch_begin,
      on_step_begin, on_substep_end, on_pre_optimizer_step, on_optimizer_step, on_step_end,
      on_log, on_prediction_step*, on_log, on_evaluate, on_save, ...
    on_epoch_end, ..., on_log (the summary), on_train_end

A callback receives ``args`` (the options), ``state``, ``control`` and, as keyword arguments, model, optimizer and other
objects. It requests an action by setting a flag of ``control``. If it returns another control object, the flags of that
object are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from burnish.config.checks import check
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.loop.state import TrainerControl, TrainerState


@dataclass
class IntervalOptions:
    """Logging, evaluation and saving intervals."""

    logging_strategy: str = option("steps", "When to log.", choices=("no", "steps", "epoch"))
    logging_steps: float = option(
        0.02,
        "Number of steps between logs. Below 1: a fraction of all steps. The default gives about 50 logs per run. "
        "The last step is always logged.",
        gt=0,
    )
    logging_first_step: bool = option(
        False, "Log the first step as well. Default: true with logging_strategy: steps if logging_steps is not set."
    )
    eval_strategy: str = option(
        "no", "When to evaluate.", choices=("no", "steps", "epoch"), aliases=("evaluation_strategy",)
    )
    eval_steps: float | None = option(
        None,
        "Number of steps between evaluations. Below 1: a fraction of all steps. Default: logging_steps if it is set, "
        "otherwise 500.",
        unit="steps",
        gt=0,
    )
    eval_delay: float = option(
        0, "Number of steps (or epochs, depending on eval_strategy) before the first evaluation.", ge=0
    )
    eval_on_start: bool = option(False, "Evaluate once before the first step.")
    save_strategy: str = option("steps", "When to save checkpoints.", choices=("no", "steps", "epoch", "best"))
    save_steps: float = option(
        500, "Number of steps between checkpoints. Below 1: a fraction of all steps.", unit="steps", gt=0
    )


@check
def check_intervals(options: IntervalOptions) -> list[Problem]:
    """Report intervals that are neither a whole number of steps nor a fraction of all steps."""
    return [
        Problem(
            f'"{name}" must be an integer number of steps, or a number below 1 for a fraction of all steps. '
            f"Received: {value}.",
            option=name,
        )
        for name in ("logging_steps", "eval_steps", "save_steps")
        if (value := getattr(options, name)) is not None and value > 1 and value % 1 != 0
    ]


def num_events(options: IntervalOptions, state: TrainerState) -> tuple[float, float]:
    """Return the number of logs, and of evaluations, of a run; slightly too large if the interval does not divide it.

    Args:
        options: intervals.
        state: state at the first step, with the intervals in steps.
    """
    intervals = ((options.logging_strategy, state.logging_steps), (options.eval_strategy, state.eval_steps))
    logs, evaluations = (
        state.num_train_epochs if strategy == "epoch" else state.max_steps / max(every, 1) + 1
        for strategy, every in intervals
    )
    return logs, evaluations


class TrainerCallback:
    """Base class of callbacks. All methods do nothing by default."""

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> Any: ...
    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> Any: ...
    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class DefaultFlowCallback(TrainerCallback):
    """Sets the flags for logging, evaluation, saving and stopping at the intervals of the options."""

    def on_step_end(
        self, args: IntervalOptions, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.eval_strategy == "steps" and step % state.eval_steps == 0 and args.eval_delay <= step:
            control.should_evaluate = True
        if args.save_strategy == "steps" and state.save_steps > 0 and step % state.save_steps == 0:
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            # The last step is evaluated and saved even if it is not a multiple of the intervals.
            if args.eval_strategy == "steps" and args.eval_delay <= step:
                control.should_evaluate = True
            if args.save_strategy == "steps":
                control.should_save = True
        return control

    def on_epoch_end(
        self, args: IntervalOptions, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


class CallbackHandler:
    """Calls every callback for each event, in the order in which they were added.

    Args:
        callbacks: objects with transformers' callback methods. Missing methods are skipped.
        args: the options of the run, passed to each callback.
        arguments: keyword arguments of every event: model, processing_class, optimizer, lr_scheduler, dataloaders.
    """

    def __init__(
        self, callbacks: Iterable[Any], args: Any, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> None:
        self.callbacks = list(callbacks)
        self.args = args
        self.state = state
        self.control = control
        self.arguments = arguments

    def fire(self, event: str, **details: Any) -> TrainerControl:
        """Call ``event`` on every callback. ``details`` are ``logs`` for on_log and ``metrics`` for on_evaluate."""
        for flag in _RESET_BY.get(event, ()):
            setattr(self.control, flag, False)
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            result = method(self.args, self.state, self.control, **self.arguments, **details)
            if result is not None and result is not self.control:
                # The loop keeps a reference to this object, so copy the flags.
                for name in vars(self.control):
                    setattr(self.control, name, getattr(result, name))
        return self.control

    def listeners(self, event: str) -> list[str]:
        """Names of the callbacks that implement ``event``, for ``explain``."""
        names = []
        for callback in self.callbacks:
            kind = type(callback)
            # The root of its class hierarchy: burnish's TrainerCallback or transformers'.
            root = next((c for c in reversed(kind.__mro__) if hasattr(c, "on_train_begin")), TrainerCallback)
            if getattr(kind, event, None) not in (None, getattr(root, event, None)):
                names.append(kind.__name__)
        return names

    def foreign_callbacks(self, event: str | None) -> list[str]:
        """Names of callbacks from outside burnish that implement ``event`` (any event if None)."""
        ours = {
            type(callback).__name__ for callback in self.callbacks if type(callback).__module__.startswith("burnish.")
        }
        events = EVENTS if event is None else (event,)
        return [name for each in events for name in self.listeners(each) if name not in ours]

    def state_dict(self) -> dict[str, Any]:
        """State of the callbacks that have one (transformers' ``ExportableState``).

        Returns:
            ``{class name: {"args": ..., "attributes": ...}}``; the value is a list if several callbacks share a class.
        """
        states: dict[str, Any] = {}
        for callback in self.callbacks:
            if not callable(getattr(callback, "state", None)):
                continue
            name, value = type(callback).__name__, callback.state()
            if name in states:
                states[name] = [*states[name], value] if isinstance(states[name], list) else [states[name], value]
            else:
                states[name] = value
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the attributes of each callback. Its constructor arguments come from the options of the run."""
        self.restore(self.callbacks, states, kinds=("attributes",))

    @staticmethod
    def restore(callbacks: Iterable[Any], states: dict[str, Any], kinds: Iterable[str]) -> None:
        """Set the saved values of each object that has a state. Objects of a class are matched by their order."""
        queues = {name: list(v) if isinstance(v, list) else [v] for name, v in states.items()}
        for callback in callbacks:
            queue = queues.get(type(callback).__name__)
            if queue and callable(getattr(callback, "state", None)):
                saved = queue.pop(0)
                for name, value in (pair for kind in kinds for pair in saved.get(kind, {}).items()):
                    setattr(callback, name, value)


_RESET_BY = {
    "on_train_begin": ("should_training_stop",), "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_save", "should_evaluate", "should_log"), "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",), "on_log": ("should_log",),
}  # fmt: skip
"""Event -> flags that are reset before its callbacks run."""
