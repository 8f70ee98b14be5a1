"""Checkpoints that a training does not die of: a save that fails is said once, and tried again when the next is due.

In: what ``core.checkpoint.Checkpoints`` takes. Out: the same, but for a disk that is full, a quota, a folder that may
not be written or has gone: the last whole checkpoint stays, what was half written goes, the training goes on, and the
command ends with exit status 3. Several processes still stop together, since a rank that went on would wait for ever.
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

NOT_ALL_SAVED = 3
"""The exit status of a run that came to its end, and could not save a checkpoint on the way."""


class RetryingCheckpoints(Checkpoints):
    """Checkpoints of one process whose failures are said and not raised."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.failed: list[str] = []  # names of the checkpoints that could not be saved
        self._is_failing = False

    def save(self, step: int, parts: Mapping[str, Part], *, best: str | None = None) -> Path:
        if self.world_size > 1:
            return super().save(step, parts, best=best)
        target = self.path(step)
        try:
            self.wait()  # what is wrong with the one before is said of that one
            self._check_room()
            super().save(step, parts, best=best)
            if self._writer is None:
                self._say_if_mended()
        except Exception as error:
            self._take(error, target)
        return target

    def wait(self) -> None:
        if self.world_size > 1:
            return super().wait()
        saved = self._writer is not None
        try:
            super().wait()
        except Exception as error:
            self._take(error, self.path(self.last_step or 0))
        else:
            if saved:
                self._say_if_mended()

    def _say_if_mended(self) -> None:
        if self._is_failing:
            self._is_failing = False
            note(f"{self.path(self.last_step or 0)} was saved successfully.")

    def _check_room(self) -> None:
        """Raise OSError where less is free than the newest checkpoint takes, before anything is written."""
        newest = next(reversed(self.all()), None)
        needed = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) if newest else 0
        if self.folder.is_dir() and shutil.disk_usage(self.folder).free < needed:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _take(self, error: Exception, target: Path) -> None:
        """Say a failure of the machine; raise any other."""
        if error_number(error) is None:
            raise error
        self.failed.append(target.name)
        self._has_copies.set()
        for path in self.folder.glob(f".incomplete-{target.name}"):
            try:
                remove(path)
            except OSError:  # what keeps a file from being written may keep it from being removed
                continue
        if not self._is_failing:
            self._is_failing = True
            whole = self.all()
            safe = f" {whole[-1]} is complete." if whole else " No checkpoint was saved."
            reason = (getattr(error, "strerror", None) or str(error)).rstrip(".").lower()
            warn(f"{target} could not be saved: {reason}.{safe} Training continues and retries at the next save.")


def status_of(checkpoints: Checkpoints) -> int | None:
    """The exit status of a run that came to its end; None where every checkpoint could be saved."""
    return NOT_ALL_SAVED if getattr(checkpoints, "failed", ()) else None
