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

from burnish.infer.types import Grammar, Logprob, Sampling


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
    scores = changed(logits, sampling, prompt, answer, grammar, barred)
    if sampling.temperature == 0:
        return int(scores.argmax())
    return _drawn(probabilities(scores, sampling), uniform(seed, request, len(answer)))


def changed(
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
        scores[tokens] = torch.where(found < 0, found * penalty, found / penalty)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        uses = Counter(answer)
        counts = torch.tensor(list(uses.values()), dtype=torch.float32)
        scores[torch.tensor(list(uses))] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if grammar is not None:
        grammar.mask(scores)
    for token in barred:
        scores[token] = -torch.inf
    return scores


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """(V,) of a draw at a temperature above 0: those that top_k, min_p and top_p leave out are 0, the rest sum to 1."""
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    chances = scores.softmax(-1)
    if sampling.min_p > 0:
        chances = chances.masked_fill(chances < sampling.min_p * chances.max(), 0)
        chances /= chances.sum()
    if sampling.top_p < 1:
        chances = _nucleus(chances, sampling.top_p)
    return chances


def _nucleus(chances: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens whose probabilities first reach ``top_p`` (Holtzman et al. 2020, section 3.1,
    https://arxiv.org/abs/1904.09751)."""
    ordered, tokens = chances.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = ordered.masked_fill(before >= top_p, 0)
    return torch.zeros_like(chances).scatter_(0, tokens, kept / kept.sum())


def _drawn(chances: Tensor, number: float) -> int:
    """The token in whose stretch of the cumulative sum ``number``, from [0, 1), falls."""
    likely = chances.nonzero().flatten()
    sums = chances[likely].double().cumsum(0)
    place = torch.searchsorted(sums, torch.tensor([number * float(sums[-1])], dtype=torch.float64), right=True)
    return int(likely[min(int(place), len(likely) - 1)])


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
