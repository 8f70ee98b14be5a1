"""The loss of a padded micro-batch, computed only from tokens that it depends on.

In: a causal language model, and a batch of transformers' or TRL's collators: rows with padding on the right. Out: the
same tokens as a padding-free batch (``data.batches.batching.collate_prefix_sharing``), whose loss is the same up to the
order of summation; or None if model or batch are not known to support it. The batch is then used unchanged.

The padding-free batch is internal: loaders return the collator's batch, and scripts that request the model's outputs
get those of the padded batch.
"""

# B rows, T tokens in a row, N target positions

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from burnish.adapters.peft import changes_outputs
from burnish.data.batches.batching import collate_prefix_sharing
from burnish.kernels.probe import Capabilities, unwrap_peft
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.losses.targets import collate_trained
from burnish.models.patches.attention import NAME
from burnish.models.patches.capabilities import find_capabilities
from burnish.trainer.data.outputs import has_hooks
from burnish.trainer.inspection import base_model, computes_its_own_loss, is_causal_lm

_KNOWN = {"input_ids", "attention_mask", "labels", "target_positions"}


def shared_prefixes_of(batch: Mapping[str, Any]) -> Batch | None:
    """The padding-free batch. None if the batch has more than ids, mask and labels, or if its padding is not at the end
    of each row and without labels.
    """
    if not batch.keys() <= _KNOWN or not {"input_ids", "labels"} <= batch.keys():
        return None
    ids, labels = batch["input_ids"], batch["labels"]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or labels.shape != ids.shape:
        return None
    mask = batch.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape:
        return None
    lengths = mask.ne(0).sum(1)
    is_token = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    is_plain = (mask.eq(1) == is_token).all() & lengths.gt(0).all() & labels[~is_token].eq(IGNORE_INDEX).all()
    if not is_plain:
        return None
    rows: list[Row] = [
        {"input_ids": some[:length], "labels": theirs[:length]}
        for some, theirs, length in zip(ids.tolist(), labels.tolist(), lengths.tolist(), strict=True)
    ]
    flat = collate_trained(collate_prefix_sharing, rows)
    return {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in flat.items()}


def probe_prefix_sharing(model: nn.Module, is_wanted: bool, needs_head: bool = False) -> Capabilities:
    """Probe whether micro-batches of ``model`` may be padding-free with unneeded tokens skipped, and find its head.

    Args:
        is_wanted: whether this is requested.
        needs_head: whether the head is needed in any case.
    """
    may = is_wanted and may_be_padding_free(model)
    return find_capabilities(
        model, padding_free=may, prefix_sharing=may, head_of=unwrap_peft(model) if may or needs_head else None
    )


def may_be_padding_free(model: nn.Module) -> bool:
    """Whether the configs of model and adapter allow it: no prompt learning, no loss over all tokens, no attention that
    was selected explicitly.
    """
    adapters = getattr(model, "peft_config", {})
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return False
    config: Any = getattr(unwrap_peft(model), "config", None)
    needs_router = getattr(config, "output_router_logits", False)
    return not needs_router and getattr(config, "_attn_implementation", None) in {"sdpa", NAME}


def has_plain_loss(model: nn.Module) -> bool:
    """Whether the model's loss is the plain cross entropy of the next token: an unmodified causal language model of
    transformers, whose forward pass has no hooks. An adapter may not change the outputs (AdaLoRA adds to the loss).
    """
    inner = base_model(model)  # not that of a script's own wrapper, which may change the loss
    if model is not inner and changes_outputs(model):
        return False
    is_theirs = type(inner).__module__.startswith("transformers.models.") and is_causal_lm(inner)
    return (
        is_theirs and getattr(inner, "loss_function", None) is ForCausalLMLoss and not computes_its_own_loss(inner)
        and "forward" not in vars(inner) and not has_hooks(inner) and not has_hooks(model)
    )  # fmt: skip
