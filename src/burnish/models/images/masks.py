"""Attention masks of models whose image tokens attend to each other bidirectionally (Gemma 3 and 4, PaliGemma).

``masks_of`` takes the row and the block of each token and returns boolean masks by type of layer, which replace those
of the model. transformers' own masks are wrong for concatenated rows: they look up the block of a token at its position
inside its row (transformers 5.23, ``masking_utils``).

    full      same row AND (causal OR same block); in Gemma 4, same row AND causal
    sliding   same row AND (causal OR same block) AND key > query - window
"""

# B rows of a batch, T tokens

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BIDIRECTIONAL = {"gemma3": "image", "gemma4": "image", "gemma4_unified": "image", "paligemma": "prefix"}
"""Model type -> tokens with bidirectional attention: those of an image, or all before the response."""


def masks_of(model: Any, rows: Tensor, blocks: Tensor) -> Any:
    """Return the masks of ``model``: by type of layer, or one for all. (B, 1, T, T); bool, or 0 and the smallest number
    for eager attention.

    Args:
        rows: (B, T) row of each token; -1 for padding, which attends to itself only.
        blocks: (B, T) block of each token, unique in the batch; 0 for none.
    """
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    at = torch.arange(rows.shape[1], device=rows.device)
    causal = at[:, None] >= at
    together = (rows[:, :, None] == rows[:, None]) & (rows[:, :, None] >= 0) | (at[:, None] == at)
    block = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] > 0)
    seen = together & (causal | block)
    full = together & causal if model.config.model_type.startswith("gemma4") else seen
    if "sliding_attention" not in (kinds or ()):
        return _in_attention_format(full, model)
    near = at > at[:, None] - (window or len(at))
    return {
        "full_attention": _in_attention_format(full, model),
        "sliding_attention": _in_attention_format(seen & near, model),
    }


def _in_attention_format(mask: Tensor, model: Any) -> Tensor:
    mask = mask.unsqueeze(1)
    if model.config._attn_implementation != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
