"""Attention within one long sequence on a CPU in 16 bits, one block of queries at a time.

In:  queries, keys and values of one sequence. If it is causal, there may be keys before that of the first query; all
queries attend to these. In a vision tower all queries attend to all keys. Out: the weighted values. Only the scores of
one block are in memory at a time, and none are stored: the backward pass recomputes a block's weights from queries and
keys.

    P = softmax(scale * Q Kᵀ),  O = P V
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P * (dP - rowsum(dP * P)),  dQ = scale * dS K,  dK = scale * dSᵀ Q

(Dao et al. 2022, appendix B, https://arxiv.org/abs/2205.14135). In causal attention a block of queries is multiplied
with the keys up to its own end, so little more than half is computed, with matrix products of oneDNN. torch's fused
kernel for CPUs multiplies small tiles, at a fraction of that rate.

Measured on one AVX512-BF16 core (AMD EPYC), all queries on all keys, forward, ms of the fused kernel and of blocks: 576
tokens with 12 heads of 64 14 and 9, 1,024 with 16 of 72 60 and 43, 2,852 with 16 of 80 523 and 325. If keys and values
are not contiguous, the products of each block copy them: 403 instead of 333 in the last case. With causal attention
there is no difference.
"""

# L tokens, M keys (M - L of them before the first token), H query heads, K key heads, G = H / K,
# D size of a query and a key, E size of a value

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS, _FEWEST, _MOST = 512, 96, 256
"""Rows of a block's products (heads that share a key are stacked), and minimum and maximum number of queries of a
block. Few, so that the scores stay in the processor's cache and little is computed beyond the diagonal, but enough for
efficient products. Blocks are multiples of a vector, because torch's softmax computes the remainder of a row element by
element."""

VECTOR = 32
"""Number of 16-bit elements in the widest vector of a processor."""


def blockwise_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool = True) -> Tensor:
    """Attention without a mask.

    Args:
        query: (H, L, D).
        key: (K, M, D).
        value: (K, M, E); all of one dtype.
        scale: factor of the product of query and key.
        is_causal: whether each token attends to itself and those before it only; otherwise to all keys.

    Returns:
        (H, L, E)
    """
    mixed: Tensor = _Blockwise.apply(query, key, value, scale, is_causal)  # type: ignore[no-untyped-call]
    return mixed


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
        groups, length, width = len(query) // len(key), query.shape[1], value.shape[2]
        if not is_causal:  # the products of each block would copy all keys and values
            key, value = key.contiguous(), value.contiguous()
        mixed = query.new_empty(len(query), length, width)
        for rows, seen in _blocks(length, key.shape[1], groups, is_causal):
            weights = _weights(_fold_heads(query[:, rows], groups), key[:, seen], scale, rows, is_causal)
            mixed[:, rows] = torch.bmm(weights, value[:, seen]).view(len(query), -1, width)
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.is_causal = scale, is_causal
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        groups, length = len(query) // len(key), query.shape[1]
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        # Sums over blocks are computed in float32.
        grad_key, grad_value = (torch.zeros(x.shape, dtype=torch.float32) for x in (key, value))
        for rows, seen in _blocks(length, key.shape[1], groups, ctx.is_causal):
            q, upstream = (_fold_heads(x[:, rows], groups) for x in (query, grad))
            weights = _weights(q, key[:, seen], ctx.scale, rows, ctx.is_causal)
            grad_value[:, seen] += torch.bmm(weights.transpose(1, 2), upstream)
            grad_scores = torch.bmm(upstream, value[:, seen].transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_scores, weights, -1, grad_scores.dtype
            )  # dS, summed in float32
            grad_query[:, rows] = scaled_product(grad_scores, key[:, seen], ctx.scale).view(
                len(query), -1, query.shape[2]
            )
            grad_key[:, seen] += scaled_product(grad_scores.transpose(1, 2), q, ctx.scale)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _blocks(length: int, width: int, groups: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and its keys: if causal, those up to the last query."""
    height = min(_MOST, max(_FEWEST, _ROWS // groups // VECTOR * VECTOR))
    ends = ((begin, min(begin + height, length)) for begin in range(0, length, height))
    return ((slice(begin, end), slice(width - length + end if is_causal else width)) for begin, end in ends)


def _fold_heads(x: Tensor, groups: int) -> Tensor:
    """(H, n, D) -> (K, G n, D): stack the heads that share a key."""
    heads, height, size = x.shape
    return x.reshape(heads // groups, groups * height, size)


def _weights(q: Tensor, key: Tensor, scale: float, rows: slice, is_causal: bool) -> Tensor:
    """(K, G n, m) the attention weights of a block's queries (K, G n, D) on its keys (K, m, D)."""
    height, width = rows.stop - rows.start, key.shape[1]
    scores = scaled_product(q, key.transpose(1, 2), scale)
    if is_causal:
        ahead = torch.ones(height, height, dtype=torch.bool).triu(1)
        scores.view(len(key), -1, height, width)[..., width - height :].masked_fill_(ahead, float("-inf"))
    return torch.softmax(scores, -1)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a b`` for batches of matrices, rounded once."""
    return torch.baddbmm(a.new_zeros(1, 1, 1), a, b, beta=0, alpha=scale)
