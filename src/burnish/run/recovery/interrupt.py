"""Signals and the time limit of a run.

SIGINT (Ctrl-C) and SIGTERM: finish the step, save a checkpoint and stop, so that no training is lost. SIGUSR1, which
schedulers send some time before they end a job, and SIGHUP, sent when a terminal is closed: save a checkpoint after the
step and continue. A run outlives its terminal; messages are in its log. ``max_train_seconds`` ends the run like
SIGTERM.

    with InterruptCallback() as interrupt:      # one of the callbacks of the run
        train(run, options)
    if interrupt.exit_code is not None: ...     # 128 + signal: the run was interrupted and can resume

During training, the first signal requests a stop, and a second Ctrl-C raises KeyboardInterrupt at once. Before the
first step and after the last there is no step to finish, so Ctrl-C raises KeyboardInterrupt and SIGTERM raises
SystemExit(143) at once. Outside the ``with`` block, signals have their previous handlers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from burnish.config.options import option
from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import is_main_process, note

KEEP_RUNNING = {
    signal.SIGUSR1: "SIGUSR1: saving a checkpoint after this step, then continuing.",
    signal.SIGHUP: "The terminal was closed: saving a checkpoint after this step, then continuing. To stop: kill {pid}",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, *KEEP_RUNNING)
TIME_LIMIT_EXIT_CODE = 124
"""Exit status of a run ended by ``max_train_seconds``, the same as that of ``timeout`` (1)."""


@dataclass
class ClockOptions:
    """Time limit."""

    max_train_seconds: float | None = option(
        None, "Maximum training time. The run stops after the current step, with a checkpoint.", unit="s", gt=0
    )


class InterruptCallback(TrainerCallback):
    """Turns signals into requests to the loop.

    Args:
        any_process: returns whether any process has a request, given whether this one has. Processes receive a
            signal at different times and must stop at the same step. Called at every step.
        max_seconds: training time after which the run stops as if by a signal; None for no limit.
        leaves_handlers: do not replace signal handlers that were set by others.
    """

    def __init__(
        self,
        any_process: Callable[[bool], bool] = bool,
        max_seconds: float | None = None,
        leaves_handlers: bool = False,
    ) -> None:
        self.any_process, self.leaves_handlers = any_process, leaves_handlers
        self.max_seconds = max_seconds
        self._started_s = 0.0
        self._is_time_up = self._is_notified = False
        self._messages: list[str] = []  # printed at the end of the step, so that they are in the log too
        self.received: signal.Signals | None = None
        self._is_training = False
        self._has_stopped = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """128 + signal if a signal interrupted the run, 124 if its time was up, None if the run had ended anyway."""
        if not self._has_stopped:
            return None
        if self._is_time_up and self.received is None:
            return TIME_LIMIT_EXIT_CODE
        return 128 + (self.received or signal.SIGTERM)  # only another process may have received the signal

    # --- the signals --------------------------------------------------------------------------------------------------

    def __enter__(self) -> InterruptCallback:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread receives signals and may set handlers
        for number in SIGNALS:
            before = signal.getsignal(number)
            # An ignored signal means that the run should survive it, as with nohup or & in a script.
            is_own = self.leaves_handlers and before not in (signal.SIG_DFL, signal.default_int_handler)
            if before is not signal.SIG_IGN and not is_own:
                self._before[number] = before if before is not None else signal.SIG_DFL
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in KEEP_RUNNING:
            self._is_notified = True
            self._messages.append(KEEP_RUNNING[signal.Signals(number)])
            return
        is_first, is_ctrl_c = self.received is None, number == signal.SIGINT
        if is_ctrl_c and not (is_first and self._is_training):
            raise KeyboardInterrupt
        if not self._is_training:
            _write_to_stderr(f"{signal.Signals(number).name}: stopped.")
            raise SystemExit(128 + number)
        if not is_first:
            return  # schedulers repeat the signal
        self.received = signal.Signals(number)
        again = " Press Ctrl-C again to stop immediately, without a checkpoint." if is_ctrl_c else ""
        _write_to_stderr(f"{self.received.name}: stopping after this step, with a checkpoint.{again}")

    # --- the loop -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training, self._started_s = True, time.monotonic()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        while self._messages:
            note(self._messages.pop(0).format(pid=os.getpid()))
        wants_to_stop = self._wants_to_stop()
        if state.global_step >= state.max_steps or not self.any_process(wants_to_stop or self._is_notified):
            return
        self._is_notified = False
        if self.any_process(wants_to_stop):
            self._stop(control)
        else:
            control.should_save = True

    def _wants_to_stop(self) -> bool:
        is_over = self.max_seconds is not None and time.monotonic() - self._started_s >= self.max_seconds
        if is_over and not self._is_time_up:
            self._is_time_up = True
            _write_to_stderr(f"max_train_seconds {self.max_seconds:g}: stopping after this step, with a checkpoint.")
        return self.received is not None or self._is_time_up

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop after an evaluation, without another step, if a signal came during it."""
        is_training = 0 < state.global_step < state.max_steps
        if is_training and self.any_process(self._wants_to_stop()):
            self._stop(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Clear requests that are not due. The loop fires this event whenever it stops.

        In mid-epoch, end-of-epoch actions are not due; after a resume, the history would have them twice. At the end of
        an epoch they are due, and the checkpoint must include them.
        """
        if not self._has_stopped:
            return
        is_mid_epoch = state.epoch % 1 != 0
        if is_mid_epoch:
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            control.should_save = True

    def _stop(self, control: TrainerControl) -> None:
        self._has_stopped = True
        control.should_save = control.should_training_stop = True


def _write_to_stderr(text: str) -> None:
    # The signal may have interrupted print(), which is not reentrant.
    if is_main_process():
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{text}\n".encode())
