"""Collate rows with images into micro-batches: padding-free, with shared prefixes, or padded.

Rows have a column ``images`` with their images and positions. A collator of text rows does the rest. The batch also has
the tensors of the images and the positions that the model needs.

Values per token pass through the text collator as columns, so that they stay aligned when rows are split, concatenated
or shortened: the feature index, the three rotary positions of Qwen and GLM, the row and the block of attention masks.
Each image of a micro-batch is prepared once, even if several rows contain it.
"""

# B rows, T tokens in a row, N distinct images, F features of all of them

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
from torch import nn

from burnish.config.errors import UserError
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.models.images.features import EncodedImage, FeatureCache, ImageFeatures, trains_tower
from burnish.models.images.masks import BIDIRECTIONAL
from burnish.models.images.processor import ImageProcessor, Tensors

ROPE_COLUMNS = ("rope_time", "rope_height", "rope_width")


class ImageOfRow(Protocol):
    """An image of a row; ``begin`` and ``end`` are the range of its tokens, placeholders and markers."""

    begin: int
    end: int
    fps: float
    """Frames per second of a video."""
    is_padded: bool
    """Whether the image is padded to a square, because its row has several images (LLaVA-OneVision)."""

    @property
    def identity(self) -> str: ...


Collate = Callable[[Sequence[Row]], Batch]
ImagesOf = Callable[[Row], Sequence[Any]]
"""Returns the images of a row (``ImageOfRow``), in the order of their placeholders."""
Prepare = Callable[[Any], Tensors]
"""Returns the tensors of an image, which depend on that image only."""


@dataclass(frozen=True)
class ImageLayout:
    """Properties of a model that determine positions and masks of image tokens.

    Args:
        placeholder: id of the token that is replaced by an image feature.
        video_placeholder: the same for features of a video; -1 if there is none, or the same token.
        has_grid_positions: whether placeholders have three rotary positions (Qwen and GLM).
        merge: number of patches per side that are merged to one placeholder in these families.
        positions_per_second: temporal positions per second of a video; None: one per pair of frames.
        bidirectional: tokens that attend to each other bidirectionally (``masks``); "" for none.
        first_position: position of the first token.
        needs_row: whether the features of an image depend on other images of its row (LLaVA-OneVision).
        crosses: whether text attends to images by cross-attention, without placeholders (Mllama).
    """

    placeholder: int
    has_grid_positions: bool = False
    merge: int = 1
    bidirectional: str = ""
    first_position: int = 0
    needs_row: bool = False
    crosses: bool = False
    model_type: str = ""
    video_placeholder: int = -1
    positions_per_second: float | None = None

    @property
    def bidirectional_in_full_attention(self) -> bool:
        """Whether these tokens attend bidirectionally in full-attention layers too; in Gemma 4 only in sliding-window
        layers."""
        return not self.model_type.startswith("gemma4")

    @classmethod
    def of(cls, config: Any) -> ImageLayout:
        """Create the layout of a model. Args: config: configuration of the entire model."""
        text = config.get_text_config()
        names = ("image_token_id", "image_token_index")
        placeholder = next((getattr(config, n) for n in names if getattr(config, n, None) is not None), -1)
        rope = getattr(text, "rope_parameters", None) or {}
        merge = getattr(config.vision_config, "spatial_merge_size", 1)
        bidirectional = BIDIRECTIONAL.get(config.model_type, "")
        return cls(
            placeholder, "mrope_section" in rope, merge, bidirectional, int(config.model_type == "paligemma"),
            config.model_type == "llava_onevision", config.model_type == "mllama", config.model_type,
            getattr(config, "video_token_id", -1) if "mrope_section" in rope else -1,
            getattr(config.vision_config, "tokens_per_second", None),
        )  # fmt: skip


def computes_one_by_one(model: nn.Module, layout: ImageLayout) -> bool:
    """Return whether the vision tower of ``model`` computes each image separately: a frozen one on a CPU."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and not layout.crosses and not trains_tower(model)


class ImageCollator:
    """Collates rows of which some may have images; batches of text rows only are the same as without it.

    Args:
        collate: collator of text rows.
        collate_images: the same for rows with images; it passes columns of tokens through.
        layout, processor: of the model.
        images_of: returns the images of a row.
        prepare: returns the tensors of an image.
        one_by_one: whether the vision tower computes each image separately.
        cache: keeps features of images that depend on the image only; None: not kept.
    """

    def __init__(
        self, collate: Collate, collate_images: Collate, layout: ImageLayout, processor: ImageProcessor,
        images_of: ImagesOf, prepare: Prepare, one_by_one: bool = False, cache: FeatureCache | None = None,
    ) -> None:  # fmt: skip
        self.collate, self.collate_images, self.layout, self.processor = collate, collate_images, layout, processor
        self.images_of, self.prepare, self.one_by_one, self.cache = images_of, prepare, one_by_one, cache

    @property
    def is_for_text(self) -> bool:
        """Whether batches without images are collated differently too."""
        return self.layout.bidirectional == "prefix"

    def __call__(self, rows: Sequence[Row]) -> Batch:
        placed = [self.images_of(row) for row in rows]
        rows = [{name: value for name, value in row.items() if name != "images"} for row in rows]
        if not any(placed) and not self.is_for_text:
            return self.collate(rows)
        if self.layout.crosses and any(placed):
            return self._cross_attention(rows, placed)
        distinct = {self._key(image): image for of_row in sorted(placed, key=len) for image in of_row}
        distinct = dict(sorted(distinct.items(), key=lambda item: item[0][1]))
        tensors = {key: self.prepare(image) for key, image in distinct.items()}
        counts = dict.fromkeys(distinct, 0)
        for row, of_row in zip(rows, placed, strict=True):
            counts |= {self._key(image): len(self._places(row, image)) for image in of_row}
        begins = dict(zip(distinct, accumulate(counts.values(), initial=0), strict=False))
        batch = self.collate_images(
            [
                {**row, **self._columns(number, row, of_row, begins, tensors)}
                for number, (row, of_row) in enumerate(zip(rows, placed, strict=True))
            ]
        )
        if distinct:
            video = self.layout.video_placeholder if any(one.fps for one in distinct.values()) else -1
            features = ImageFeatures((), tuple(counts.values()), tuple(distinct), video_placeholder=video)
            if self.one_by_one:
                features.each = [self._alone(key, tensors[key]) for key in distinct]
                if self.cache is not None:
                    features.cache, features.sources = self.cache, tuple(distinct.values())
            else:
                made = self.processor.join(list(tensors.values())) | self._rows_of(distinct)
                features.names = tuple(made)
                batch |= made
            batch["images"] = features
        else:
            del batch["image_features"]
        return self._with_positions(batch)

    def _key(self, image: ImageOfRow) -> tuple[str, bool]:
        """Return a key that is equal for images with the same features."""
        return image.identity, self.layout.needs_row and image.is_padded

    def _alone(self, key: tuple[str, bool], tensors: Tensors) -> Tensors:
        """Return the tensors of an image that the vision tower computes separately."""
        return tensors if isinstance(tensors, EncodedImage) else {**tensors, **self._rows_of([key])}

    def _rows_of(self, distinct: Collection[tuple[str, bool]]) -> dict[str, torch.Tensor]:
        """Return LLaVA-OneVision's ``batch_num_images``: rows with one image each, then one row with all others. The
        model only checks whether a row has several, so the last number is at least two."""
        if not self.layout.needs_row:
            return {}
        several = sum(has_others for _, has_others in distinct)
        counts = [1] * (len(distinct) - several) + [max(2, several)] * bool(several)
        return {"batch_num_images": torch.tensor(counts)}

    def _cross_attention(self, rows: Sequence[Row], placed: Sequence[Sequence[Any]]) -> Batch:
        """Return the cross-attention of a row to its images (Mllama): text attends to an image from its mark to the
        next image.

        Source: transformers, models/mllama/processing_mllama.py (``get_cross_attention_token_mask``).
        """
        (row,), (images,) = rows, placed
        batch = self.collate_images([row])
        made = self.processor.join([self.prepare(image) for image in images])
        length, tiles = len(row["input_ids"]), made["aspect_ratio_mask"].sum(-1)[0].tolist()
        mask = torch.zeros(1, length, len(images), made["aspect_ratio_mask"].shape[-1], dtype=torch.long)
        end = next_begin = length
        for number, image in reversed(list(enumerate(images))):
            end = end if next_begin == image.end else next_begin  # adjacent images are attended to by the same text
            mask[0, image.begin : end, number, : tiles[number]] = 1
            next_begin = image.begin
        return {**batch, **made, "cross_attention_mask": mask}

    def _places(self, row: Row, one: ImageOfRow) -> list[int]:
        """Return the positions of the placeholders of an image."""
        ids, placeholders = row["input_ids"], self._placeholders
        return [at for at in range(one.begin, one.end) if ids[at] in placeholders]

    @property
    def _placeholders(self) -> tuple[int, int]:
        return self.layout.placeholder, self.layout.video_placeholder

    def _columns(
        self, number: int, row: Row, placed: Sequence[ImageOfRow], begins: Mapping[tuple[str, bool], int],
        tensors: Mapping[tuple[str, bool], Tensors],
    ) -> dict[str, list[int]]:  # fmt: skip
        """Return the columns of the tokens of a row."""
        length = len(row["input_ids"])
        features = [0] * length
        for one in placed:
            begin = begins[self._key(one)]
            for count, place in enumerate(self._places(row, one), start=1):
                features[place] = begin + count
        held = sum(token in self._placeholders for token in row["input_ids"])
        if held != sum(feature > 0 for feature in features):
            what = f"an example has {held} placeholders, but its {len(placed)} images need {sum(map(bool, features))}."
            raise UserError(what, remedy="Tokenize the dataset again (overwrite_cache: true).")
        found = {"image_features": features, "content_hashes": features}
        if self.layout.has_grid_positions:
            grids, begins_of, intervals = [], [], []
            for one in placed:
                of_image, places = tensors[self._key(one)]["image_grid_thw"].tolist(), self._places(row, one)
                size = len(places) // len(of_image)
                grids += of_image
                begins_of += [places[at * size :][:size] for at in range(len(of_image))]
                intervals += [self._interval(one)] * len(of_image)
            axes = grid_positions(length, begins_of, grids, self.layout.merge, intervals)
            found |= dict(zip(ROPE_COLUMNS, axes, strict=True))
        if self.layout.bidirectional:
            found |= {"attention_rows": [number] * length, "attention_blocks": self._blocks(number, row, features)}
        return found

    def _interval(self, one: ImageOfRow) -> float:
        """Positions in time between two pairs of frames."""
        per_second = self.layout.positions_per_second
        return 1.0 if per_second is None or not one.fps else per_second * 2 / one.fps

    def _blocks(self, number: int, row: Row, features: Sequence[int]) -> list[int]:
        """Return the block of each token, unique in the batch: one per run of placeholders, or one for everything
        before the response."""
        first = (number << 20) + 1
        if self.layout.bidirectional == "prefix":
            learned = next((at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX), len(row["labels"]))
            return [first] * learned + [0] * (len(row["labels"]) - learned)
        blocks: list[int] = []
        for is_image, run in groupby(features, bool):
            blocks += [(first + len(blocks)) * is_image] * len(list(run))
        return blocks

    def _with_positions(self, batch: Batch) -> Batch:
        if self.layout.has_grid_positions:
            grid = torch.stack([batch.pop(name) for name in ROPE_COLUMNS])  # (3, B, T)
            own = batch.get("position_ids")
            batch["position_ids"] = grid if own is None else torch.cat([own.unsqueeze(0), grid])
        if self.layout.first_position and "position_ids" in batch:
            batch["position_ids"] = batch["position_ids"] + self.layout.first_position
        if self.layout.bidirectional:  # masks express what sequence lengths cannot
            mask = batch.pop("attention_mask", None)
            batch["num_tokens"] = batch["input_ids"].numel() if mask is None else int(mask.sum())
            for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
                batch.pop(name, None)
        return batch


def grid_positions(
    length: int, places: Sequence[Sequence[int]], grids: Sequence[Sequence[int]], merge: int,
    intervals: Sequence[float] = (),
) -> tuple[list[int], list[int], list[int]]:  # fmt: skip
    """The rotary positions of a row's tokens in time, height and width.

    Text counts on by one. A placeholder in row i and column j of frame t of an image that begins at position p has
    (p + t * interval, p + i, p + j); the next text is at p + the larger of its height and width, as transformers 5.23
    has it (``get_rope_index``).

    Args:
        places: the places of the placeholders of each image, in order.
        grids: (frames, rows, columns) of patches of each image.
        intervals: of each image; 1 by default.
    Source: Wang et al. 2024, section 2.1, https://arxiv.org/abs/2409.12191
    """
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    position = 0
    for of_image, (frames, high, wide), interval in zip(places, grids, intervals or [1.0] * len(grids), strict=True):
        text = of_image[0] - len(found[0])
        rows, columns = high // merge, wide // merge
        for axis in found:
            axis += range(position, position + text)
        position += text
        for t in (torch.arange(frames) * interval).long().tolist():
            for i in range(rows):
                for j in range(columns):
                    for axis, step in zip(found, (t, i, j), strict=True):
                        axis.append(position + step)
        position += max(rows, columns)
    for axis in found:
        axis += range(position, position + length - len(axis))
    return found
