"""Convert the row of a prompt with images to the fields of a request.

``ImageReader`` decodes images when the request is created, in the calling thread; the vision tower runs in the engine's
thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from burnish.data.batches.batching import collate_padded
from burnish.data.images.family import Family
from burnish.data.images.image_file import ImageFile, images_of
from burnish.data.images.sources import MediaReader
from burnish.loop.types import Row
from burnish.models.images.collator import ImageCollator, ImageLayout, Prepare
from burnish.models.images.processor import ImageProcessor
from burnish.models.images.prompts import PromptImages

LOW_PIXELS = 512 * 512
"""Maximum number of pixels of an image with ``detail: "low"``."""


class ImageReader:
    """Reads the images of prompts.

    Args:
        reader: finds images and limits their sizes.
        prepare: returns the tensors of an image. Default: decode it each time.
    """

    def __init__(
        self, model: nn.Module, family: Family, reader: MediaReader, prepare: Prepare | None = None
    ) -> None:  # fmt: skip
        self.family, self.reader = family, reader
        config: Any = model.config
        processor, pads = ImageProcessor.of(model, family.processor, family.options), partial(collate_padded, pad_id=0)
        prepare = prepare or partial(processor.tensors_of, family.prepare)
        self._collator = ImageCollator(pads, pads, ImageLayout.of(config), processor, images_of, prepare)

    def image(self, url: str, place: str, detail: str = "auto") -> ImageFile:
        """Return the image of a data URI. Raises BadImage."""
        return self.reader.from_data_uri(url, place, LOW_PIXELS if detail == "low" else None)

    def num_tokens(self, image: ImageFile) -> int:
        """Return the number of prompt tokens of an image."""
        return len(self.family.of(image))

    def of(self, row: Row) -> Mapping[str, Any]:
        """Return the request fields of images; empty if the row has none, and the model reads text causally."""
        images = row.get("images") or []
        if not images and not self._collator.is_for_text:
            return {}
        found = PromptImages.of({"input_ids": row["input_ids"], "images": images}, self._collator)
        return {"images": found, "content_hashes": found.content_hashes}
