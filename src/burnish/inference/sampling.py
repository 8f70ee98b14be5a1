"""Logits -> a token, and log-probabilities.

In:  one row of logits as the model made them, how to sample, what stands before. Out: a token id. A draw is a function
of (seed, request, position) and the logits: nothing of it comes from a generator that others draw from, so an answer
does not depend on its neighbours, and goes on after a restart where it was.

The order: bias, repetition penalty, presence and frequency penalties, grammar, temperature, top_k, min_p, top_p, draw.
"""

# V vocabulary

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from burnish.inference.types import Grammar, Logprob, Sampling

_FIRST_SORTED = 256
"""So many of the likeliest tokens are tried as the nucleus first."""
_COLDEST, _LARGEST = 1e-5, 1e30
"""The lowest temperature above 0 and the largest penalised score: beyond them float32 has no numbers left."""
_ROUNDING = 1e-3
"""Sums of float32 probabilities, in whatever order, are as near as that."""


def draw(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], seed: int, request: int,
    grammar: Grammar | None = None, barred: Iterable[int] = (),
) -> int:  # fmt: skip
    """The next token of an answer.

    Args:
        logits: (V,) of any float type, not changed.
        prompt, answer: what stands before.
        barred: tokens that may not come (stop tokens of an answer that is too short yet).
    """
    scores = adjusted_logits(logits, sampling, prompt, answer, grammar, barred)
    if sampling.temperature == 0:
        return int(scores.argmax())
    return _drawn(*probabilities(scores, sampling), uniform(seed, request, len(answer)))


def adjusted_logits(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], grammar: Grammar | None = None,
    barred: Iterable[int] = (),
) -> Tensor:  # fmt: skip
    """(V,) float32 on the CPU: the logits under bias, penalties and grammar."""
    scores = logits.detach().to("cpu", torch.float32, copy=True)
    if sampling.bias:
        tokens = torch.tensor(list(sampling.bias))
        scores[tokens] += torch.tensor(list(sampling.bias.values()))
    if sampling.repetition_penalty != 1:
        tokens = torch.tensor(sorted({*prompt, *answer}))
        found = scores[tokens]
        penalty = sampling.repetition_penalty
        scores[tokens] = torch.where(found < 0, found * penalty, found / penalty).clamp(-_LARGEST, _LARGEST)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        uses = Counter(answer)
        counts = torch.tensor(list(uses.values()), dtype=torch.float32)
        scores[torch.tensor(list(uses))] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if grammar is not None:
        grammar.mask(scores)
    for token in barred:
        scores[token] = -torch.inf
    return scores


def probabilities(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(N,) tokens that a draw at a temperature above 0 may take, in their order, and (N,) their probabilities.

    The vocabulary is gone through as seldom as can be: a sort of 150,000 scores takes 20 ms, for every row and token.
    """
    tokens = None
    if 0 < sampling.top_k < len(scores):
        tokens = _at_least(scores, scores.topk(sampling.top_k).values[-1])
        scores = scores[tokens]
    chances = (scores / max(sampling.temperature, _COLDEST)).softmax(-1)
    if sampling.min_p > 0:
        chances = chances.masked_fill(chances < sampling.min_p * chances.max(), 0)
        chances /= chances.sum()
    kept = _nucleus(chances, sampling.top_p) if sampling.top_p < 1 else chances.nonzero().flatten()
    chances = chances[kept]
    return kept if tokens is None else tokens[kept], chances / chances.sum()


def _at_least(numbers: Tensor, least: Tensor) -> Tensor:
    """Places of the numbers that are not below ``least``, in their order."""
    return (numbers >= least).nonzero().flatten()


def _nucleus(chances: Tensor, top_p: float) -> Tensor:
    """Places of the likeliest tokens whose probabilities first reach ``top_p``, in their order (Holtzman et al. 2020,
    section 3.1, https://arxiv.org/abs/1904.09751)."""
    likely, number = torch.arange(len(chances)), _FIRST_SORTED
    while number < len(chances):  # mostly a few tokens reach it, and only those are sorted
        largest = chances.topk(number).values
        if float(largest.sum()) > top_p + _ROUNDING:
            likely = _at_least(chances, largest[-1])
            break
        number *= 16
    ordered, places = chances[likely].sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept: Tensor = likely[places[: max(1, int((before < top_p).sum()))]].sort().values
    return kept


def _drawn(tokens: Tensor, chances: Tensor, number: float) -> int:
    """The token in whose stretch of the cumulative sum ``number``, from [0, 1), falls."""
    sums = chances.double().cumsum(0)
    place = torch.searchsorted(sums, torch.tensor([number * float(sums[-1])], dtype=torch.float64), right=True)
    return int(tokens[min(int(place), len(tokens) - 1)])


def uniform(seed: int, request: int, position: int) -> float:
    """A number in [0, 1) that only these three decide."""
    key = struct.pack("<qqq", _signed(seed), _signed(request), position)
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) / (1 << 53)


def _signed(number: int) -> int:
    """``number`` in 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def log_probabilities(
    logits: Tensor, tokens: Sequence[int], top: int = 0, also: Sequence[int] = ()
) -> list[Logprob]:  # fmt: skip
    """Log-probabilities of one token per row, and of others, under the model's own logits.

    Args:
        logits: (N, V)
        tokens: N ids.
        top: of how many of the likeliest besides.
        also: of which tokens besides.
    """
    logps = logits.detach().float().log_softmax(-1)
    own = logps.gather(1, torch.tensor(tokens, device=logps.device)[:, None])[:, 0].tolist()
    if not (top or also):
        return [Logprob(token, logp) for token, logp in zip(tokens, own, strict=True)]
    values, likeliest = (found.tolist() for found in logps.topk(min(top, logps.shape[1])))
    asked = logps[:, list(also)].tolist()
    return [
        Logprob(token, logp, (*zip(ids, logps_of, strict=True), *zip(also, others, strict=True)))
        for token, logp, ids, logps_of, others in zip(tokens, own, likeliest, values, asked, strict=True)
    ]
