"""Check whether rows with images have the same logits in a batch as alone.

Text rows do not show this. Gemma 3 separates text rows in a padding-free batch, but its image tokens attend
bidirectionally to positions of another row. The rows of the check differ in the positions and the number of their
images, and one has none: with one image at the same position of each row, Gemma 3 would pass. Images are random.
"""

# T tokens of a row, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from burnish.kernels.probe import REFUSALS, is_close, probe_mode, unwrap_peft
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.models.images.collator import ImageCollator
from burnish.models.images.features import num_features

_SIZES = ((64, 48), (40, 56), (48, 72))
"""Width and height of the images."""
_ROWS = ((9, "0", 5, "1", 4), (3, "2", 13), (11,))
"""For each row, numbers of random tokens with the index of an image between them."""


@dataclass(frozen=True)
class RandomImage:
    """A random image in a row of the check."""

    identity: str
    image: Any
    begin: int = 0
    end: int = 0
    fps: float = 0.0
    is_padded: bool = False


def isolates_images(model: nn.Module, collator: ImageCollator) -> bool:
    """Return whether rows with images have the same logits in a batch of ``collator`` as each row alone in the forward
    pass of transformers, which computes positions and masks itself. Also checks that other pixels in neighboring rows
    change nothing.

    Args:
        model: vision model after ``features.patch_vision_model``.
    """
    collator = collator_of_drawn_images(collator)
    try:
        with probe_mode(model) as logits_of:
            rows = list(random_rows(model, collator))
            expected = [
                logits_of(**_inputs_on_device(model, transformers_inputs(model, collator, row)))[0] for row in rows
            ]
            for changed in (None, *(number for number, row in enumerate(rows) if row["images"])):
                others = [_with_inverted_images(row) if number == changed else row for number, row in enumerate(rows)]
                found = _by_row(logits_of(**_inputs_on_device(model, collator(others))), rows)
                if not all(is_close(found[n], expected[n], model) for n in range(len(rows)) if n != changed):
                    return False
            return True
    except REFUSALS:
        return False


def collator_of_drawn_images(collator: ImageCollator) -> ImageCollator:
    """Return the collator for the rows of the check."""
    return ImageCollator(
        collator.collate, collator.collate_images, collator.layout, collator.processor,
        lambda row: row.get("images", []), lambda image: collator.processor.tensors(image.image),
        collator.one_by_one,
    )  # fmt: skip


def random_rows(model: nn.Module, collator: ImageCollator) -> Iterator[Row]:
    """Return rows of random text: with two images, with one near the beginning, and with none."""
    from PIL import Image

    images = []
    generator = torch.Generator().manual_seed(7)
    for number, (width, height) in enumerate(_SIZES):
        pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        image = Image.fromarray(pixels.numpy())
        images.append(RandomImage(f"drawn {number}", image))
    vocabulary = _words(unwrap_peft(model))
    placeholder = collator.layout.placeholder
    for parts in _ROWS:
        ids: list[int] = []
        placed: list[RandomImage] = []
        num_images = sum(isinstance(part, str) for part in parts)
        for part in parts:
            if isinstance(part, str):
                one = images[int(part)]
                count = _num_tokens(model, collator, one, num_images)
                is_padded = collator.layout.needs_row and num_images > 1
                placed.append(replace(one, begin=len(ids), end=len(ids) + count, is_padded=is_padded))
                ids += [placeholder] * count
                continue
            drawn = torch.randint(len(vocabulary), (part,), generator=generator).tolist()
            ids += [vocabulary[number] for number in drawn]
        yield {"input_ids": ids, "labels": [IGNORE_INDEX] * (len(ids) - 1) + ids[-1:], "images": placed}


def _words(model: Any) -> list[int]:
    """Return all tokens except those named by the configuration, such as placeholders of images and videos, from which
    transformers computes positions."""
    named = {value for name, value in model.config.to_dict().items() if name.endswith(("_token_id", "_token_index"))}
    return sorted(set(range(model.get_input_embeddings().weight.shape[0])) - named)


def _num_tokens(model: nn.Module, collator: ImageCollator, drawn: RandomImage, num_images: int) -> int:
    """Return the number of placeholders of an image. Args: num_images: images in its row."""
    if collator.layout.crosses:
        return 1
    tensors = collator.processor.tensors(drawn.image)
    if collator.layout.needs_row:
        tensors["batch_num_images"] = torch.tensor([num_images])
    return num_features(model, tensors)


def transformers_inputs(model: nn.Module, collator: ImageCollator, row: Row) -> Batch:
    """Return the inputs of a single row as transformers' processors prepare them: without positions and masks."""
    ids = torch.tensor([row["input_ids"]])
    is_image = (ids == collator.layout.placeholder).long()
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if row["images"]:
        batch |= collator.processor.join([collator.processor.tensors(drawn.image) for drawn in row["images"]])
    if collator.layout.needs_row:
        batch["batch_num_images"] = torch.tensor([len(row["images"])])
    if collator.layout.bidirectional == "prefix":
        batch["token_type_ids"] = (torch.tensor([row["labels"]]) != IGNORE_INDEX).long()
    else:
        taken = signature(unwrap_peft(model).forward).parameters
        batch |= {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    return batch


def _with_inverted_images(row: Row) -> Row:
    from PIL import ImageChops

    placed = [replace(p, identity=f"{p.identity} negated", image=ImageChops.invert(p.image)) for p in row["images"]]
    return {**row, "images": placed}


def _inputs_on_device(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Move the model inputs of a batch to its device."""
    device = next(model.parameters()).device
    left_out = ("labels", "num_tokens", "content_hashes", "sequence")
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name not in left_out
    }


def _by_row(logits: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    lengths = [len(row["input_ids"]) for row in rows]
    if len(logits) == 1:
        return list(torch.split(logits[0], lengths))
    return [of_row[:length] for of_row, length in zip(logits, lengths, strict=True)]
