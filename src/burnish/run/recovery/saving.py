"""Checkpoints that tolerate failures: a failed save is reported once and retried when the next one is due.

This covers a full disk, a quota, and a folder that is missing or not writable. The last complete checkpoint is kept,
incomplete files are removed, training continues, and the command ends with exit status 3. With several processes a
failure still stops the run, because a rank that continued would wait forever.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.checkpoint.checkpoint import Checkpoints
from burnish.checkpoint.parts import Part
from burnish.report.console import note, warn
from burnish.utils.files import error_number, remove

CHECKPOINT_FAILED_EXIT_CODE = 3
"""Exit status of a run that finished, but could not save an intermediate checkpoint."""


class RetryingCheckpoints(Checkpoints):
    """Checkpoints of a single process that report failures instead of raising them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.failed: list[str] = []  # names of the checkpoints that could not be saved
        self._is_failing = False

    def save(self, step: int, parts: Mapping[str, Part], *, best: str | None = None) -> Path:
        if self.world_size > 1:
            return super().save(step, parts, best=best)
        target = self.path(step)
        try:
            self.wait()  # reports a failure of the previous checkpoint
            self._check_free_space()
            super().save(step, parts, best=best)
            if self._writer is None:
                self._report_recovery()
        except Exception as error:
            self._record_failure(error, target)
        return target

    def wait(self) -> None:
        if self.world_size > 1:
            return super().wait()
        saved = self._writer is not None
        try:
            super().wait()
        except Exception as error:
            self._record_failure(error, self.path(self.last_step or 0))
        else:
            if saved:
                self._report_recovery()

    def _report_recovery(self) -> None:
        if self._is_failing:
            self._is_failing = False
            note(f"{self.path(self.last_step or 0)} was saved successfully.")

    def _check_free_space(self) -> None:
        """Raise OSError before writing if the free space is smaller than the newest checkpoint."""
        newest = next(reversed(self.all()), None)
        needed = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) if newest else 0
        if self.folder.is_dir() and shutil.disk_usage(self.folder).free < needed:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _record_failure(self, error: Exception, target: Path) -> None:
        """Report a failure of the machine; raise any other error."""
        if error_number(error) is None:
            raise error
        self.failed.append(target.name)
        self._has_copies.set()
        for path in self.folder.glob(f".incomplete-{target.name}"):
            try:
                remove(path)
            except OSError:  # the cause of the failure may also prevent removing the file
                continue
        if not self._is_failing:
            self._is_failing = True
            complete = self.all()
            safe = f" {complete[-1]} is complete." if complete else " No checkpoint was saved."
            reason = (getattr(error, "strerror", None) or str(error)).rstrip(".").lower()
            warn(f"{target} could not be saved: {reason}.{safe} Training continues and retries at the next save.")


def status_of(checkpoints: Checkpoints) -> int | None:
    """Return the exit status of a finished run; None if every checkpoint was saved."""
    return CHECKPOINT_FAILED_EXIT_CODE if getattr(checkpoints, "failed", ()) else None
