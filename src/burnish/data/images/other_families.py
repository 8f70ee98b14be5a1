"""Families with one token per image (Mllama), and the fallback for other models, which calls their composed processor.

Sources: transformers, models/mllama/processing_mllama.py.
"""

from __future__ import annotations

from array import array
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images.family import FAMILIES, Checkpoint, Family
from burnish.loop.types import Ids


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


class AnyFamily(Family):
    """A model without a registered family: the composed processor is called with a blank image, once per image size.

    Args:
        source: checkpoint with ``composed``.
    """

    def __init__(self, source: Checkpoint) -> None:
        config, tokenizer = source.config, source.tokenizer
        names = ("image_token_id", "image_token_index")
        found = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if found is None:
            what = f"the config of {config.model_type} has no image_token_id (the image placeholder)."
            raise UserError(what, remedy="Use a model of another family.", option="model_name_or_path")
        self.placeholder = str(tokenizer.convert_ids_to_tokens(int(found)))
        self.mark = str(getattr(source.composed, "image_token", None) or self.placeholder)
        super().__init__(source)

    def _ids_of_size(self, width: int, height: int) -> Ids:
        from PIL import Image

        blank = Image.new("RGB", (width, height), "white")
        made = self.source.composed(images=[blank], text=[self.mark], add_special_tokens=False)
        return array("i", list(made["input_ids"][0]))

    @property
    def note(self) -> str:
        """Return a note for the user on how images are written."""
        return (
            f"Model type {self.model_type} has no dedicated image support: placeholders are created by "
            f"transformers' {type(self.source.composed).__name__}, and padding-free batches are used only if the "
            "model supports them."
        )


def any_family(source: Checkpoint, known: Any) -> AnyFamily:
    """Return the fallback family for a model type that is not in ``known``.

    Raises:
        UserError: if the composed processor cannot be loaded, or the model has no image token.
    """
    if source.composed is None:
        raise UserError(
            f"Models of type {source.config.model_type} cannot be trained on images: their processor cannot be loaded.",
            remedy=f"Model types that do not need one: {', '.join(known)}.",
        )
    return AnyFamily(source)
