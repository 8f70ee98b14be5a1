"""A warning, once per run, about a training loss that grows without bound."""

from __future__ import annotations

import math
from typing import Any

from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import warn

_FACTOR = 2.0
_IN_A_ROW = 3


class DivergenceCallback(TrainerCallback):
    """Warns when the logged loss is at least twice the first one, and more than 1 above it, three times in a row."""

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
                f"The loss has grown from {self._first:.4g} to {loss:.4g} at step {state.global_step}: the training "
                "diverges. Stop it, and lower learning_rate, or add warmup_steps."
            )
