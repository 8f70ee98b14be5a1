"""Time limit of a training.

``max_train_seconds`` ends it after a step, with a checkpoint, from which the same command goes on: for a machine that
is lent by the hour. ``interrupt.py`` answers it as it answers a signal.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.core.options import option

TIME_IS_UP = 124
"""The exit status of a run that ``max_train_seconds`` ended; that of ``timeout`` (1)."""


@dataclass
class ClockOptions:
    """Time limit of a training."""

    max_train_seconds: float | None = option(
        None, "End the training after the step in which so much time has passed, with a checkpoint.", unit="s", gt=0
    )
