"""The callbacks of a ``Trainer``: the default ones, and the handler, which scripts access.

The handler is the loop's (``loop.events.CallbackHandler``) with transformers' methods in addition to ``fire``: one per
event, ``add_callback``, ``pop_callback``, ``remove_callback``, and attributes for the keyword arguments of events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import trainer_callback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import is_in_notebook, logging

from burnish.loop import events
from burnish.loop.events import EVENTS, CallbackHandler
from burnish.loop.state import TrainerControl
from burnish.trainer.arguments.training import TrainingArguments

logger = logging.get_logger("transformers.trainer_callback")  # so that a script can set its log level

ARGUMENTS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""Keyword arguments of every event."""


class DefaultFlowCallback(events.DefaultFlowCallback, trainer_callback.DefaultFlowCallback):  # type: ignore[misc]
    """burnish's flow. Also a subclass of transformers' class, so that ``remove_callback(DefaultFlowCallback)`` finds
    it."""


class TrainerCallbackHandler(CallbackHandler):
    """Calls callbacks for the loop (``fire``) and for scripts (``handler.on_log(args, state, control, logs)``)."""

    def __init__(
        self, callbacks: list[Any], args: TrainingArguments, state: Any, control: TrainerControl, **arguments: Any
    ) -> None:
        super().__init__([], args, state, control, **dict.fromkeys(ARGUMENTS))
        self.arguments |= arguments
        for callback in callbacks:
            self.add_callback(callback)

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **details: Any) -> TrainerControl:
        """Call ``event`` on every callback. If one returns a control object, it is copied into that of the run, so that
        loop and trainer share one object.
        """
        before = self.args, self.state, self.control
        self.args, self.state = args, state
        super().fire(event, **details)
        if self.control is not control:
            vars(control).update(vars(self.control))
        self.args, self.state, self.control = *before[:2], control
        return control

    def add_callback(self, callback: Any) -> None:
        """Add a callback object, or an instance of a class. Warns if there already is one of the same class."""
        instance = callback() if isinstance(callback, type) else callback
        if not any(hasattr(instance, event) for event in EVENTS):
            raise TypeError(f"A callback must be a TrainerCallback. Received: {instance!r}.")
        if any(type(other) is type(instance) for other in self.callbacks):
            logger.warning(
                f"You are adding a {type(instance)} to the callbacks of this Trainer, but there is already one. The "
                f"current list of callbacks is:\n{self.callback_list}"
            )
        self.callbacks.append(instance)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback object, or the first one of a class. Returns it, or None."""
        for other in self.callbacks:
            if other is callback or (isinstance(callback, type) and isinstance(other, callback)):
                self.callbacks.remove(other)
                return other
        return None

    def remove_callback(self, callback: Any) -> None:
        if isinstance(callback, type):
            self.pop_callback(callback)
        else:
            self.callbacks.remove(callback)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "TrainerControl": self.control.state()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the callbacks and the control: constructor arguments and attributes."""
        self.restore([*self.callbacks, self.control], states, kinds=("args", "attributes"))

    @property
    def callback_list(self) -> str:
        return "\n".join(type(callback).__name__ for callback in self.callbacks)


def _argument(name: str) -> property:
    def read(self: TrainerCallbackHandler) -> Any:
        return self.arguments[name]

    def write(self: TrainerCallbackHandler, value: Any) -> None:
        self.arguments[name] = value

    return property(read, write)


def _event(name: str) -> Callable[..., TrainerControl]:
    detail = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}.get(name)

    def fire(
        self: TrainerCallbackHandler, args: Any, state: Any, control: TrainerControl, *details: Any, **more: Any
    ) -> TrainerControl:
        if details and detail:
            more[detail] = details[0]
        return self.call_event(name, args, state, control, **more)

    return fire


for _name in ARGUMENTS:
    setattr(TrainerCallbackHandler, _name, _argument(_name))
for _name in EVENTS:
    setattr(TrainerCallbackHandler, _name, _event(_name))


def display_callback(args: TrainingArguments) -> Any:
    """transformers' own progress bar, or its lines with ``disable_tqdm``, so that the output is as expected."""
    if args.disable_tqdm:
        return PrinterCallback
    if is_in_notebook():
        from transformers.utils.notebook import NotebookProgressCallback

        return NotebookProgressCallback
    return ProgressCallback
