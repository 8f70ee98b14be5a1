"""The training loop of ``burnish train``: applies changed learning rates on resume, and names the records of a step and
of damaged images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images.image_file import DamagedImage, ImageFile, files_of
from burnish.data.origins import Origins, origins_in_words
from burnish.data.rows.store import Rows
from burnish.data.rows.streamed import StreamedRows
from burnish.loop.loop import Loop, TrainOutput
from burnish.run.plan.options import RunOptions


class RunLoop(Loop):
    """A ``Loop`` over encoded records.

    Args:
        options: options of the run.
        origins: records of the rows.
        components: other arguments of ``Loop``.
    """

    def __init__(self, options: RunOptions, origins: Origins, **components: Any) -> None:
        super().__init__(options, **components)
        self.origins, self._is_sft = origins, options.stage == "sft"

    def train(self) -> TrainOutput:
        """Like ``Loop.train``. Raises UserError with the record of an image that cannot be decoded."""
        try:
            output = super().train()
            if self._is_sft and self.meter.steps_here and not self.meter.run_steps:
                what = "no step had a token to train on: the images of every example are damaged."
                raise UserError(what, remedy="Replace the files named above.", option="on_bad_record")
            return output
        except DamagedImage as error:
            place = self._record_of(error.image)
            if place is None:
                raise
            what = f'{error.image.place} "{error.image.path}" {error.what}'.strip()
            skips = ", or set on_bad_record: drop to skip such records" if self._is_sft else ""
            raise UserError(what, where=place, remedy=f"Replace the file{skips}.") from None

    def _record_of(self, image: ImageFile) -> str | None:
        """Return the place of the first record that contains an image, or None. When streaming, only the records read
        so far are searched."""
        rows = self.origins.rows
        if not isinstance(rows, Rows | StreamedRows):
            return None
        numbers = range(len(rows)) if isinstance(rows, Rows) else rows.seen()
        holding = (n for n in numbers if any(one.path == image.path for one in files_of(rows.item(n) or {})))
        number = next(holding, None)
        return None if number is None else self.origins.place(rows.origin(number))

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Learning rates come from the options, not from the checkpoint."""
        scheduler = self.scheduler
        rates = (
            [group["initial_lr"] for group in self.optimizer.param_groups] if hasattr(scheduler, "lr_lambdas") else []
        )
        super().load(folder)
        self.callbacks.load_state_dict(self.state.stateful_callbacks)
        if rates:  # bitwise equal if they were not changed
            scheduler.base_lrs = list(rates)
            for group, rate, factor in zip(self.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
                group["initial_lr"] = rate
                group["lr"] = rate * factor(scheduler.last_epoch)

    def describe_rows(self, indices: Sequence[int]) -> str:
        return origins_in_words(self.origins(indices))
