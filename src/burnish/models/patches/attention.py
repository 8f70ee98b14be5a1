"""Padding-free attention for transformers' models, through ``kernels.attention``.

In: a loaded model. Out: the same model, configured so that the sequences of a row do not attend to each other, and
whether this is possible. The following are tried in order, each verified with ``kernels.probe``:

1. burnish's attention, for models that use transformers' attention interface with its flash-attention contract
(windows, caps and sinks are arguments, and masks are not needed);
2. the model's own attention with the mask that transformers creates from restarting ``position_ids``;
3. none: batches of this model are padded.

https://huggingface.co/docs/transformers/attention_interface
"""

# B rows, H query heads, K key heads, T tokens in a row, D size of a head

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from burnish.kernels.attention import (
    Scores,
    Sequences,
    bidirectional_attention,
    flat_attention,
    has_fast_bidirectional,
    masked_attention,
)
from burnish.kernels.probe import isolates_sequences, unwrap_peft
from burnish.kernels.shared_prefix import Runs, gather_runs
from burnish.utils.patching import Reason, hook, restore

NAME = "burnish"
"""Name of this attention in transformers' configs while a model is in memory."""

PADDING_FREE = Reason(
    "model with padding-free attention", "attention is computed within each sequence only, without an attention mask"
)
_REPLACED = {"sdpa", "eager"}
"""Attention that burnish's may replace. Any other was selected explicitly."""


class PaddingFree(NamedTuple):
    """Whether batches may be padding-free, and a note for the user, if there is one."""

    is_padding_free: bool
    note: str = ""


def make_padding_free(model: nn.Module, *, own_attention: bool = True) -> PaddingFree:
    """Configure the model's attention so that the sequences of a padding-free row do not attend to each other.

    Args:
        model: a model of transformers, with or without adapter.
        own_attention: whether burnish's attention may replace the model's; false if one was selected explicitly.
    """
    inner = unwrap_peft(model)
    before = inner.config._attn_implementation
    if before == NAME:  # set by an earlier call that was verified
        return PaddingFree(True)
    supports_attention_interface = inner._supports_flash_attn and inner._can_set_attn_implementation()
    if own_attention and before in _REPLACED and supports_attention_interface:
        _register()
        inner.set_attn_implementation(NAME)
        made = hook(inner.base_model, "forward_pre", _without_mask, PADDING_FREE, with_kwargs=True)
        if isolates_sequences(model):
            return PaddingFree(True)
        restore([made])
        inner.set_attn_implementation(before)
    if isolates_sequences(model):
        return PaddingFree(
            True, f"{type(inner).__name__} uses an attention mask; burnish's faster attention does not support it."
        )
    return PaddingFree(
        False, f"{type(inner).__name__} mixes information between adjacent sequences, so batches are padded."
    )


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prevent transformers from creating an unused mask for a padding-free batch.

    That mask is (T, T), and transformers waits for the device to find out whether it is needed. A four-dimensional mask
    is passed on unchanged (transformers.masking_utils, since 4.53), so a mask with one element is passed.
    """
    cu_seq_lens = kwargs.get("cu_seq_lens_q")
    if cu_seq_lens is None or kwargs.get("attention_mask") is not None:
        return None
    return args, {**kwargs, "attention_mask": cu_seq_lens.new_ones(1, 1, 1, 1, dtype=torch.bool)}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None, key_runs: Runs | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function for transformers' interface. Padded batches use transformers' own attention.

    Args:
        query: (B, H, T, D).
        key, value: (B, K, T, D).
        key_runs: ranges of tokens that each sequence of a padding-free batch attends to with prefix sharing
            (``data.batches.batching.collate_prefix_sharing``). None: each attends to its own tokens.

    Returns:
        (B, T, H, D), and None in place of attention weights.
    """
    scores = Scores(scaling, sliding_window, softcap, s_aux, dropout)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None and max_length_q is not None:
        if not is_causal or len(query) != 1:
            raise ValueError(
                f"A padding-free batch must be one row with causal attention. Received: {len(query)} rows, "
                f"{is_causal=}."
            )
        q, k, v = (whole.squeeze(0).transpose(0, 1) for whole in (query, key, value))
        if key_runs is None or cu_seq_lens_k is None or max_length_k is None:
            sequences = Sequences.alone(cu_seq_lens_q, max_length_q)
        else:
            sequences = Sequences(cu_seq_lens_q, max_length_q, cu_seq_lens_k, max_length_k)
            k, v = gather_runs(k, key_runs), gather_runs(v, key_runs)
        return flat_attention(q, k, v, sequences, scores).unsqueeze(0), None
    if not scores.is_plain:
        mask = _causal(query, key) if attention_mask is None and is_causal else attention_mask
        return masked_attention(query, key, value, mask, scores).transpose(1, 2).contiguous(), None
    if has_fast_bidirectional(query, attention_mask, is_causal, scores):  # a vision tower
        return bidirectional_attention(query, key, value, scores).transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return output, None


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    """(T, M) true if a token attends to a key. None for a single new token, which attends to all previous ones."""
    length, seen = query.shape[2], key.shape[2]
    return None if length == 1 else torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
