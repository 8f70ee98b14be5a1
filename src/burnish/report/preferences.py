"""Warn once that the rewards of chosen responses fall while the margin grows.

The loss optimizes the margin, not the likelihood of chosen responses, so this is expected. Users often ask about it
(LLaMA-Factory #7643, #6153, TRL #1311). The message says what helps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import note

_IN_A_ROW = 3
"""Number of consecutive logs that must agree, because a single one is noise."""
FALLING_CHOSEN = (
    "The rewards of chosen responses fall while the margin grows: both responses become less likely, the rejected "
    "ones faster. If logps/chosen falls sharply, set pref_ftx: 0.1, pref_loss: dpop, or a lower learning_rate."
)


class ChosenFallsCallback(TrainerCallback):
    """Reports once that rewards of chosen responses are negative and falling while margins grow."""

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
