"""The training loop of ``burnish train``: applies changed learning rates on resume, and names the records of a step and
of damaged images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images.image_file import DamagedImage, ImageFile, files_of
from burnish.data.origins import Origins, origins_in_words
from burnish.data.rows.store import Rows
from burnish.data.rows.streamed import StreamedRows
from burnish.loop.loop import Loop, TrainOutput
from burnish.rollouts.rewards.compute import RewardError
from burnish.run.plan.options import RunOptions
from burnish.run.recovery.failure import newest_checkpoint_message
from burnish.utils.collection import collect_garbage_as_usual


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
        """Like ``Loop.train``.

        Raises:
            UserError: with the record of an image that cannot be decoded, or for rewards that cannot be computed; the
                steps before are saved then.
        """
        collect_garbage_as_usual()
        try:
            output = super().train()
            if self._is_sft and self.meter.steps_here and not self.meter.run_steps:
                what = "no step had a token to train on: the images of all examples are corrupted."
                raise UserError(what, remedy="Replace the files named above.", option="on_bad_record")
            return output
        except DamagedImage as error:
            place = self._record_of(error.image)
            if place is None:
                raise
            what = f'{error.image.place} "{error.image.path}" {error.what}'.strip()
            skips = ", or set on_bad_record: drop to skip such records" if self._is_sft else ""
            raise UserError(what, where=place, remedy=f"Replace the file{skips}.") from None
        except RewardError as error:
            saved = self._save_completed_steps()
            raise UserError([replace(problem, why=saved) for problem in error.problems]) from error

    def _save_completed_steps(self) -> str:
        """Save a checkpoint of the last step, unless there is one, after a failure between two steps. Returns a
        sentence that names the newest checkpoint. Collective."""
        self.checkpoints.wait()
        step = self.state.global_step
        if step > 0 and not self.parallel.any(self.checkpoints.path(step).is_dir()):
            self.set_training_mode(True)  # an evaluation may have failed
            self.save()
            self.checkpoints.wait()
        return newest_checkpoint_message(str(self.checkpoints.folder))

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
