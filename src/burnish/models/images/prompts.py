"""The images of a prompt, for an inference engine that processes prompts in chunks and reuses cached prefixes.

``PromptImages.of`` converts the row of a prompt. For each new token, it provides the feature, the rotary positions, and
the tokens with bidirectional attention. The vision tower runs when the first placeholder is processed, so it does not
run for a cached prefix.
"""

# B rows of a pass, T tokens of a prompt, W width (positions that are looked at)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.loop.types import IGNORE_INDEX, Row
from burnish.models.images.collator import ImageCollator
from burnish.models.images.features import by_kind, check_transformers, image_features, joined_features


@dataclass(eq=False)
class PromptImages:
    """The images of one prompt.

    Args:
        features: per token, 0 or 1 + the index of the feature that replaces it.
        content_hashes: per token, 0 or a hash of the image at this placeholder.
        tensors: input tensors of the images.
        grid: (3, T) rotary positions in time, height and width; None if the model uses plain positions.
        blocks: per token, the index of its block of bidirectional attention; empty if there are no blocks.
        bidirectional_in_full_attention: whether blocks are bidirectional in full-attention layers as well.
        first_position: position of the first token.
        video_placeholder: placeholder token of videos; -1 if there is none, or if images use the same.
    """

    features: Sequence[int]
    content_hashes: Sequence[int]
    tensors: dict[str, Tensor]
    grid: Tensor | None = None
    blocks: Sequence[int] = ()
    bidirectional_in_full_attention: bool = True
    first_position: int = 0
    video_placeholder: int = -1
    _made: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, row: Row, collator: ImageCollator) -> PromptImages:
        """Create the images of a prompt. Args: row: ``input_ids`` and ``images``, which may be empty for a model that
        reads prompts of text bidirectionally as well (``is_for_text``); collator: of padded batches."""
        ids, images = row["input_ids"], collator.images_of(row)
        batch = collator([{**row, "labels": [IGNORE_INDEX] * len(ids)}])
        features = batch["image_features"][0].tolist() if images else [0] * len(ids)
        hashes = [0] * len(ids)
        for image in images:
            found = int.from_bytes(blake2b(image.identity.encode(), digest_size=7).digest()) + 1
            hashes[image.begin : image.end] = [found] * (image.end - image.begin)
        layout = collator.layout
        return cls(
            features, hashes, {name: batch[name] for name in batch["images"].names} if images else {},
            batch["position_ids"][:, 0] if layout.has_grid_positions else None,
            batch["attention_blocks"][0].tolist() if layout.bidirectional else (),
            layout.bidirectional_in_full_attention, layout.first_position, layout.video_placeholder,
        )  # fmt: skip

    def compute(self, model: Any) -> Any:
        """Return the output of the vision tower, which runs once."""
        if self._made is None:
            check_transformers()
            with torch.no_grad():
                device = next(model.parameters()).device
                self._made = image_features(model, {name: t.to(device) for name, t in self.tensors.items()})
            self.tensors = {}
        return self._made

    @cached_property
    def shift(self) -> int:
        """The offset between position and index of tokens after the prompt."""
        return 0 if self.grid is None else int(self.grid.max()) + 1 - len(self.features)

    def positions(self, indices: Tensor) -> Tensor:
        """Return the rotary positions (3, T) of the tokens with the indices ``indices`` (T,)."""
        assert self.grid is not None
        places = indices.clamp(max=len(self.features) - 1).cpu()
        behind = (indices + self.shift).expand(3, -1).cpu()
        return torch.where(indices.cpu() < len(self.features), self.grid[:, places], behind).to(indices.device)

    def whole_end(self, end: int) -> int:
        """Return the first index from ``end`` on that does not split a bidirectional block."""
        while 0 < end < len(self.blocks) and self.blocks[end - 1] == self.blocks[end] > 0:
            end += 1
        return end

    def whole_begin(self, begin: int) -> int:
        """Return the last index up to ``begin`` that does not split a bidirectional block."""
        while 0 < begin < len(self.blocks) and self.blocks[begin - 1] == self.blocks[begin] > 0:
            begin -= 1
        return begin


class RowOfPrompt(Protocol):
    """New tokens of a row (``inference.forward.NewTokens``)."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def images(self) -> PromptImages | None: ...


def inputs_of_images(model: Any, rows: Sequence[RowOfPrompt], indices: Tensor) -> dict[str, Any]:
    """Return the model inputs of a forward pass that depend on images; empty if no row has any.

    Args:
        indices: (B, T) index of each new token in its row.
    """
    if not any(row.images for row in rows):
        return {}
    found: dict[str, Any] = {}
    places = torch.zeros(indices.shape, dtype=torch.long)
    made, count = [], 0
    is_video: list[bool] = []
    for number, row in enumerate(rows):
        own = () if row.images is None else row.images.features[row.start : row.start + len(row.ids)]
        if row.images is None or not any(own):
            continue
        of_row = row.images.compute(model)
        places[number, : len(own)] = torch.tensor([one + count if one else 0 for one in own])
        is_video += [token == row.images.video_placeholder for token, one in zip(row.ids, own, strict=False) if one]
        made.append(of_row)
        count += max(row.images.features)
    if made:
        chosen = places.flatten()
        found["mm_encoder_outputs"] = by_kind(joined_features(made), chosen[chosen > 0] - 1, torch.tensor(is_video))
    if any(row.images is not None and row.images.grid is not None for row in rows):
        plain = indices.expand(3, *indices.shape).clone()
        for number, row in enumerate(rows):
            if row.images is not None:
                plain[:, number] = row.images.positions(indices[number])
        found["position_ids"] = plain
    first = max(row.images.first_position for row in rows if row.images is not None)
    return {**found, "position_ids": indices + first} if first else found


def bidirectional_blocks(rows: Sequence[RowOfPrompt], places: Tensor, width: int) -> Tensor | None:
    """Return (B, 1, T, W), true if a new token and a position are in the same block; None if no row has blocks."""
    if not any(row.images is not None and row.images.blocks for row in rows):
        return None
    blocks = torch.zeros(len(rows), max(width, int(places.max()) + 1), dtype=torch.long)
    for number, row in enumerate(rows):
        if row.images is not None:
            own = torch.tensor(row.images.blocks)[:width]
            blocks[number, : len(own)] = own
    blocks = blocks.to(places.device)
    of_new = torch.gather(blocks, 1, places)
    return ((of_new[:, :, None] == blocks[:, None, :width]) & (of_new[:, :, None] > 0)).unsqueeze(1)
