"""Causal attention over sequences that lie end to end, in which nobody sees a neighbour.

In:  queries, keys and values of all tokens, and where each sequence begins. Out: the weighted values, token by token.
A sequence may have keys before that of its first query: those of tokens that it shares with others, and goes on from.

On a GPU one kernel takes all sequences (flash-attn where it is installed, else torch's own ``varlen_attn``, else
flash-attn as the library kernels fetches it); nothing is read from the device. On a CPU in 16 bits short sequences
share their products (``ops.short``), and a long one has ``ops.blockwise`` for itself; else each sequence has a call of
torch's fused attention. Measured on one AVX512-BF16 core (14 heads of 64 on 2 keys, forward and backward of one
sequence, bfloat16), ms of plain products, of blocks and of the fused kernel: 256 tokens 6, 10, 16; 512 tokens 38, 29,
48; 1,024 tokens 240, 99, 128; 2,048 tokens -, 348, 395. In float32 the fused kernel takes as long as the products at 64
tokens, and less beyond. Where the scores are capped or have a sink, which no fused kernel of torch knows, products of
one sequence after another are the only way.
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

from burnish.ops.blockwise import blockwise_attention
from burnish.ops.short import Lengths, short_attention


@dataclass(frozen=True)
class Scores:
    """How a score is made of a query and a key, and whom a token may see besides.

    Args:
        scale: what the product is multiplied by; None is 1 / sqrt(D).
        window: a token sees itself and the ``window - 1`` before it; None is all before it.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, https://arxiv.org/abs/2408.00118).
        sinks: (H,) scores of a key that every token sees and whose value is nothing (gpt-oss).
        dropout: the probability with which a weight is zeroed.
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
    """Which tokens belong together.

    Args:
        begins: (S + 1,) int32, where each sequence begins, and T.
        longest: tokens of the longest sequence.
        begins_of_keys: (S + 1,) int32, where the keys of each begin, and U. The last of them is that of the last token.
        most_keys: of a sequence.
    """

    begins: Tensor
    longest: int
    begins_of_keys: Tensor
    most_keys: int

    @classmethod
    def alone(cls, begins: Tensor, longest: int) -> Sequences:
        """Each attends to its own tokens and no others."""
        return cls(begins, longest, begins, longest)


def flat_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    """Attention within each of the sequences that lie end to end.

    Args:
        query: (T, H, D); key: (U, K, D); value: (U, K, E). Under autocast its dtype is taken.
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
        return _by_runs(query, key, value, lengths_of(sequences), scores)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention as it is written down, under any mask.

    Args:
        query: (..., H, L, D); key: (..., K, M, D); value: (..., K, M, E), with the same leading dimensions.
        mask: broadcast to (..., H, L, M): true, or 0, where a token is seen; false, or -inf, where not.
    Returns:
        (..., H, L, E)
    """
    *leading, heads, length, size = query.shape
    groups, width = heads // key.shape[-3], key.shape[-2]
    scale = _scale(query, scores)
    # The heads that share a key are laid under each other, so that the key is not repeated.
    folded, key, value = query.reshape(-1, groups * length, size), _batched(key), _batched(value)
    # The scale belongs to the product, which is summed in float32: scaling either side would round once more.
    made = torch.baddbmm(folded.new_zeros(1, 1, 1), folded, key.transpose(1, 2), beta=0, alpha=scale)
    made = made.view(*leading, heads, length, width)
    if scores.softcap:
        made = scores.softcap * torch.tanh(made / scores.softcap)
    if mask is not None:
        # The least number and not -inf: a padding token, who sees nobody, then gets a mean of all and not NaN.
        made = made.masked_fill_(~mask, torch.finfo(made.dtype).min) if mask.dtype == torch.bool else made.add_(mask)
    weights = F.dropout(_softmax(made, scores.sinks), scores.dropout, scores.dropout > 0)
    return torch.bmm(weights.reshape(-1, groups * length, width), value).view(*leading, heads, length, -1)


def _batched(x: Tensor) -> Tensor:
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
"""Tokens up to which a sequence in 16 bits goes through the products on a CPU; with more keys than tokens, as many
scores."""


def _by_runs(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scores: Scores) -> Tensor:
    # split() and not slices: its backward pass is one concatenation, theirs a sum of tensors that are mostly zero.
    runs = list(_runs(lengths, _SHORT if _is_half(query) and scores.is_plain else 0))
    counts = [sum(length for length, _ in run) for run in runs]
    widths = [sum(map(sum, run)) for run in runs]
    parts = zip(
        torch.split(query, counts), torch.split(key, widths), torch.split(value, widths), strict=True
    )  # fmt: skip
    mixed = [_run(q, k, v, run, scores) for run, (q, k, v) in zip(runs, parts, strict=True)]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _is_half(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.element_size() == 2


def _runs(lengths: Lengths, longest: int) -> Iterator[Lengths]:
    """Neighbours of up to ``longest`` tokens together, each of the others alone."""
    for is_short, found in groupby(lengths, partial(_is_short, longest=longest)):
        neighbours = tuple(found)
        yield from [neighbours] if is_short else zip(neighbours)


def _is_short(lengths: tuple[int, int], longest: int) -> bool:
    length, before = lengths
    return length * (length + before) <= longest**2


def _run(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scores: Scores) -> Tensor:
    """(T, H, D), (U, K, D), (U, K, E) of one of the runs -> (T, H, E)"""
    if not _is_half(query) or not scores.is_plain or not _is_short(lengths[0], _SHORT):
        return _one(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), scores).transpose(0, 1)
    window = scores.window if scores.window and scores.window < max(map(sum, lengths)) else None
    band = partial(_band, window=window, dtype=query.dtype, device=query.device)
    return short_attention(query, key, value, lengths, _scale(query, scores), scores.dropout, band)


def _scale(query: Tensor, scores: Scores) -> float:
    return query.shape[-1] ** -0.5 if scores.scale is None else scores.scale


def _one(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """(H, L, D), (K, M, D), (K, M, E) -> (H, L, E)"""
    length, width = query.shape[1], key.shape[1]
    before = width - length
    window = scores.window if scores.window and scores.window < width else None
    if not scores.is_plain:
        return masked_attention(
            query, key, value, _band(length, before, before, window, query.dtype, query.device), scores
        )
    if _is_half(query) and window is None and not scores.dropout:
        return blockwise_attention(query, key, value, _scale(query, scores))
    needs_band = window is not None or before > 0
    mixed = F.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=_band(length, before, before, window, query.dtype, query.device) if needs_band else None,
        is_causal=not needs_band,
        scale=scores.scale,
        dropout_p=scores.dropout,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return mixed.squeeze(0)


def _band(
    length: int, before: int, filled: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(L, filled + L) what is added to the scores: 0 for the token itself and those before it in the window, else -inf.

    Args:
        before: keys before the first token, and ``filled`` the places that they take, the last of them empty.
    """
    size = before + length
    if before and size > _MOST_KEPT:  # a few rows of it, and a square of all keys would be gigabytes
        whole = _additive(length, before, window, dtype, device)
    else:
        whole = _square(-(-size // 256) * 256, window, dtype, device)[before:size, :size]
    if filled == before:
        return whole
    return torch.cat(
        [whole[:, :before], whole.new_full((length, filled - before), float("-inf")), whole[:, before:]], 1
    )


_MOST_KEPT = 4096
"""Keys up to which the masks of tokens that go on from shared ones are cut from a square that is kept."""


@lru_cache(maxsize=4)
def _square(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _additive(size, 0, window, dtype, device)


def _additive(length: int, before: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(L, before + L) 0 where a token is seen, else -inf."""
    seen = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
    if window:
        seen = seen.triu(before + 1 - window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


_LENGTHS: MutableMapping[Tensor, Lengths] = WeakTensorKeyDictionary()


def lengths_of(sequences: Sequences) -> Lengths:
    """Of each sequence: its tokens, and the keys before them. Read once per batch: on a GPU that is a wait for the
    device, which its kernels spare."""
    if sequences.begins not in _LENGTHS:
        counts, widths = (begins.diff().tolist() for begins in (sequences.begins, sequences.begins_of_keys))
        _LENGTHS[sequences.begins] = tuple((count, w - count) for count, w in zip(counts, widths, strict=True))
    return _LENGTHS[sequences.begins]


# --- one kernel for all sequences -------------------------------------------------------------------------------------

_WITH_KERNELS = {"cuda"}
"""Kinds of devices whose kernels are asked for."""

Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, Scores], Tensor]


def kernel_for(dtype: torch.dtype, scores: Scores) -> Kernel | None:
    """The GPU kernel that can do it; None where there is none, and each sequence gets a call of its own."""
    if dtype not in (torch.bfloat16, torch.float16) or scores.sinks is not None:
        return None
    if _has("flash_attn"):
        return _flash_attn
    if scores.is_plain and not scores.dropout and _has("torch.nn.attention.varlen"):
        return _torch_varlen
    return _flash_attn if _has("kernels") and _flash_of_hub() is not None else None


_FOUND = {name: find_spec(name) is not None for name in ("flash_attn", "kernels", "torch.nn.attention.varlen")}
"""Looked for here, because torch.compile breaks a layer in two where it comes upon find_spec (torch 2.11)."""


def _has(module: str) -> bool:
    return _FOUND[module]


def _window(scores: Scores) -> tuple[int, int]:
    """Tokens seen to the left and to the right; -1 is all."""
    return (scores.window - 1 if scores.window else -1, 0)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores) -> Tensor:
    mixed: Tensor = _flash_function()(
        q, k, v, sequences.begins, sequences.begins_of_keys, sequences.longest, sequences.most_keys,
        dropout_p=scores.dropout, softmax_scale=scores.scale, causal=True, window_size=_window(scores),
        softcap=scores.softcap or 0.0,
    )  # fmt: skip
    return mixed


@cache
def _flash_function() -> Callable[..., Any]:
    """flash-attn's function for sequences that lie end to end: of the library, or of the hub."""
    if not _has("flash_attn"):
        function = _flash_of_hub()
        assert function is not None
        return function
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func  # type: ignore[no-any-return]


_HUB_KERNEL, _HUB_VERSION = "kernels-community/flash-attn2", 4
"""Where the library kernels finds flash-attn 2, and its version for torch from 2.10 on, as in transformers 5.23."""


@cache
def _flash_of_hub() -> Callable[..., Any] | None:
    """The same function, compiled and published by Hugging Face; None where it cannot be fetched, which is said."""
    from kernels import get_kernel  # type: ignore[import-not-found]

    try:
        function: Callable[..., Any] = get_kernel(_HUB_KERNEL, version=_HUB_VERSION).flash_attn_varlen_func
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        warnings.warn(
            f"{_HUB_KERNEL} cannot be used ({str(error).splitlines()[0]}): each sequence attends in a call of its own.",
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
        q, k, v, sequences.begins, sequences.begins_of_keys, sequences.longest, sequences.most_keys,
        scale=scores.scale, window_size=_window(scores), **extra,
    )  # fmt: skip
    return mixed


def _varlen_attn() -> tuple[Callable[..., Any], bool]:
    """torch's kernel, and whether it lets query heads share a key head (torch 2.12 and later)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in (varlen_attn.__kwdefaults__ or {})
