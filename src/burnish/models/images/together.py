"""Images in several processes that must run the vision tower together.

If weights are sharded, a process gathers them from the others whenever it runs a layer; if the tower is trained,
processes exchange its gradients. A process without images in its micro-batch would not run the tower, and the others
would wait for it. So each runs the tower once in every forward pass, if necessary on a small white image whose features
are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from burnish.models.images.collator import ImageLayout
from burnish.models.images.features import run_in_every_pass, trains_tower
from burnish.models.images.processor import ImageProcessor

_SIDE = 64  # pixels


def must_run_together(model: nn.Module, world_size: int, shards_weights: bool) -> bool:
    """Return whether all processes must run the vision tower of ``model`` in every forward pass."""
    return world_size > 1 and (shards_weights or trains_tower(model))


def run_tower_in_every_pass(model: Any, processor: ImageProcessor) -> None:
    """Let each process run the vision tower in each forward pass, also without images in its micro-batch."""
    from PIL import Image

    tensors = processor.tensors(Image.new("RGB", (_SIDE, _SIDE), "white"))
    more = {"batch_num_images": torch.tensor([1])} if ImageLayout.of(model.config).needs_row else {}
    run_in_every_pass(model, {**tensors, **more})
