"""Detect a stalled run: no step, micro-batch or evaluation batch ends for ``stall_timeout_s``.

If no event arrives in time, the Python stacks of all threads are written and the process ends with status 1, so that a
scheduler or ``max_restarts`` can restart the run. The watchdog is Python's ``faulthandler``, which is written in C and
works even if a library holds the GIL.
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
    """Ends the process if no event arrives in time, from the first step to the last.

    Args:
        timeout_s: maximum time between two events, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._file: TextIO | None = None

    def _record_progress(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self._file or sys.stderr)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._file is None and FAILURE_FILE in os.environ:
            self._file = open(os.environ[FAILURE_FILE] + STALLED, "w", encoding="utf-8")  # noqa: SIM115 - for good
        self._record_progress(args, state, control)

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = _record_progress

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
