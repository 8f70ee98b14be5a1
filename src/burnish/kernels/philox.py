"""Counter-based random numbers, Philox4x32-10, and draws from a softmax with them.

A number is a function of a key and a counter only. There is no generator state. Numbers can be computed in any order
and by any process, and a resumed run gets the same numbers without a saved state.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3,
https://doi.org/10.1145/2063384.2063405. Tests compare with the known answers of Random123.
"""

# B rows, V vocabulary, N numbers per row

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
_LEAST, _NEAREST_TO_1 = np.float32(-(2.0**-32)), np.float32(-1 + 2.0**-24)
BLOCK = 128
"""Number of tokens of a block. The vocabularies of most models are multiples of it."""


def philox(
    key: tuple[np.ndarray, np.ndarray], counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four words of 32 bits for each key and counter.

    Args:
        key, counter: words, as arrays of uint64 with broadcastable shapes.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel(words: Any, number: int) -> np.ndarray:
    """Noise of the standard Gumbel distribution, -ln E with E ~ Exp(1), for each row.

    Number n of a row has word n mod 4 of the counter (its row's three words, n div 4).

    Args:
        words: (B, 5) two words of the key and three of the counter, per row.
        number: N.
    Returns:
        (B, N) float32.
    """
    k0, k1, c0, c1, c2 = np.asarray(words, dtype=np.uint64).T[..., None]
    drawn = philox((k0, k1), (c0, c1, c2, np.arange(-(-number // 4), dtype=np.uint64)[None]))
    uniform = np.stack(drawn, -1).reshape(len(k0), -1)[:, :number].astype(np.float32)
    # E = -ln(1 - u) keeps the digits of small values of E, which decide a draw.
    noise: np.ndarray = -np.log(-np.log1p(np.maximum((uniform + 0.5) * _LEAST, _NEAREST_TO_1)))
    return noise


def gumbel_argmax(scores: Tensor, words: Any, vocabulary: int, tokens: Tensor | None = None) -> Tensor:
    """Draw a token of each row from the softmax of its scores.

    The Gumbel-max trick (Maddison et al. 2014, section 2, https://arxiv.org/abs/1411.0030) is applied twice: to the
    log-sums of exponentials of blocks of tokens, then to the tokens of the selected block. The noise of a row is
    V / BLOCK + BLOCK numbers instead of V.

    Args:
        scores: (B, V) float32, or (B, M) of some tokens; -inf for a token that must not be drawn.
        words: (B, 5) as in ``gumbel``.
        vocabulary: V.
        tokens: (B, M) the tokens that the scores are of, different ones in each row; None for all V.
    Returns:
        (B,) token ids.
    """
    blocks = -(-vocabulary // BLOCK)
    noise = torch.from_numpy(gumbel(words, BLOCK + blocks)).to(scores.device)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    if tokens is None:
        scores = pad(scores, (0, rest), value=-torch.inf) if (rest := -vocabulary % BLOCK) else scores
        sums = (scores - largest).exp_().view(-1, blocks, BLOCK).sum(-1)
    else:
        sums = scores.new_zeros(len(scores), blocks).scatter_add_(1, tokens // BLOCK, (scores - largest).exp_())
    drawn = (sums.log_() + noise[:, BLOCK:]).argmax(-1, keepdim=True)
    if tokens is None:
        tokens = drawn * BLOCK + torch.arange(BLOCK, device=scores.device)
        scores = scores.gather(1, tokens)
    scores = scores.masked_fill(tokens // BLOCK != drawn, -torch.inf) - largest + noise.gather(1, tokens % BLOCK)
    return tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def permutation(number: int, key: tuple[int, int], generation: int) -> list[int]:
    """A permutation of ``number`` items that only depends on the key and the generation."""
    k0, k1, c0 = (np.array([word & MASK], dtype=np.uint64) for word in (*key, generation))
    blocks, zero = np.arange(-(-number // 4), dtype=np.uint64), np.zeros(1, np.uint64)
    words = np.stack(philox((k0, k1), (c0, zero, zero, blocks)), -1).ravel()[:number]
    order: list[int] = np.argsort(words, kind="stable").tolist()
    return order
