"""The training loop of ``burnish train``: applies changed learning rates on resume, and names the records of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.data.origins import Origins, origins_in_words
from burnish.loop.loop import Loop
from burnish.report.console import note
from burnish.run.plan.options import RunOptions


class RunLoop(Loop):
    """A ``Loop`` over encoded records.

    Args:
        options: options of the run.
        origins: records of the rows.
        parts: see ``Loop``.
    """

    def __init__(self, options: RunOptions, origins: Origins, **parts: Any) -> None:
        super().__init__(options, **parts)
        self.origins = origins

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Learning rates come from the options, not from the checkpoint."""
        scheduler: Any = self.schedule.scheduler
        rates = (
            [group["initial_lr"] for group in self.optimizer.param_groups] if hasattr(scheduler, "lr_lambdas") else []
        )
        super().load(folder)
        if rates:  # bitwise equal if they were not changed
            scheduler.base_lrs = list(rates)
            for group, rate, factor in zip(self.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
                group["initial_lr"] = rate
                group["lr"] = rate * factor(scheduler.last_epoch)
        note(f"Continuing from {folder}: step {self.state.global_step} of {self.state.max_steps}.")

    def describe_rows(self, items: Sequence[int]) -> str:
        return origins_in_words(self.origins(items))
