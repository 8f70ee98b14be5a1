"""Padding-free causal attention: over concatenated sequences that do not attend to each other.

In:  queries, keys and values of all tokens, and the begin of each sequence. Out: the weighted values of each token. A
sequence may have keys before that of its first query: those of a shared prefix.

On a GPU one kernel computes all sequences (flash-attn if installed, else torch's ``varlen_attn``, else flash-attn from
the library kernels). Nothing is read from the device. On a CPU in 16 bits short sequences share matrix products
(``kernels.cpu.short``), and each long one is computed by ``kernels.cpu.blockwise``; otherwise torch's fused attention
is called once per sequence.

Measured on one AVX512-BF16 core (14 heads of size 64 with 2 key heads, forward and backward of one sequence, bfloat16),
ms of plain products, of blocks and of the fused kernel: 256 tokens 6, 10, 16; 512 tokens 38, 29, 48; 1,024 tokens 240,
99, 128; 2,048 tokens -, 348, 395. In float32 the fused kernel takes as long as plain products at 64 tokens, and less
for longer sequences. Scores with a cap or a sink, which no fused torch kernel supports, are computed with plain
products, one sequence after another.
"""

# T tokens of all sequences, U keys of all sequences, S sequences, L tokens of one sequence, M keys of one,
# H query heads, K key heads (H is a multiple of K), D size of a query and a key, E size of a value

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from burnish.kernels.cpu.blockwise import blockwise_attention
from burnish.kernels.cpu.short import Lengths, short_attention


@dataclass(frozen=True)
class Scores:
    """Options of the attention scores.

    Args:
        scale: factor of the product; None: 1 / sqrt(D).
        window: a token attends to itself and the ``window - 1`` tokens before it; None: to all before it.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, https://arxiv.org/abs/2408.00118).
        sinks: (H,) scores of an additional key with the value zero that every token attends to (gpt-oss).
        dropout: probability with which an attention weight is zeroed.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not self.softcap and self.sinks is None


class Sequences(NamedTuple):
    """The boundaries of the sequences.

    Args:
        begins: (S + 1,) int32, the first token of each sequence, and T.
        longest: number of tokens of the longest sequence.
        key_starts: (S + 1,) int32, the first key of each sequence, and U. Its last key is that of its last token.
        most_keys: maximum number of keys of a sequence.
    """

    begins: Tensor
    longest: int
    key_starts: Tensor
    most_keys: int

    @classmethod
    def alone(cls, begins: Tensor, longest: int) -> Sequences:
        """Sequences that attend to their own tokens only."""
        return cls(begins, longest, begins, longest)


def flat_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Attention within each of the concatenated sequences.

    Args:
        query: (T, H, D).
        key: (U, K, D).
        value: (U, K, E). Under autocast all three are converted to its dtype.
        sequences: the boundaries of the sequences.
        scores: options of the scores.

    Returns:
        (T, H, E)
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device, enabled=False):
        has_kernels = device in _WITH_KERNELS and query.shape[-1] == value.shape[-1]
        kernel = kernel_for(dtype, scores) if has_kernels else None
        if kernel is not None:
            return kernel(query, key, value, sequences, scores)
        return _by_runs(query, key, value, token_counts(sequences), scores)


def has_fast_bidirectional(query: Tensor, mask: Tensor | None, is_causal: bool, scores: Scores) -> bool:
    """Return whether ``bidirectional_attention`` supports these inputs and is faster than torch's attention.

    Args:
        query: (B, H, L, D).
        mask: attention mask, if any.
        is_causal: whether the attention is causal.
        scores: options of the scores.
    """
    is_supported = mask is None and not is_causal and scores.is_plain and not scores.dropout
    return is_supported and is_half_on_cpu(query) and query.shape[2] >= _MIN_BIDIRECTIONAL


def bidirectional_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute attention without a mask, one block of queries at a time.

    Args:
        query: (B, H, L, D).
        key: (B, K, L, D).
        value: (B, K, L, E).
        scores: options of the scores; only the scale is used.

    Returns:
        (B, H, L, E)
    """
    scale, rows = _scale(query, scores), zip(query, key, value, strict=True)
    return torch.stack([blockwise_attention(q, k, v, scale, is_causal=False) for q, k, v in rows])


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention by its definition, with any mask.

    Args:
        query: (..., H, L, D).
        key: (..., K, M, D).
        value: (..., K, M, E), with the same leading dimensions.
        mask: broadcast to (..., H, L, M): true or 0 if a token attends to a key; false or -inf if not.
        scores: options of the scores.

    Returns:
        (..., H, L, E)
    """
    *leading, heads, length, size = query.shape
    groups, width = heads // key.shape[-3], key.shape[-2]
    scale = _scale(query, scores)
    # Query heads that share a key head are stacked to one matrix, so that the key is not repeated.
    folded, key, value = query.reshape(-1, groups * length, size), _flatten_batch(key), _flatten_batch(value)
    # The scale is applied within the product, which is summed in float32. Scaling an operand would round once more.
    made = torch.baddbmm(folded.new_zeros(1, 1, 1), folded, key.transpose(1, 2), beta=0, alpha=scale)
    made = made.view(*leading, heads, length, width)
    if scores.softcap:
        made = scores.softcap * torch.tanh(made / scores.softcap)
    if mask is not None:
        # The minimum rather than -inf: a padding token, which attends to nothing, gets a mean of all and not NaN.
        made = made.masked_fill_(~mask, torch.finfo(made.dtype).min) if mask.dtype == torch.bool else made.add_(mask)
    weights = F.dropout(_softmax(made, scores.sinks), scores.dropout, scores.dropout > 0)
    return torch.bmm(weights.reshape(-1, groups * length, width), value).view(*leading, heads, length, -1)


def _flatten_batch(x: Tensor) -> Tensor:
    """(..., K, M, D) -> (N, M, D)"""
    return x.reshape(-1, *x.shape[-2:])


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """(..., H, L, M) weights; with sinks they sum to less than 1."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


# --- on a CPU, and where a GPU has no kernel --------------------------------------------------------------------------

_SHORT = 384
"""Maximum number of tokens for which a sequence in 16 bits is computed by plain products on a CPU. For a sequence with
more keys than tokens, the same number of scores applies."""
_MIN_BIDIRECTIONAL = 256
"""Minimum sequence length for which bidirectional attention is computed in blocks."""
_LONG = 600
"""Minimum number of tokens of a sequence whose mask is made causal (``_is_mostly_own``)."""


def _by_runs(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scores: Scores) -> Tensor:
    # split() rather than slices: its backward pass is one concatenation, not a sum of mostly zero tensors.
    runs = list(_runs(lengths, _SHORT if is_half_on_cpu(query) and scores.is_plain else 0))
    counts = [sum(length for length, _ in run) for run in runs]
    widths = [sum(map(sum, run)) for run in runs]
    parts = zip(
        torch.split(query, counts), torch.split(key, widths), torch.split(value, widths), strict=True
    )  # fmt: skip
    mixed = [_run(q, k, v, run, scores) for run, (q, k, v) in zip(runs, parts, strict=True)]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def is_half_on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.element_size() == 2


def _runs(lengths: Lengths, longest: int) -> Iterator[Lengths]:
    """Group consecutive sequences of up to ``longest`` tokens. Longer ones form a group each."""
    for is_short, found in groupby(lengths, partial(_is_short, longest=longest)):
        neighbours = tuple(found)
        yield from [neighbours] if is_short else zip(neighbours)


def _is_short(lengths: tuple[int, int], longest: int) -> bool:
    length, before = lengths
    return length * (length + before) <= longest**2


def _run(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scores: Scores) -> Tensor:
    """Attention of one group: (T, H, D), (U, K, D), (U, K, E) -> (T, H, E)"""
    if not is_half_on_cpu(query) or not scores.is_plain or not _is_short(lengths[0], _SHORT):
        return _attend_one_sequence(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), scores
        ).transpose(0, 1)
    window = scores.window if scores.window and scores.window < max(map(sum, lengths)) else None
    create_mask = partial(_band_mask, window=window, dtype=query.dtype, device=query.device)
    return short_attention(query, key, value, lengths, _scale(query, scores), scores.dropout, create_mask)


def _scale(query: Tensor, scores: Scores) -> float:
    return query.shape[-1] ** -0.5 if scores.scale is None else scores.scale


def _attend_one_sequence(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attention of one sequence: (H, L, D), (K, M, D), (K, M, E) -> (H, L, E)"""
    length, width = query.shape[1], key.shape[1]
    before = width - length
    window = scores.window if scores.window and scores.window < width else None
    if not scores.is_plain:
        return masked_attention(
            query, key, value, _band_mask(length, before, before, window, query.dtype, query.device), scores
        )
    if is_half_on_cpu(query) and window is None and not scores.dropout:
        return blockwise_attention(query, key, value, _scale(query, scores))
    is_filled = window is None and _is_mostly_own(query, before)
    if is_filled:  # queries whose results are not used, so that the mask is causal
        query = F.pad(query, (0, 0, before, 0))
    needs_band = window is not None or (before > 0 and not is_filled)
    mixed = F.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=_band_mask(length, before, before, window, query.dtype, query.device) if needs_band else None,
        is_causal=not needs_band,
        scale=scores.scale,
        dropout_p=scores.dropout,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return mixed[0, :, -length:]


def _is_mostly_own(query: Tensor, before: int) -> bool:
    """Return whether the keys before a long sequence (H, L, D) are few.

    On a CPU, the fused kernel skips the keys after a block of queries only if the mask is causal rather than a tensor.
    Measured on one AVX2 core (6 heads of size 64 with 2 key heads, forward and backward, float32), ms with a tensor,
    with a causal mask and queries of zeros for the keys before the sequence: 480 tokens after 32 keys 22, 24; 600 after
    32 35, 32; 800 after 27 59, 46; 800 after 400 84, 86; 1,200 after 100 137, 95; 2,000 after 40 360, 224.
    """
    length = query.shape[1]
    return query.device.type == "cpu" and length >= _LONG and 0 < before <= length // 4


def _band_mask(
    length: int, before: int, filled: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(L, filled + L) additive mask: 0 for the token itself and those before it in the window, else -inf.

    Args:
        length: L.
        before: number of keys before the first token.
        filled: the same number including padding.
        window: size of the window.
        dtype, device: of the mask.
    """
    size = before + length
    if before and size > _MOST_KEPT:  # only a few rows are needed, and a full square would take gigabytes
        whole = _additive(length, before, window, dtype, device)
    else:
        whole = _causal_mask(-(-size // 256) * 256, window, dtype, device)[before:size, :size]
    if filled == before:
        return whole
    return torch.cat(
        [whole[:, :before], whole.new_full((length, filled - before), float("-inf")), whole[:, before:]], 1
    )


_MOST_KEPT = 4096
"""Maximum number of keys for which masks of sequences with a shared prefix are slices of a cached square."""


@lru_cache(maxsize=4)
def _causal_mask(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _additive(size, 0, window, dtype, device)


def _additive(length: int, before: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(L, before + L) 0 if a token attends to a key, else -inf."""
    seen = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
    if window:
        seen = seen.triu(before + 1 - window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


_LENGTHS: MutableMapping[Tensor, Lengths] = WeakTensorKeyDictionary()


def token_counts(sequences: Sequences) -> Lengths:
    """Number of tokens of each sequence, and of keys before them. Read from the device once per batch. On a GPU this
    waits for the device, but the kernels there do not need these numbers.
    """
    if sequences.begins not in _LENGTHS:
        counts, widths = (begins.diff().tolist() for begins in (sequences.begins, sequences.key_starts))
        _LENGTHS[sequences.begins] = tuple((count, w - count) for count, w in zip(counts, widths, strict=True))
    return _LENGTHS[sequences.begins]


# --- one kernel for all sequences -------------------------------------------------------------------------------------

_WITH_KERNELS = {"cuda"}
"""Types of devices with such kernels."""

Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, Scores], Tensor]


def kernel_for(dtype: torch.dtype, scores: Scores) -> Kernel | None:
    """The GPU kernel that supports these scores. None if there is none; attention is then computed per sequence."""
    if dtype not in (torch.bfloat16, torch.float16) or scores.sinks is not None:
        return None
    if _is_installed("flash_attn"):
        return _flash_attn
    if scores.is_plain and not scores.dropout and _is_installed("torch.nn.attention.varlen"):
        return _torch_varlen
    return _flash_attn if _is_installed("kernels") and _flash_of_hub() is not None else None


_INSTALLED_MODULES = {
    name: find_spec(name) is not None for name in ("flash_attn", "kernels", "torch.nn.attention.varlen")
}
"""Looked up once at import, because find_spec within a layer would break the graph of torch.compile (torch 2.11)."""


def _is_installed(module: str) -> bool:
    return _INSTALLED_MODULES[module]


def _window(scores: Scores) -> tuple[int, int]:
    """(tokens to the left, tokens to the right) that a token attends to; -1 means all."""
    return (scores.window - 1 if scores.window else -1, 0)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    mixed: Tensor = _flash_function()(
        q, k, v, sequences.begins, sequences.key_starts, sequences.longest, sequences.most_keys,
        dropout_p=scores.dropout, softmax_scale=scores.scale, causal=True, window_size=_window(scores),
        softcap=scores.softcap or 0.0,
    )  # fmt: skip
    return mixed


@cache
def _flash_function() -> Callable[..., Any]:
    """flash-attn's function for concatenated sequences: from the library, or from the hub."""
    if not _is_installed("flash_attn"):
        function = _flash_of_hub()
        assert function is not None
        return function
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func  # type: ignore[no-any-return]


_HUB_KERNEL, _HUB_VERSION = "kernels-community/flash-attn2", 4
"""Repository of flash-attn 2 for the library kernels, and its version for torch 2.10 and later, as in transformers
5.23."""


@cache
def _flash_of_hub() -> Callable[..., Any] | None:
    """The same function, compiled and published by Hugging Face. None, with a warning, if it cannot be downloaded."""
    from kernels import get_kernel  # type: ignore[import-not-found]

    try:
        function: Callable[..., Any] = get_kernel(_HUB_KERNEL, version=_HUB_VERSION).flash_attn_varlen_func
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        warnings.warn(
            f"{_HUB_KERNEL} cannot be used ({str(error).splitlines()[0]}): attention runs in a separate call "
            "per sequence.",
            stacklevel=2,
        )
        return None
    return function


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    attend, shares_keys = _varlen_attn()
    extra = {}
    if q.shape[1] != k.shape[1] and shares_keys:
        extra["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (whole.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for whole in (k, v))
    mixed: Tensor = attend(
        q, k, v, sequences.begins, sequences.key_starts, sequences.longest, sequences.most_keys,
        scale=scores.scale, window_size=_window(scores), **extra,
    )  # fmt: skip
    return mixed


def _varlen_attn() -> tuple[Callable[..., Any], bool]:
    """torch's kernel, and whether query heads may share a key head (torch 2.12 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in (varlen_attn.__kwdefaults__ or {})
