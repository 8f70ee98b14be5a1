"""From the row of a prompt with pictures to a request.

In:  a model that sees, and its family. Out: ``PictureReader``, which prepares the pictures of a prompt. Pictures are
     decoded when the request is made, in the thread that makes it; the tower runs in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from burnish.data.batches.batching import collate_padded
from burnish.data.images.family import Family
from burnish.data.images.picture import Picture, pictures_of
from burnish.data.images.sources import Sight
from burnish.loop.types import Row
from burnish.models.images.collator import PictureCollator, PictureLayout
from burnish.models.images.processor import ImageProcessor
from burnish.models.images.prompts import PromptPictures

LOW_PIXELS = 512 * 512
"""Pixels of a picture that is asked for in low detail."""


class PictureReader:
    """Reads the pictures of prompts.

    Args:
        sight: how pictures are found, and the limits of their sizes.
    """

    def __init__(self, model: nn.Module, family: Family, sight: Sight) -> None:
        self.family, self.sight = family, sight
        config: Any = model.config
        processor, pads = ImageProcessor.of(model, family.processor), partial(collate_padded, pad_id=0)
        self._collator = PictureCollator(
            pads, pads, PictureLayout.of(config), processor, pictures_of,
            lambda picture: processor.tensors(family.prepared(picture)),
        )  # fmt: skip

    def picture(self, url: str, place: str, detail: str = "auto") -> Picture:
        """The picture of a data URI. Raises BadPicture."""
        return self.sight.picture(url, place, max_pixels=LOW_PIXELS if detail == "low" else None)

    def num_tokens(self, picture: Picture) -> int:
        """Tokens that a picture takes in a prompt."""
        return len(self.family.of(picture))

    def of(self, row: Row) -> Mapping[str, Any]:
        """The fields of a request that pictures fill; none where the row has none."""
        if not row.get("images"):
            return {}
        found = PromptPictures.of({"input_ids": row["input_ids"], "images": row["images"]}, self._collator)
        return {"pictures": found, "content_hashes": found.content_hashes}
