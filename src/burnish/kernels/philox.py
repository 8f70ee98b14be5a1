"""Counter-based random numbers: Philox4x32-10. A number is a function of a key and a counter only.

There is no generator state. Numbers can be computed in any order, on any device and by any process, and a resumed run
gets the same numbers without a saved state.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3,
https://doi.org/10.1145/2063384.2063405. Tests compare with the known answers of Random123.
"""

# B rows, V vocabulary, M candidates of a row

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
_AT_ONCE = 1 << 14
"""Number of counters that are computed together on a CPU, so that intermediate words stay in its cache."""
_NEAREST_TO_1 = -1 + 2.0**-24
_RARE, _SLACK = 4.0, 1e-4
"""Noise that 2% of all tokens exceed, and more than the relative rounding error of a sum of a score and noise."""


def philox(key: tuple[Any, Any], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits for each key and counter.

    Args:
        key, counter: words, as NumPy arrays of uint64 or tensors of int64, with broadcastable shapes.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    m0, m1 = _MULTIPLIERS
    is_signed = isinstance(c3, Tensor)  # a right shift of a product above 2^63 extends the sign
    for _ in range(10):
        p0, p1 = c0 * m0, c2 * m1
        c1, c3, low = p1 & MASK, p0 & MASK, (c1, c3)
        p0, p1 = (p0 >> 32, p1 >> 32) if not is_signed else ((p0 >> 32) & MASK, (p1 >> 32) & MASK)
        c0, c2 = p1 ^ low[0] ^ k0, p0 ^ low[1] ^ k1
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel(words: Any, vocabulary: int, device: torch.device, tokens: Tensor | None = None) -> Tensor:
    """Noise of the standard Gumbel distribution, -ln E with E ~ Exp(1), for the tokens of each row.

    The token v of a row has word v mod 4 of the counter (its row's three words, v div 4).

    Args:
        words: (B, 5) two words of the key and three of the counter, per row.
        vocabulary: V.
        device: device of the result.
        tokens: (B, M) the tokens to compute the noise for; None: all.
    Returns:
        (B, V) or (B, M) float32.
    """
    numbers = np.asarray(words, dtype=np.uint64)
    if device.type == "cpu":
        ids = None if tokens is None else tokens.numpy()
        return torch.from_numpy(_as_gumbel(_words_of(numbers, vocabulary, ids)))
    columns = torch.from_numpy(numbers.astype(np.int64)).to(device).T[..., None]
    blocks = torch.arange(-(-vocabulary // 4), device=device)[None] if tokens is None else tokens // 4
    found = torch.stack(philox((columns[0], columns[1]), (columns[2], columns[3], columns[4], blocks)), -1)
    of_tokens = (
        found.flatten(1)[:, :vocabulary] if tokens is None else found.gather(-1, (tokens % 4)[..., None])[..., 0]
    )
    return -(-torch.log1p(((of_tokens.float() + 0.5) * -(2.0**-32)).clamp(min=_NEAREST_TO_1))).log()


def gumbel_argmax(scores: Tensor, words: Any) -> Tensor:
    """Return (B,) ``(scores + gumbel(words, V)).argmax(-1)``, without the noise of tokens that cannot be the largest.

    Noise falls as the random word rises, so most tokens are ruled out by comparing words, before any logarithm.

    Args:
        scores: (B, V) float32; -inf for a token that must not be drawn.
        words: (B, 5) as in ``gumbel``.
    """
    if scores.device.type != "cpu":
        return (scores + gumbel(words, scores.shape[1], scores.device)).argmax(-1)
    values, each = scores.numpy(), np.arange(len(scores))
    drawn = _words_of(np.asarray(words, dtype=np.uint64), scores.shape[1], None)
    likeliest = values.argmax(-1)
    known = np.stack([likeliest, drawn.argmin(-1)], -1)  # two tokens per row, one of which is nearly the largest
    bound = (values[each[:, None], known] + _as_gumbel(drawn[each[:, None], known])).max(-1)
    bound -= _SLACK * np.maximum(1, np.abs(bound))
    words_of_all = _word_of_gumbel(bound - values[each, likeliest])[:, None]
    is_possible = (values >= (bound - _RARE)[:, None]) | (drawn <= _word_of_gumbel(np.float32(_RARE)))
    places = np.flatnonzero((drawn <= words_of_all) & is_possible)
    rows = places // values.shape[1]
    sums = values.reshape(-1)[places] + _as_gumbel(drawn.reshape(-1)[places])
    largest = np.maximum.reduceat(sums, np.searchsorted(rows, each))
    places = places[sums == largest[rows]]
    return torch.from_numpy(places[np.searchsorted(places, each * values.shape[1])] % values.shape[1])


def _word_of_gumbel(noise: Any) -> Any:
    """The largest random word, as float32, whose noise is at least ``noise``, up to rounding."""
    return (-np.expm1(-np.exp(-np.maximum(noise, -50, dtype=np.float64))) * 2.0**32).astype(np.float32)


def _words_of(rows: np.ndarray, vocabulary: int, tokens: np.ndarray | None) -> np.ndarray:
    """(B, V) or (B, M) float32: the random word of each token, rounded."""
    if tokens is not None:
        columns = [rows[:, at, None] for at in range(5)]
        found = philox((columns[0], columns[1]), (columns[2], columns[3], columns[4], (tokens // 4).astype(np.uint64)))
        return np.choose(tokens % 4, found).astype(np.float32)
    width = -(-vocabulary // 4)
    blocks, out = np.arange(width, dtype=np.uint64)[None], np.empty((len(rows), width, 4), np.float32)
    rows_at_once, blocks_at_once = max(1, _AT_ONCE // width), min(width, _AT_ONCE)
    for row in range(0, len(rows), rows_at_once):
        k0, k1, c0, c1, c2 = (rows[row : row + rows_at_once, at, None] for at in range(5))
        for begin in range(0, width, blocks_at_once):
            part = slice(begin, begin + blocks_at_once)
            for at, word in enumerate(philox((k0, k1), (c0, c1, c2, blocks[:, part]))):
                out[row : row + rows_at_once, part, at] = word
    return out.reshape(len(rows), -1)[:, :vocabulary]


def _as_gumbel(words: np.ndarray) -> np.ndarray:
    """Convert words to noise in place. E = -ln(1 - w) keeps the digits of small values of E, which decide a draw."""
    words += 0.5
    words *= -(2.0**-32)
    np.maximum(words, _NEAREST_TO_1, out=words)
    np.log1p(words, out=words)
    np.negative(words, out=words)
    np.log(words, out=words)
    np.negative(words, out=words)
    return words


def permutation(number: int, key: tuple[int, int], generation: int) -> list[int]:
    """A permutation of ``number`` items that only depends on the key and the generation."""
    k0, k1, c0 = (np.array([word & MASK], dtype=np.uint64) for word in (*key, generation))
    blocks, zero = np.arange(-(-number // 4), dtype=np.uint64), np.zeros(1, np.uint64)
    words = np.stack(philox((k0, k1), (c0, zero, zero, blocks)), -1).ravel()[:number]
    order: list[int] = np.argsort(words, kind="stable").tolist()
    return order
