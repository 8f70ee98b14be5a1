"""Causal attention within many short sequences on a CPU in 16 bits. Sequences of similar length share matrix products.

In:  queries, keys and values of concatenated sequences, and the sequences' lengths; a sequence may have keys before
that of its first query, those of a shared prefix. Out: the weighted values.

For sequences of some dozens of tokens, one call per sequence takes more time than the arithmetic. Here the sequences
are sorted into buckets, in which each is padded with zeros to the longest. A bucket is one batch of matrix products.
Padding follows the tokens, where the causal mask hides it, and the keys before them. The attention weights are kept for
the backward pass, whose formulas are those of ``kernels.cpu.blockwise``; dropout is applied between P and O.

Measured on one AVX512-BF16 core (6 heads of size 64 with 2 key heads, forward and backward, bfloat16), ms of one call
per sequence and of buckets: 8 sequences of 12 to 32 tokens 4.0, 1.1; 64 of them 32, 5.8; 32 of 16 to 128 tokens 26, 15;
8 of 60 to 360 tokens 20, 19. In float32 torch's fused attention, one sequence after another, takes as long as the
buckets.
"""

# T tokens of all sequences, U keys of all sequences, S sequences of a bucket, L tokens of the longest of them,
# B keys before them, M = B + L keys (both parts padded), P places: S L, or S M, of all buckets,
# H query heads, K key heads, G = H / K, D size of a query and a key, E size of a value

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.kernels.cpu.blockwise import VECTOR, scaled_product

_WASTE = 2**16
"""Number of scores, over all heads, that padding may add to a bucket. They cost about as much as another bucket's
calls."""

Lengths = tuple[tuple[int, int], ...]
"""Number of tokens of each sequence, and of keys before the first of them."""

CreateMask = Callable[[int, int, int], Tensor]
"""(L, B, M - L) -> (L, M) additive mask, 0 or -inf, for the scores of L tokens with B keys before them."""


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float, dropout: float, create_mask: CreateMask
) -> Tensor:
    """Attention of each token to those of its own sequence that the mask allows.

    Args:
        query: (T, H, D).
        key: (U, K, D).
        value: (U, K, E); all of one dtype.
        lengths: lengths of the sequences.
        scale: factor of the product of query and key.
        dropout: probability with which an attention weight is zeroed.
        create_mask: creates the mask.
    Returns:
        (T, H, E)
    """
    bucketed = buckets_of(lengths, query.shape[1])
    mixed: Tensor = _Short.apply(query, key, value, bucketed, scale, dropout, create_mask)  # type: ignore[no-untyped-call]
    return mixed


# --- buckets of sequences ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketPlaces:
    """The position of each token, or each key, after sorting the sequences into buckets.

    Args:
        buckets: (S, L) or (S, M) of each bucket, in order.
        places: (T,) position of each token, below P; None if the order does not change.
        tokens: (P,) token at each position; T for padding.
    """

    buckets: tuple[tuple[int, int], ...]
    places: Tensor | None = None
    tokens: Tensor | None = None

    def spread(self, x: Tensor) -> Iterator[Tensor]:
        """(T, H, D) -> (S, L, H, D) of each bucket, with zeros after the shorter sequences."""
        if self.tokens is not None:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.tokens)
        return self.cut(x)

    def cut(self, x: Tensor) -> Iterator[Tensor]:
        """(P, H, D) -> (S, L, H, D) of each bucket, as views."""
        parts = torch.split(x, [count * length for count, length in self.buckets])
        return (part.view(*bucket, *x.shape[1:]) for part, bucket in zip(parts, self.buckets, strict=True))

    def gather(self, x: Tensor) -> Tensor:
        """(P, H, D) -> (T, H, D)"""
        return x if self.places is None else x.index_select(0, self.places)

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(self._size, *shape)

    @property
    def _size(self) -> int:
        return sum(count * length for count, length in self.buckets)


@dataclass(frozen=True)
class Buckets:
    """Sequences sorted into buckets.

    Args:
        tokens, keys: their positions, in the same buckets.
        before: B of each bucket.
    """

    tokens: BucketPlaces
    keys: BucketPlaces
    before: tuple[int, ...]


@lru_cache(maxsize=16)
def buckets_of(lengths: Lengths, heads: int) -> Buckets:
    """Sort sequences into buckets; cached, since all layers of a batch need the same buckets."""
    shared = _bucket_by_length(lengths, heads)
    before = tuple(lengths[bucket[0]][1] for bucket in shared)
    longest = [_round_up(lengths[bucket[0]][0]) for bucket in shared]
    tokens = _layout([length for length, _ in lengths], shared, [(0, 0)] * len(shared), longest)
    if not any(before):
        return Buckets(tokens, tokens, before)
    prefix_lengths = [(count, _round_up(count)) for count in before]
    return Buckets(tokens, _layout([length for length, _ in lengths], shared, prefix_lengths, longest), before)


def _bucket_by_length(lengths: Lengths, heads: int) -> list[list[int]]:
    """Divide sequences into buckets by the number of keys before them and by length, longest first."""
    buckets: list[list[int]] = []
    wasted = 0
    for sequence in sorted(range(len(lengths)), key=lambda i: lengths[i][::-1], reverse=True):
        length, before = lengths[sequence]
        longest, same = lengths[buckets[-1][0]] if buckets else (0, -1)
        wasted += heads * (longest * (longest + same) - length * (length + before))
        if before == same and wasted <= _WASTE:
            buckets[-1].append(sequence)
        else:
            buckets.append([sequence])
            wasted = 0
    return buckets


def _layout(
    lengths: Sequence[int], buckets: list[list[int]], prefix_lengths: list[tuple[int, int]], longest: list[int]
) -> BucketPlaces:
    """Assign a position to each token, or each key.

    Args:
        lengths: number of tokens of each sequence.
        buckets: sequences of each bucket.
        prefix_lengths: per bucket, number of keys before the tokens of a sequence, and the same including padding.
        longest: per bucket, number of positions for the tokens after them.
    """
    sizes = tuple(
        (len(some), prefix_length[1] + most)
        for some, prefix_length, most in zip(buckets, prefix_lengths, longest, strict=True)
    )
    num_places = sum(count * length for count, length in sizes)
    prefix_length_of = {
        sequence: prefix_length
        for some, prefix_length in zip(buckets, prefix_lengths, strict=True)
        for sequence in some
    }
    num_rows = sum(prefix_length_of[sequence][0] + length for sequence, length in enumerate(lengths))
    if len(sizes) == 1 and num_places == num_rows:
        return BucketPlaces(sizes)
    begins, begin = [0] * len(lengths), 0
    for some, (_, size) in zip(buckets, sizes, strict=True):
        for sequence in some:
            begins[sequence] = begin
            begin += size
    places = torch.cat(
        [
            torch.arange(begin, begin + count)
            for sequence, length in enumerate(lengths)
            for begin, count in _pieces(begins[sequence], length, *prefix_length_of[sequence])
        ]
    )
    tokens = torch.full((num_places,), num_rows)
    tokens[places] = torch.arange(num_rows)
    return BucketPlaces(sizes, places, tokens)


def _pieces(begin: int, length: int, before: int, filled: int) -> tuple[tuple[int, int], ...]:
    """(begin, count) of the keys before a sequence's tokens, and of those of its tokens."""
    return (begin, before), (begin + filled, length)


def _round_up(length: int) -> int:
    """Round up to whole vectors, because torch's softmax computes the remainder of a row element by element, and
    because oneDNN compiles a kernel for each length, which takes a millisecond per product.
    """
    return -(-length // VECTOR) * VECTOR


# --- the products -----------------------------------------------------------------------------------------------------


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        buckets: Buckets,
        scale: float,
        dropout: float,
        create_mask: CreateMask,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        tokens, keys = buckets.tokens, buckets.keys
        mixed = tokens.empty(query, query.shape[1], value.shape[2])
        saved: list[Tensor | None] = []
        parts = (tokens.spread(query), keys.spread(key), keys.spread(value), tokens.cut(mixed), buckets.before)
        for q, k, v, into, before in zip(*parts, strict=True):
            length, width = q.shape[1], k.shape[1]
            q, k, v = _stack_heads(q, groups), _stack_heads(k), _stack_heads(v)
            scores = scaled_product(q, k.transpose(1, 2), scale)
            scores.view(-1, length, width).add_(create_mask(length, before, width - length))
            weights = torch.softmax(scores, -1)
            used, is_used = torch.native_dropout(weights, dropout, True) if dropout else (weights, None)
            _fill(into, torch.bmm(used, v))
            saved += [q, k, v, weights, used, is_used]
        ctx.save_for_backward(*saved)
        ctx.buckets, ctx.scale, ctx.dropout = buckets, scale, dropout
        ctx.shapes = query.shape, key.shape, value.shape
        return tokens.gather(mixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layouts, shapes = (ctx.buckets.tokens, ctx.buckets.keys, ctx.buckets.keys), ctx.shapes
        groups = shapes[0][1] // shapes[1][1]
        grads = [layout.empty(grad, *shape[1:]) for layout, shape in zip(layouts, shapes, strict=True)]
        saved = zip(*[iter(ctx.saved_tensors)] * 6, strict=True)  # six tensors per bucket
        for (q, k, v, weights, used, is_used), upstream, of_query, of_key, of_value in zip(
            saved, layouts[0].spread(grad), *map(BucketPlaces.cut, layouts, grads), strict=True
        ):
            upstream = _stack_heads(upstream, groups)
            _fill(of_value, torch.bmm(used.transpose(1, 2), upstream))
            grad_scores = torch.bmm(upstream, v.transpose(1, 2))
            if is_used is not None:
                grad_scores = torch.ops.aten.native_dropout_backward(grad_scores, is_used, 1 / (1 - ctx.dropout))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, grad_scores.dtype)
            _fill(of_query, scaled_product(grad_scores, k, ctx.scale))
            _fill(of_key, scaled_product(grad_scores.transpose(1, 2), q, ctx.scale))
        return *map(BucketPlaces.gather, layouts, grads), None, None, None, None


def _stack_heads(x: Tensor, groups: int = 1) -> Tensor:
    """(S, L, H, D) -> (S K, G L, D): stack the heads that share a key."""
    return x.transpose(1, 2).reshape(-1, groups * x.shape[1], x.shape[3])


def _fill(into: Tensor, stacked: Tensor) -> None:
    """Inverse of ``_stack_heads``: write (S K, G L, D) into a view (S, L, H, D)."""
    heads_first = into.transpose(1, 2)
    heads_first.copy_(stacked.view(heads_first.shape))
