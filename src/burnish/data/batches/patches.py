"""Number of image patches per row, for the token budget of a micro-batch and the memory estimate.

In: rows, and the family of the model. Out: numbers, from the sizes of the images alone.
"""

from __future__ import annotations

from typing import Any

from burnish.data.batches.batching import sequences_of
from burnish.data.images.family import Family
from burnish.data.images.image_file import images_of
from burnish.data.rows.row_set import RowSet
from burnish.loop.types import Row


def patches_of_rows(rows: RowSet[Any], family: Family | None) -> list[int] | None:
    """Return the number of patches per row; None for text rows, and for rows that are not known in advance."""
    if family is None or rows.is_streamed or not rows.has_images:
        return None
    return [0 if row is None else num_patches(row, family) for row in rows]


def num_patches(row: Row, family: Family) -> int:
    """Return the number of image patches of a row. An image shared by several of its sequences counts once."""
    images = {
        image.identity: image
        for sequence in sequences_of(row)
        for prefix in ("", "kl_")
        for image in images_of(sequence, prefix)
    }
    return sum(map(family.patches_of, images.values()))
