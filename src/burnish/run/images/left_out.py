"""Skip rows whose images turn out to be damaged when they are decoded (``on_bad_record: drop``).

``SkipDamagedImages`` returns the tensors of a white image of the same size for a damaged one, so that the tokens of the
row stay the same, and removes the labels of such rows. Each file is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images.image_file import images_of
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.report.console import warn


class SkipDamagedImages:
    """Prepares images and records damaged ones.

    Args:
        prepare: returns the tensors of an image; raises UserError if it cannot be decoded.
        blank: returns the tensors of a white image of the same size.
    """

    def __init__(self, prepare: Callable[[Any], Any], blank: Callable[[Any], Any]) -> None:
        self._prepare, self._blank, self._lock = prepare, blank, Lock()
        self.damaged: dict[str, str] = {}

    def __call__(self, image: Any) -> Any:
        try:
            return self._prepare(image)
        except UserError as error:
            self._note(image, error)
            return self._blank(image)

    def rows(self, rows: Sequence[Row], prepare: Callable[[Any], Any]) -> list[Row]:
        """Return the rows; those with a damaged image have no labels. Args: prepare: may have prepared the images in
        advance."""
        for row in rows:
            for image in images_of(row):
                prepare(image)
        is_damaged = [any(image.identity in self.damaged for image in images_of(row)) for row in rows]
        return [
            {**row, "labels": [IGNORE_INDEX] * len(row["labels"])} if damaged else row
            for row, damaged in zip(rows, is_damaged, strict=True)
        ]

    def _note(self, image: Any, error: UserError) -> None:
        with self._lock:
            is_new = image.identity not in self.damaged
            self.damaged[image.identity] = str(error.problems[0].what)
        if is_new:
            warn(
                f"{image.path}: {error.problems[0].what} Its example is excluded from the step "
                f"({len(self.damaged)} so far, on_bad_record: drop)."
            )
