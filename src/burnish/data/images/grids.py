"""Families whose images are grids of any size: Qwen's, GLM's, Pixtral and Mistral 3.

Sizes: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py and models/glm4v/ (``smart_resize``), and
models/pixtral/image_processing_pil_pixtral.py (``get_resize_output_image_size``) with processing_pixtral.py.
"""

from __future__ import annotations

from array import array
from functools import cached_property
from math import ceil, floor, sqrt
from typing import Any

from burnish.data.images.family import FAMILIES, MOST_ASPECT, Family, repeated
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.loop.types import Ids


@FAMILIES.register(
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", words=("<|image_pad|>",)
)
class Qwen(Family):
    """``<|vision_start|>``, a placeholder per merged patch, ``<|vision_end|>``."""

    mark, written = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
    around, squeezes = ("<|vision_start|>", "<|vision_end|>"), True

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(frames, rows, columns) of patches, as ``image_grid_thw`` has them; the merge is not applied."""
        wide, high = self.processed(width, height)
        return 1, high // self.processor.patch_size, wide // self.processor.patch_size

    def processed(self, width: int, height: int) -> tuple[int, int]:
        size, unit = self.processor.size, self.processor.patch_size * self.processor.merge_size
        return smart_size(width, height, unit, size["shortest_edge"], size["longest_edge"])

    def patches(self, width: int, height: int) -> int:
        _, rows, columns = self.grid(width, height)
        return rows * columns

    def check(self, image: ImageFile) -> None:
        width, height = self.given_sizes(image)[-1]
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise BadImage(
                f"{image.path} is {width}x{height}; the maximum aspect ratio of this model is {MOST_ASPECT}:1."
            )

    def _made(self, width: int, height: int) -> Ids:
        return repeated(self.placeholder_id, self.patches(width, height) // self.processor.merge_size**2)


@FAMILIES.register("glm4v", "glm4v_moe", "glm_ocr", words=("<|image|>",))
class Glm(Qwen):
    """``<|begin_of_image|>``, a placeholder per merged patch, ``<|end_of_image|>``."""

    mark, written = "<|image|>", "<|begin_of_image|><|image|><|end_of_image|>"
    around = ("<|begin_of_image|>", "<|end_of_image|>")

    def processed(self, width: int, height: int) -> tuple[int, int]:
        size, unit = self.processor.size, self.processor.patch_size * self.processor.merge_size
        if min(width, height) < unit:
            scale = unit / min(width, height)
            width, height = int(width * scale), int(height * scale)
        return smart_size(
            width, height, unit, size["shortest_edge"], size["longest_edge"], self.processor.temporal_patch_size
        )


def smart_size(width: int, height: int, unit: int, least: int, most: int, frames: int = 1) -> tuple[int, int]:
    """Width and height rounded to multiples of ``unit`` (half to even), then scaled into [least, most] pixels.

    Args:
        frames: that the limits are over.
    """
    area = width * height * frames
    wide, high = (round(side / unit) * unit for side in (width, height))
    if wide * high * frames > most:
        scale = sqrt(area / most)
        wide, high = (max(unit, floor(side / scale / unit) * unit) for side in (width, height))
    elif wide * high * frames < least:
        scale = sqrt(least / area)
        wide, high = (ceil(side * scale / unit) * unit for side in (width, height))
    return wide, high


@FAMILIES.register("pixtral", words=("[IMG]",))
class Pixtral(Family):
    """Rows of ``[IMG]``, each closed by ``[IMG_BREAK]``, the last by ``[IMG_END]``."""

    mark = "[IMG]"
    around = ("[IMG_BREAK]", "[IMG_END]")
    _merge = 1

    @cached_property
    def unit(self) -> int:
        """Pixels of a placeholder's side."""
        return int(self.source.config.vision_config.patch_size) * self._merge

    @property
    def options(self) -> dict[str, Any]:
        """Options of a call of the image processor: the composed processor rounds sides to whole placeholders."""
        return {"patch_size": {"height": self.unit, "width": self.unit}}

    def processed(self, width: int, height: int) -> tuple[int, int]:
        ratio = max(width, height) / self.processor.size["longest_edge"]
        if ratio > 1:
            width, height = floor(width / ratio), floor(height / ratio)
        wide, high = (((side - 1) // self.unit + 1) * self.unit for side in (width, height))
        return wide, high

    def patches(self, width: int, height: int) -> int:
        wide, high = self.processed(width, height)
        return wide * high * self._merge**2 // self.unit**2

    def _made(self, width: int, height: int) -> Ids:
        wide, high = self.processed(width, height)
        row = repeated(self.placeholder_id, wide // self.unit) + array("i", [self.token_id("[IMG_BREAK]")])
        return (row * (high // self.unit))[:-1] + array("i", [self.token_id("[IMG_END]")])


@FAMILIES.register("mistral3", words=("[IMG]",))
class Mistral3(Pixtral):
    """As Pixtral, with a placeholder per merged patch."""

    @property
    def _merge(self) -> int:  # type: ignore[override]
        return int(self.source.config.spatial_merge_size)
