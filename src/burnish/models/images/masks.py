"""Attention masks of models in which the tokens of an image see each other both ways (Gemma 3 and 4, PaliGemma).

In:  for each token its row and its block. Out: boolean masks by the kind of layer, which a model takes in place of its
     own. transformers' own masks are wrong where rows lie end to end: it looks a token's block up at its position
     inside its row (transformers 5.23, ``masking_utils``).

    full      same row AND (causal OR same block); in Gemma 4, same row AND causal
    sliding   same row AND (causal OR same block) AND key > query - window
"""

# B rows of a batch, T tokens

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SEES_BOTH_WAYS = {"gemma3": "image", "gemma4": "image", "gemma4_unified": "image", "paligemma": "prefix"}
"""Type of a model -> the tokens that see each other: those of an image, or all before the answer."""


def masks_of(model: Any, rows: Tensor, blocks: Tensor) -> Any:
    """The masks that ``model`` takes: by the kind of its layers, or one for all. (B, 1, T, T); bool, or for its eager
    attention 0 and the least number.

    Args:
        rows: (B, T) the row that each token belongs to, -1 for padding, which sees itself alone.
        blocks: (B, T) its block, unique in the batch; 0 for none.
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
        return _as_taken(full, model)
    near = at > at[:, None] - (window or len(at))
    return {"full_attention": _as_taken(full, model), "sliding_attention": _as_taken(seen & near, model)}


def _as_taken(mask: Tensor, model: Any) -> Tensor:
    mask = mask.unsqueeze(1)
    if model.config._attn_implementation != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
