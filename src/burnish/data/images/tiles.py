"""Families whose images have a fixed size or are split into tiles of a fixed size.

Counts and texts: transformers, the ``processing_*.py`` and ``image_processing_pil_*.py`` of each family (named at the
classes), with the settings of the checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil, floor, sqrt
from typing import Any

from burnish.data.images.family import FAMILIES, Family, repeat_token
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.loop.types import Ids


@FAMILIES.register("llava", "vipllava", words=("<image>",))
class Llava(Family):
    """The same number of ``<image>`` for every image (processing_llava.py)."""

    @cached_property
    def _per_tile(self) -> int:
        """Return the number of features of a tile: its patches, without the class token if the model drops it."""
        vision, config = self.source.config.vision_config, self.source.config
        patch = int(self.setting("patch_size", vision.patch_size))
        crop = getattr(self.processor, "crop_size", None) or self.processor.size
        side = crop["height"] if "height" in crop else crop["shortest_edge"]
        added = int(self.setting("num_additional_image_tokens", int("clip" in str(vision.model_type))))
        chosen = self.setting("vision_feature_select_strategy", config.vision_feature_select_strategy)
        return (int(side) // patch) ** 2 + added - int(chosen == "default")

    def _ids_of_size(self, width: int, height: int) -> Ids:
        return repeat_token(self.placeholder_id, self._per_tile)


@FAMILIES.register("llava_next", "llava_next_video", words=("<image>",))
class LlavaNext(Llava):
    """A base tile, then the image at the best of several resolutions without padding, with a token after each row of
    patches (processing_llava_next.py)."""

    @cached_property
    def _tile(self) -> tuple[int, int]:
        """Return the side of a tile in pixels and in patches."""
        size = self.processor.size
        pixels = int(size["shortest_edge"] if "shortest_edge" in size else size["height"])
        return pixels, pixels // int(self.setting("patch_size", self.source.config.vision_config.patch_size))

    def _ids_of_size(self, width: int, height: int) -> Ids:
        rows, columns = self._unpadded_grid(width, height)
        return repeat_token(self.placeholder_id, rows * columns + rows + self._per_tile)

    def _unpadded_grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of patches of the image at the best resolution."""
        pixels, patches = self._tile
        high, wide = _best(width, height, self.processor.image_grid_pinpoints)
        rows, columns = high // pixels * patches, wide // pixels * patches
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        high, wide = _best(width, height, self.processor.image_grid_pinpoints)
        return wide, high


def _best(width: int, height: int, sizes: list[list[int]]) -> tuple[int, int]:
    """Return the (height, width) that keeps most of an image and then has the least padding
    (``select_best_resolution``)."""
    best, most, least = (0, 0), 0, float("inf")
    for high, wide in sizes:
        scale = min(wide / width, high / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        wasted = wide * high - num_pixels
        if num_pixels > most or (num_pixels == most and wasted < least):
            best, most, least = (high, wide), num_pixels, wasted
    return best


@FAMILIES.register("llava_onevision", words=("<image>",))
class LlavaOnevision(LlavaNext):
    """Like LLaVA-NeXT, downsampled above a number of tiles; only a base tile of the padded image if a row has several
    images (processing_llava_onevision.py)."""

    @cached_property
    def _per_tile(self) -> int:
        vision = self.source.config.vision_config
        return int(self.setting("num_image_tokens", (int(vision.image_size) // int(vision.patch_size)) ** 2))

    @cached_property
    def _tile(self) -> tuple[int, int]:
        return int(self.processor.size["height"]), int(sqrt(self._per_tile))

    @cached_property
    def _loss(self) -> int:
        return int(self.setting("vision_feature_select_strategy", "full") == "default")

    def of(self, image: Any, num_images: int = 1) -> Ids:
        if num_images > 1:
            return repeat_token(self.placeholder_id, self._per_tile + 1 - self._loss)
        return super().of(image)

    def in_row(self, image: ImageFile, num_images: int) -> ImageFile:
        return replace(image, is_padded=num_images > 1)

    def prepare(self, image: ImageFile) -> Any:
        """Return the pixels of an image; with several images in its row, padded to a square and resized to a tile."""
        pixels = self.resize(image)
        if not image.is_padded:
            return pixels
        from PIL import Image
        from PIL.Image import Resampling

        side = max(pixels.size)
        square = Image.new("RGB", (side, side), tuple(int(255 * level) for level in self.processor.image_mean))
        square.paste(pixels, ((side - pixels.width) // 2, (side - pixels.height) // 2))
        if self.processor.backend != "pil":
            return square
        tile = (int(self.processor.size["width"]), int(self.processor.size["height"]))
        return square.resize(tile, Resampling(self.processor.resample))

    @cached_property
    def identity(self) -> Any:
        return [*super().identity, "padded in rows with several images"]

    def _ids_of_size(self, width: int, height: int) -> Ids:
        rows, columns = self._unpadded_grid(width, height)
        most = int(str(self.source.config.vision_aspect_ratio).removeprefix("anyres_max_"))
        ratio = sqrt(rows * columns / (most * self._tile[1] ** 2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return repeat_token(self.placeholder_id, rows * columns + rows + self._per_tile - self._loss)


@FAMILIES.register("paligemma", words=("<image>",))
class PaliGemma(Llava):
    """A fixed number of ``<image>`` before the BOS token (processing_paligemma.py)."""

    in_front = True

    @cached_property
    def _per_tile(self) -> int:
        vision = self.source.config.vision_config
        own = getattr(self.processor, "image_seq_length", None)
        return int(own or (int(vision.image_size) // int(vision.patch_size)) ** 2)


@FAMILIES.register("gemma3", words=("<start_of_image>", "<image_soft_token>"))
class Gemma3(Family):
    """``<start_of_image>``, a fixed number of placeholders, ``<end_of_image>``, between blank lines
    (processing_gemma3.py)."""

    mark, placeholder = "<start_of_image>", "<image_soft_token>"
    template_text = chat_template_text = "\n\n<start_of_image>\n\n"

    def _ids_of_size(self, width: int, height: int) -> Ids:
        count = int(self.setting("image_seq_length", self.source.config.mm_tokens_per_image))
        one = f"{self.mark}{self.placeholder * count}<end_of_image>"
        crops = " ".join([f"\n\n{one}\n\n"] * self._num_crops(width, height)).removesuffix("\n\n")
        return self.text_ids(f"{one}\n\n and here are some crops to help you see better {crops}" if crops else one)

    def before(self, image: ImageFile) -> str:
        return "Here is the original image " if self._num_crops(*self.given_sizes(image)[-1]) else ""

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Return the options of pan and scan. Checkpoints have null; these are the defaults of the composed
        processor."""
        is_enabled = self.source.pan_and_scan
        is_on = self.processor.do_pan_and_scan if is_enabled is None else is_enabled
        return {
            "do_pan_and_scan": bool(is_on),
            "pan_and_scan_min_crop_size": self.processor.pan_and_scan_min_crop_size or 256,
            "pan_and_scan_max_num_crops": self.processor.pan_and_scan_max_num_crops or 4,
            "pan_and_scan_min_ratio_to_activate": self.processor.pan_and_scan_min_ratio_to_activate or 1.2,
        }

    def _num_crops(self, width: int, height: int) -> int:
        """Return the number of pan-and-scan crops besides the full image (image_processing_pil_gemma3.py,
        ``pan_and_scan``)."""
        options, longer, shorter = self.options, max(width, height), min(width, height)
        if not options["do_pan_and_scan"] or longer / shorter < options["pan_and_scan_min_ratio_to_activate"]:
            return 0
        least, most = options["pan_and_scan_min_crop_size"], options["pan_and_scan_max_num_crops"]
        crops = min(max(2, min(longer // least, floor(longer / shorter + 0.5))), most)
        return crops if min(ceil(longer / crops), shorter) >= least else 0

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        return int(self.processor.size["width"]), int(self.processor.size["height"])

    def patches(self, width: int, height: int) -> int:
        wide, high = self.resized_size(width, height)
        return wide * high // int(self.source.config.vision_config.patch_size) ** 2


@FAMILIES.register("gemma4", words=("<|image|>",))
class Gemma4(Family):
    """``<|image>``, placeholders according to the aspect ratio within a budget, ``<image|>``
    (image_processing_pil_gemma4.py, ``get_aspect_ratio_preserving_size``)."""

    mark = "<|image|>"

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        unit, most = self._unit, int(self.processor.max_soft_tokens)
        factor = sqrt(most * unit**2 / (width * height))
        wide, high = (floor(side * factor / unit) * unit for side in (width, height))
        if not high:
            wide, high = min(width // height, most) * unit, unit
        elif not wide:
            wide, high = unit, min(height // width, most) * unit
        return wide, high

    @property
    def _unit(self) -> int:
        return int(self.processor.patch_size * self.processor.pooling_kernel_size)

    def patches(self, width: int, height: int) -> int:
        wide, high = self.resized_size(width, height)
        return wide * high // int(self.processor.patch_size) ** 2

    def _ids_of_size(self, width: int, height: int) -> Ids:
        wide, high = self.resized_size(width, height)
        begin, end = (array("i", [self.token_id(word)]) for word in ("<|image>", "<image|>"))
        return begin + repeat_token(self.placeholder_id, wide * high // self._unit**2) + end


@FAMILIES.register("internvl", words=("<IMG_CONTEXT>",))
class InternVL(Family):
    """``<img>``, the placeholders of all tiles, ``</img>`` (processing_internvl.py)."""

    mark = "<IMG_CONTEXT>"

    def _tiles(self, width: int, height: int) -> int:
        return int(self.processor.get_number_of_image_patches(height, width, {}))

    def patches(self, width: int, height: int) -> int:
        vision = self.source.config.vision_config
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        return self._tiles(width, height) * (int(self.processor.size["height"]) // int(patch)) ** 2

    def _ids_of_size(self, width: int, height: int) -> Ids:
        count = int(self.setting("image_seq_length", self.source.config.image_seq_length))
        begin, end = (array("i", [self.token_id(word)]) for word in ("<img>", "</img>"))
        return begin + repeat_token(self.placeholder_id, count * self._tiles(width, height)) + end


@FAMILIES.register("aya_vision", words=("<image>", "<|IMG_PATCH|>"))
class Aya(InternVL):
    """``TILE_1`` and its placeholders, and so on, then ``TILE_GLOBAL`` and its placeholders, between two control tokens
    (processing_aya_vision.py)."""

    mark, placeholder = "<image>", "<|IMG_PATCH|>"

    def _ids_of_size(self, width: int, height: int) -> Ids:
        config = self.source.config
        side = int(self.setting("img_size", config.vision_config.image_size))
        patch = int(self.setting("patch_size", config.vision_config.patch_size))
        per_tile = (side // (patch * int(self.setting("downsample_factor", config.downsample_factor)))) ** 2
        tiles = self._tiles(width, height)
        names = [f"TILE_{number}" for number in range(1, tiles)] + ["TILE_GLOBAL"]
        text = "".join(name + self.placeholder * per_tile for name in names)
        return self.text_ids(f"<|START_OF_IMG|>{text}<|END_OF_IMG|>")


@FAMILIES.register("idefics3", "smolvlm", words=("<image>",))
class Idefics3(Family):
    """Rows of tiles, each after a token with its row and column, a blank line, and the full image
    (processing_smolvlm.py, image_processing_pil_smolvlm.py)."""

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles; (0, 0) for an image that is a single tile."""
        _, rows, columns = self.processor.get_number_of_image_patches(height, width, {})
        return int(rows), int(columns)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._grid(width, height)
        side = int(self.processor.max_image_size["longest_edge"])
        return max(columns, 1) * side, max(rows, 1) * side

    def patches(self, width: int, height: int) -> int:
        rows, columns = self._grid(width, height)
        side = int(self.processor.max_image_size["longest_edge"])
        return (rows * columns + 1) * ceil(side / int(self.source.config.vision_config.patch_size)) ** 2

    def _ids_of_size(self, width: int, height: int) -> Ids:
        grid = self._grid(width, height)
        if grid not in self._ids_of_grids:
            config = self.source.config
            usual = (int(config.vision_config.image_size) // int(config.vision_config.patch_size)) ** 2
            tile = "<image>" * int(self.setting("image_seq_len", usual // int(config.scale_factor) ** 2))
            edge = "<fake_token_around_image>"
            rows = [[f"{edge}<row_{r + 1}_col_{c + 1}>{tile}" for c in range(grid[1])] for r in range(grid[0])]
            text = "".join("".join(row) + "\n" for row in rows) + ("\n" if rows else "")
            self._ids_of_grids[grid] = self.text_ids(f"{text}{edge}<global-img>{tile}{edge}")
        return self._ids_of_grids[grid]

    @cached_property
    def _ids_of_grids(self) -> dict[tuple[int, int], Ids]:
        return {}


@FAMILIES.register("llama4", words=("<|patch|>",))
class Llama4(Family):
    """Rows of tiles, each followed by a token, and the full image (processing_llama4.py)."""

    mark, placeholder = "<|image|>", "<|patch|>"

    @cached_property
    def _per_tile(self) -> int:
        patch = int(self.setting("patch_size", self.source.config.vision_config.patch_size))
        merged = round(1 / float(self.setting("pixel_shuffle_ratio", 0.5)) ** 2)
        return (int(self.processor.size["height"]) // patch) ** 2 // merged

    @cached_property
    def _grids(self) -> list[tuple[int, int]]:
        """Return the grids (rows, columns) of tiles, grouped by aspect ratio (``find_supported_resolutions``)."""
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(int(self.processor.max_patches), 0, -1):
            for rows in (n for n in range(1, count + 1) if count % n == 0):
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
        return [grid for grids in by_ratio.values() for grid in grids]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles: the smallest grid that need not downscale the image, otherwise the grid
        with the least downscaling (``get_best_fit``; computed in float32, as in transformers)."""
        import numpy

        side = int(self.processor.size["height"])
        grids = numpy.asarray(self._grids)
        sides = (grids * side).astype(numpy.float32)
        scales = numpy.minimum(sides[:, 0] / numpy.float32(height), sides[:, 1] / numpy.float32(width))
        larger = scales[scales >= 1]
        wants_most = bool(self.processor.resize_to_max_canvas) or not larger.size
        chosen = (larger if larger.size else scales).max() if wants_most else larger.min()
        fitting = grids[scales == chosen]
        rows, columns = fitting[fitting.prod(1).argmin()]
        return int(rows), int(columns)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        (rows, columns), side = self._grid(width, height), int(self.processor.size["height"])
        return columns * side, rows * side

    def patches(self, width: int, height: int) -> int:
        rows, columns = self._grid(width, height)
        side, patch = int(self.processor.size["height"]), int(self.source.config.vision_config.patch_size)
        return (rows * columns + (rows * columns > 1)) * ((side // patch) ** 2 + 1)

    def _ids_of_size(self, width: int, height: int) -> Ids:
        rows, columns = self._grid(width, height)
        tile = repeat_token(self.placeholder_id, self._per_tile)
        tokens = ("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>")
        begin, beside, below, end = (array("i", [self.token_id(word)]) for word in tokens)
        row = (tile + beside) * (columns - 1) + tile + below
        tiles = row * rows if rows * columns > 1 else array("i")
        return begin + tiles + array("i", [self.mark_id]) + tile + end


@FAMILIES.register("lfm2_vl", words=("<image>",))
class Lfm2Vl(Family):
    """Rows of tiles, each preceded by its row and column, and a thumbnail; or only the image (processing_lfm2_vl.py,
    image_processing_lfm2_vl.py)."""

    @property
    def _unit(self) -> int:
        return int(self.processor.encoder_patch_size * self.processor.downsample_factor)

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a single-tile image, or of the thumbnail (``smart_resize``)."""
        unit, limits = self._unit, self.processor
        least, most = (int(count) * unit**2 for count in (limits.min_image_tokens, limits.max_image_tokens))
        wide, high = (max(unit, round(side / unit) * unit) for side in (width, height))
        if wide * high > most:
            scale = sqrt(width * height / most)
            wide, high = (max(unit, floor(side / scale / unit) * unit) for side in (width, height))
        elif wide * high < least:
            scale = sqrt(least / (width * height))
            wide, high = (ceil(side * scale / unit) * unit for side in (width, height))
        return wide, high

    def check(self, image: ImageFile) -> None:
        super().check(image)
        wide, high = self._whole(*self.given_sizes(image)[-1])
        count, most = wide * high // int(self.processor.encoder_patch_size) ** 2, int(self.processor.max_num_patches)
        if count > most:  # the image processor would return fewer patches than the sizes say
            raise BadImage(
                f"{image.path} is {image.width}x{image.height}, which gives {count:,} patches; the maximum of this "
                f"model is {most:,}. Crop the image."
            )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles; (1, 1) for an image that is not split."""
        settings, unit = self.processor, self._unit
        least = int(settings.encoder_patch_size)
        wide, high = (max(least, round(side / unit) * unit) for side in (width, height))
        is_large = wide * high > settings.max_image_tokens * unit**2 * settings.max_pixels_tolerance
        if not is_large or not settings.do_image_splitting or settings.min_tiles == settings.max_tiles == 1:
            return 1, 1
        best, least_difference = (1, 1), float("inf")
        for columns, rows in self._ratios:
            difference = abs(width / height - columns / rows)
            area = settings.tile_size**2 * columns * rows
            if difference < least_difference or (difference == least_difference and width * height > 0.5 * area):
                best, least_difference = (rows, columns), difference
        return best

    @cached_property
    def _ratios(self) -> list[tuple[int, int]]:
        """Return (columns, rows), sorted by their product. Equal products have the order of a Python set, as in
        transformers."""
        least, most = self.processor.min_tiles, self.processor.max_tiles
        found = {
            (wide, high)
            for side in range(least, most + 1)
            for wide in range(1, side + 1)
            for high in range(1, side + 1)
            if least <= wide * high <= most
        }
        return sorted(found, key=lambda pair: pair[0] * pair[1])

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self._grid(width, height)
        side = int(self.processor.tile_size)
        return (columns * side, rows * side) if rows * columns > 1 else self._whole(width, height)

    def patches(self, width: int, height: int) -> int:
        rows, columns = self._grid(width, height)
        (wide, high), patch = self._whole(width, height), int(self.processor.encoder_patch_size)
        tiles = rows * columns * (int(self.processor.tile_size) // patch) ** 2 if rows * columns > 1 else 0
        whole = wide * high // patch**2 if not tiles or self.processor.use_thumbnail else 0
        return tiles + whole

    def _ids_of_size(self, width: int, height: int) -> Ids:
        rows, columns = self._grid(width, height)
        unit, (wide, high) = self._unit, self._whole(width, height)
        factor, patch = int(self.processor.downsample_factor), int(self.processor.encoder_patch_size)
        whole = self.mark * (wide // unit * (high // unit))
        tile = self.mark * ceil(int(self.processor.tile_size) // patch / factor) ** 2
        if rows * columns > 1:
            text = "".join(
                f"<|img_row_{row}_col_{column}|>{tile}"
                for row in range(1, rows + 1)
                for column in range(1, columns + 1)
            )
            text += f"<|img_thumbnail|>{whole}" if self.processor.use_thumbnail else ""
        else:
            text = whole
        return self.text_ids(f"<|image_start|>{text}<|image_end|>")


@FAMILIES.register("mllama", words=("<|image|>",))
class Mllama(Family):
    """One ``<|image|>`` per image; the text after it attends to the image."""

    mark = "<|image|>"

    def patches(self, width: int, height: int) -> int:
        vision = self.source.config.vision_config
        per_tile = (int(vision.image_size) // int(vision.patch_size)) ** 2 + 1
        return int(self.processor.max_image_tiles) * per_tile

    def _ids_of_size(self, width: int, height: int) -> Ids:
        return array("i", [self.mark_id])
