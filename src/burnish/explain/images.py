"""Images in ``burnish explain``: their number, sizes and tokens, and their positions in a row."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

from burnish.data.images.family import Family
from burnish.data.images.image_file import ImageFile, images_of
from burnish.explain.view import Line
from burnish.loop.types import Row
from burnish.run.prepare import Prepared


def image_lines(rows: Sequence[Row], prepared: Prepared) -> list[Line]:
    """Return lines on the images of the rows and their cost; empty if there are none."""
    family = prepared.family
    of_rows = [images for row in rows if (images := images_of(row))]
    found = [image for images in of_rows for image in images]
    if family is None or not found:
        return []
    of_each = [one.end - one.begin for one in found]
    tokens, whole = sum(of_each), sum(map(_num_tokens, rows))
    sizes = sorted((one.width * one.height, f"{one.width}x{one.height}") for one in found)
    typical = sizes[len(sizes) // 2][1]
    resize_steps = [family.given_sizes(one) for one in found]
    patches = [family.patches_of(one) for one in found]
    resized = sum(len(steps) > 1 for steps in resize_steps)
    distinct = len({one.identity for one in found})
    per_step = sum(patches) / max(1, len(rows)) * (prepared.steps.rows_per_step or 1)
    where = f"in {len(of_rows):,} of {len(rows):,} examples ({family.model_type})"
    return [
        Line("images", f"{len(found):,}, {distinct:,} distinct, {where}"),
        Line("image sizes", f"{sizes[0][1]} to {sizes[-1][1]}, median {typical}; {resized:,} resized"),
        Line("image tokens", f"{100 * tokens / whole:.3g}% of all, median {median(of_each):g} per image"),
        Line("image patches", f"about {per_step:,.0f} per step"),
    ]  # fmt: skip


def _num_tokens(row: Row) -> int:
    """Return the length of the sequence of a row in which images are counted."""
    return next(len(row[name]) for name in ("input_ids", "chosen_input_ids", "prompt_input_ids") if name in row)


def image_in_words(image: ImageFile, number: int, family: Family | None) -> str:
    """Return text such as ``[image 3: data/x.jpg 4032x3024 -> 756x560, 540 tokens]``."""
    path = os.path.relpath(image.path)
    path = image.path if path.startswith("..") else path
    size = f"{image.width}x{image.height}"
    if image.frames:
        path += f" and {len(image.frames) - 1} more frames"
    if family is not None:
        width, height = family.processed_size(image)
        size += f" -> {width}x{height}"
    return f"[{'video' if image.frames else 'image'} {number}: {path} {size}, {image.end - image.begin:,} tokens]"
