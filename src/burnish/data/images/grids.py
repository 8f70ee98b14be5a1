"""Families whose images are grids of any size: Qwen's and GLM's, which also take videos, Pixtral and Mistral 3.

Sizes: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py and models/glm4v/ (``smart_resize``), and
models/pixtral/image_processing_pil_pixtral.py (``get_resize_output_image_size``) with processing_pixtral.py. Videos:
``video_processing_*.py`` and ``replace_video_token`` in ``processing_*.py`` of each family.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cached_property
from math import ceil, floor, prod, sqrt
from typing import TYPE_CHECKING, Any

from burnish.data.images.family import FAMILIES, MAX_ASPECT_RATIO, Family, repeat_token
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.data.images.videos import PAIR, VideoSettings, is_last_repeated, patches_of_frames
from burnish.loop.types import Ids

if TYPE_CHECKING:
    from PIL.Image import Image


@FAMILIES.register("qwen2_vl", "qwen2_5_vl", words=("<|image_pad|>",))
class Qwen(Family):
    """``<|vision_start|>``, one placeholder per merged patch, ``<|vision_end|>``."""

    mark, template_text = "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"
    around, squeezes = ("<|vision_start|>", "<|vision_end|>"), True
    video_mark = video_placeholder = "<|video_pad|>"
    video_template_text = "<|vision_start|><|video_pad|><|vision_end|>"
    limits_all_frames = False
    """Whether the pixel limits apply to all frames of a video together, or to each frame."""

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of patches before merging, as in ``image_grid_thw``."""
        wide, high = self.resized_size(width, height)
        return 1, high // self.processor.patch_size, wide // self.processor.patch_size

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        size, unit = self.processor.size, self.processor.patch_size * self.processor.merge_size
        return smart_size(width, height, unit, size["shortest_edge"], size["longest_edge"])

    def patches(self, width: int, height: int) -> int:
        _, rows, columns = self.grid(width, height)
        return rows * columns

    def check(self, image: ImageFile) -> None:
        super().check(image)
        width, height = self.given_sizes(image)[-1]
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise BadImage(
                f"{image.path} is {width}x{height}; the maximum aspect ratio of this model is {MAX_ASPECT_RATIO}:1."
            )

    def _ids_of_size(self, width: int, height: int) -> Ids:
        return repeat_token(self.placeholder_id, self.patches(width, height) // self.processor.merge_size**2)

    # --- videos -------------------------------------------------------------------------------------------------------

    @cached_property
    def video(self) -> VideoSettings:
        return VideoSettings.of(self.processor, self.source.video_settings)

    def processed_size(self, image: ImageFile) -> tuple[int, int]:
        width, height = self.given_sizes(image)[-1]
        if not image.frames:
            return self.resized_size(width, height)
        video, count = self.video, len(image.frames)
        unit, most = video.patch * video.merge, video.max_pixels
        if video.is_capped:
            cap = video.most_tokens * unit**2
            share = min(cap, most // count) if self.limits_all_frames else min(most, int(cap * 0.9) * PAIR // count)
            most = max(share, int(video.min_pixels * 1.05)) * (count if self.limits_all_frames else 1)
        if not self.limits_all_frames:
            return smart_size(width, height, unit, video.min_pixels, most)
        if min(width, height) < unit:
            scale = unit / min(width, height)
            width, height = int(width * scale), int(height * scale)
        return smart_size(width, height, unit, video.min_pixels, most, count)

    def video_grid(self, video: ImageFile) -> tuple[int, int, int]:
        """Return (pairs of frames, rows, columns) of patches before merging."""
        wide, high = self.processed_size(video)
        return ceil(len(video.frames) / PAIR), high // self.video.patch, wide // self.video.patch

    def patches_of(self, image: ImageFile) -> int:
        return prod(self.video_grid(image)) if image.frames else super().patches_of(image)

    def of_video(self, video: ImageFile) -> Ids:
        count = prod(self.video_grid(video)) // self.video.merge**2
        return repeat_token(self.token_id(self.video_placeholder), count)

    def prepare(self, image: ImageFile) -> Any:
        """Return the pixels of an image after the processor's own resize, which the processor leaves unchanged, or the
        patches of a video and their grids (frames, rows, columns)."""
        if not image.frames:
            return self._resize_for_processor(self.resize(image))
        least, most = image.min_pixels, image.max_pixels
        frames = [self.resize(replace(frame, min_pixels=least, max_pixels=most)) for frame in image.frames]
        return patches_of_frames(frames, *self.processed_size(image), self.video), self._grids(*self.video_grid(image))

    def _resize_for_processor(self, pixels: Image) -> Image:
        """Resize as the image processor does, which would copy a large photo to an array and back: half of its time."""
        size = self.resized_size(*pixels.size)
        resizes = self.processor.do_resize and self.processor.backend == "pil"
        if not resizes or self.resized_size(*size) != size:
            return pixels
        from PIL.Image import Resampling

        return pixels.resize(size, Resampling(self.processor.resample))

    def _grids(self, frames: int, rows: int, columns: int) -> list[list[int]]:
        return [[frames, rows, columns]]

    @property
    def identity(self) -> Any:
        return [*super().identity, sorted(self.source.video_settings.items())]


class TimestampedVideo(Qwen):
    """The time of each pair of frames of a video is in the text, and the model processes each pair as an image."""

    limits_all_frames = True

    def stamps(self, video: ImageFile) -> list[float]:
        """Return the time of each pair of frames, in seconds."""
        return [number / video.fps for number in range(0, len(video.frames), PAIR)]

    def pair(self, stamp: float, placeholders: Ids) -> Ids:
        raise NotImplementedError

    def of_video(self, video: ImageFile) -> Ids:
        _, rows, columns = self.video_grid(video)
        placeholder = self.token_id(self.video_placeholder)
        placeholders = repeat_token(placeholder, rows * columns // self.video.merge**2)
        return sum((self.pair(stamp, placeholders) for stamp in self.stamps(video)), array("i"))

    def _grids(self, frames: int, rows: int, columns: int) -> list[list[int]]:
        return [[1, rows, columns]] * frames


@FAMILIES.register("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", words=("<|image_pad|>",))
class Qwen3(TimestampedVideo):
    """Like Qwen2-VL, with ``<1.5 seconds>`` before each pair of frames of a video."""

    video_template_text = "<|video_pad|>"

    def stamps(self, video: ImageFile) -> list[float]:
        last = len(video.frames) - 1 - is_last_repeated(video)
        return [(n / video.fps + min(n + 1, last) / video.fps) / 2 for n in range(0, last + 1, PAIR)]

    def opening(self, video: ImageFile) -> str:
        return self._time_text(self.stamps(video)[0])

    def pair(self, stamp: float, placeholders: Ids) -> Ids:
        begin, end = (array("i", [self.token_id(word)]) for word in self.around)
        return self.text_ids(self._time_text(stamp)) + begin + placeholders + end

    def _time_text(self, stamp: float) -> str:
        return f"<{stamp:.1f} seconds>"


@FAMILIES.register("glm4v", "glm4v_moe", "glm_ocr", words=("<|image|>",))
class Glm(TimestampedVideo):
    """``<|begin_of_image|>``, a placeholder per merged patch, ``<|end_of_image|>``; the same for each pair of frames of
    a video, followed by its time in seconds."""

    mark, template_text = "<|image|>", "<|begin_of_image|><|image|><|end_of_image|>"
    around = ("<|begin_of_image|>", "<|end_of_image|>")
    video_mark, video_placeholder = "<|video|>", "<|image|>"
    video_template_text = "<|begin_of_video|><|video|><|end_of_video|>"

    def pair(self, stamp: float, placeholders: Ids) -> Ids:
        begin, end = (array("i", [self.token_id(word)]) for word in self.around)
        return begin + placeholders + end + self.text_ids(self._time_text(stamp))

    def _time_text(self, stamp: float) -> str:
        return str(int(stamp))

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        size, unit = self.processor.size, self.processor.patch_size * self.processor.merge_size
        if min(width, height) < unit:
            scale = unit / min(width, height)
            width, height = int(width * scale), int(height * scale)
        return smart_size(
            width, height, unit, size["shortest_edge"], size["longest_edge"], self.processor.temporal_patch_size
        )


@FAMILIES.register("glm46v", words=("<|image|>",))
class Glm46(Glm):
    """Like GLM-4V, with a different text for the times."""

    def _time_text(self, stamp: float) -> str:
        return f"{stamp:.1f} seconds"


def smart_size(width: int, height: int, unit: int, least: int, most: int, frames: int = 1) -> tuple[int, int]:
    """Return width and height rounded to multiples of ``unit`` (half to even) and scaled to [least, most] pixels.

    Args:
        frames: number of frames that share the limits.
    """
    area, frames = width * height * frames, frames if frames == 1 else round(frames / PAIR) * PAIR
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
    """Rows of ``[IMG]``, each followed by ``[IMG_BREAK]``, the last one by ``[IMG_END]``."""

    mark = "[IMG]"
    around = ("[IMG_BREAK]", "[IMG_END]")
    _merge = 1

    @cached_property
    def unit(self) -> int:
        """Side of the image area of one placeholder, in pixels."""
        return int(self.source.config.vision_config.patch_size) * self._merge

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of an image processor call: the composed processor rounds sides to multiples of a
        placeholder."""
        return {"patch_size": {"height": self.unit, "width": self.unit}}

    def check(self, image: ImageFile) -> None:
        super().check(image)
        width, height = self.given_sizes(image)[-1]
        longest = self.processor.size["longest_edge"]
        if max(width, height) > longest * min(width, height):  # the shorter side would be resized to 0
            raise BadImage(f"{image.path} is {width}x{height}; the maximum aspect ratio of this model is {longest}:1.")

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        ratio = max(width, height) / self.processor.size["longest_edge"]
        if ratio > 1:
            width, height = floor(width / ratio), floor(height / ratio)
        wide, high = (((side - 1) // self.unit + 1) * self.unit for side in (width, height))
        return wide, high

    def patches(self, width: int, height: int) -> int:
        wide, high = self.resized_size(width, height)
        return wide * high * self._merge**2 // self.unit**2

    def _ids_of_size(self, width: int, height: int) -> Ids:
        wide, high = self.resized_size(width, height)
        row = repeat_token(self.placeholder_id, wide // self.unit) + array("i", [self.token_id("[IMG_BREAK]")])
        return (row * (high // self.unit))[:-1] + array("i", [self.token_id("[IMG_END]")])


@FAMILIES.register("mistral3", words=("[IMG]",))
class Mistral3(Pixtral):
    """Like Pixtral, with one placeholder per merged patch."""

    @property
    def _merge(self) -> int:  # type: ignore[override]
        return int(self.source.config.spatial_merge_size)
