"""Ctrl-C, SIGTERM and SIGHUP: finish the step, save a checkpoint, stop; nothing that was learned is lost.

    with InterruptCallback() as interrupt:      # among the callbacks of the run
        train(run, options)
    if interrupt.exit_code is not None: ...     # 128 + signal: the run was cut short and can go on

While the run trains, the first signal asks for the end; a second Ctrl-C does not wait and raises KeyboardInterrupt.
Before the first step and after the last there is no step to finish, and a signal ends the run at once: Ctrl-C with
KeyboardInterrupt, the others with SystemExit(128 + signal). Outside the ``with`` signals do what they did before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from burnish.core.events import TrainerCallback
from burnish.core.state import TrainerControl, TrainerState

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptCallback(TrainerCallback):
    """Turns a signal into a request that the loop answers.

    Args:
        agree: whether any process of the run has a request, given whether this one has. Processes receive a signal at
            different moments and must stop at the same step. It is asked once per step; one process agrees with itself.
    """

    def __init__(self, agree: Callable[[bool], bool] = bool) -> None:
        self.agree = agree
        self.received: signal.Signals | None = None
        self._is_training = False
        self._has_stopped = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """128 + signal where a signal cut the run short; None where the run had reached its end anyway."""
        if not self._has_stopped:
            return None
        return 128 + (self.received or signal.SIGTERM)  # another process of the run was the one that was asked

    # --- the signals --------------------------------------------------------------------------------------------------

    def __enter__(self) -> InterruptCallback:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only, and so only it may ask for them
        for number in SIGNALS:
            before = signal.getsignal(number)
            # Ignored means that whoever started the run wants it to outlive the signal: nohup, or & in a script.
            if before is not signal.SIG_IGN:
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
        is_first, is_ctrl_c = self.received is None, number == signal.SIGINT
        if is_ctrl_c and not (is_first and self._is_training):
            raise KeyboardInterrupt
        if not self._is_training:
            _say(f"{signal.Signals(number).name}: stopped.")
            raise SystemExit(128 + number)
        if not is_first:
            return  # schedulers repeat themselves
        self.received = signal.Signals(number)
        again = " Ctrl-C once more stops at once, without a checkpoint." if is_ctrl_c else ""
        _say(f"{self.received.name}: stopping after this step, with a checkpoint.{again}")

    # --- the loop -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step < state.max_steps and self.agree(self.received is not None):
            self._stop(control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A signal during an evaluation need not wait for one more step."""
        is_training = 0 < state.global_step < state.max_steps
        if is_training and self.agree(self.received is not None):
            self._stop(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The loop passes here whenever it stops.

        In the middle of an epoch, what is due at its end is not due yet: it would stand in the checkpoint's history
        twice once the run has gone on. At the end of an epoch it is due, and the checkpoint must hold it.
        """
        if not self._has_stopped:
            return
        is_mid_epoch = (state.epoch or 0) % 1 != 0
        if is_mid_epoch:
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            control.should_save = True

    def _stop(self, control: TrainerControl) -> None:
        self._has_stopped = True
        control.should_save = control.should_training_stop = True


def _say(text: str) -> None:
    # print() may be what the signal interrupted, and would refuse to be entered again.
    os.write(2, f"\n{text}\n".encode())
