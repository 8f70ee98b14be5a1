"""Finds a run that stands still: no step, micro-batch or batch of an evaluation ends for ``stall_timeout_s``.

In: the events of a run. Out: nothing; where they stop coming, the Python stack of every thread is written and the
process ends with status 1, so that a scheduler, or ``max_restarts``, can start the run again. The watch is Python's
``faulthandler``, in C: it also speaks where a library holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any, TextIO

from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import FAILURE_FILE
from burnish.run.launch import STALLED


class StallWatch(TrainerCallback):
    """Ends the process where events stop coming, between the first step and the last.

    Args:
        timeout_s: the longest time between two events.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._file: TextIO | None = None

    def _beat(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self._file or sys.stderr)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._file is None and FAILURE_FILE in os.environ:
            self._file = open(os.environ[FAILURE_FILE] + STALLED, "w", encoding="utf-8")  # noqa: SIM115 - for good
        self._beat(args, state, control)

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = _beat

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
