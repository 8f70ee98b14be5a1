"""Tiny vision models, and the rows of ``golden/images.json`` with their images as model inputs."""

import json
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from burnish.data.batches.batching import collate_padded, collate_padding_free, collate_prefix_sharing
from burnish.models.images.collator import ImageCollator, ImageLayout
from burnish.models.images.features import num_features, patch_vision_model
from burnish.models.images.processor import ImageProcessor

GOLDEN = Path(__file__).parents[1] / "golden"
COLLATE_FUNCTIONS = {
    "flat": collate_padding_free,
    "shared": collate_prefix_sharing,
    "padded": partial(collate_padded, pad_id=0),
}


@cache
def image_models() -> Any:
    sys.path.insert(0, str(GOLDEN))
    try:
        import image_models

        return image_models
    finally:
        sys.path.remove(str(GOLDEN))


@cache
def golden() -> Any:
    return json.loads((GOLDEN / "images.json").read_text())


@dataclass(frozen=True)
class DrawnImage:
    """An image of the golden records."""

    identity: str
    begin: int = 0
    end: int = 0
    fps: float = 0.0

    @property
    def image(self) -> Any:
        return image_models().image(self.identity)


def load_image_model(family: str) -> SimpleNamespace:
    """Return a tiny vision-language model, its processor and layout, and a function that creates collators."""
    model, composed = image_models().build(family)
    processor, layout = ImageProcessor.of(model, composed.image_processor), ImageLayout.of(model.config)
    patch_vision_model(model)

    def collator(collation: str, one_by_one: bool = False) -> ImageCollator:
        collate = COLLATE_FUNCTIONS["flat" if collation == "shared" and layout.bidirectional else collation]
        return ImageCollator(
            collate, collate, layout, processor, lambda row: row.get("images", []),
            lambda image: processor.tensors(image.image), one_by_one,
        )  # fmt: skip

    return SimpleNamespace(model=model, processor=processor, layout=layout, collator=collator, composed=composed)


def image_rows(loaded: SimpleNamespace, rows: Any) -> list[dict[str, Any]]:
    """Return golden rows with their images at the positions of the placeholders."""
    result = []
    for row in rows:
        positions = [at for at, token in enumerate(row["input_ids"]) if token == loaded.layout.placeholder]
        images = []
        for name in golden()["records"][row["record"]]["images"]:
            count = num_features(loaded.model, loaded.processor.tensors(DrawnImage(name).image))
            images.append(DrawnImage(name, positions[0], positions[count - 1] + 1))
            positions = positions[count:]
        assert not positions, (row["record"], positions)
        result.append({"input_ids": row["input_ids"], "labels": row["labels"], "images": images})
    return result
