"""Sampling: logits -> tokens and log-probabilities, batched on the device of the logits.

A draw is a function of its noise key, the position and the logits (``kernels/philox.py``). There is no shared
generator, so a response does not depend on other requests and continues unchanged after a restart. Since blocks of
tokens and the tokens of a block have noise of their own, a rounding error in the logits changes a draw only if two of
them are nearly tied.

Order of operations: bias, repetition penalty, presence and frequency penalties, grammar, temperature, top_k, min_p,
top_p, draw.
"""

# N rows, V vocabulary size

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burnish.inference.types import Logprob, NoiseKey, Sampling
from burnish.kernels.philox import gumbel_argmax

_FIRST_SORTED = 256
"""Number of most likely tokens in which the end of the nucleus is searched first."""
_COLDEST, _LARGEST = 1e-5, 1e30
"""Minimum temperature above 0 and maximum penalized score: beyond them float32 overflows."""
_ROUNDING = 1e-3
"""Upper bound of the rounding error of a sum of float32 probabilities, in any order."""


@dataclass(frozen=True)
class DrawSettings:
    """Everything besides the logits that determines the next token of one row.

    Args:
        sampling: sampling settings.
        prompt, answer: ids so far.
        noise: determines the random numbers together with the position ``len(answer)``.
        mask: (V,) added to the logits by a grammar: 0, or -inf for a token that is not allowed.
        excluded_ids: tokens that must not be drawn (stop tokens before ``min_new_tokens``).
    """

    sampling: Sampling
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    noise: NoiseKey = field(default_factory=NoiseKey)
    mask: Tensor | None = None
    excluded_ids: Iterable[int] = ()

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before the temperature is applied."""
        sampling = self.sampling
        is_penalized = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        return bool(sampling.bias or is_penalized or self.mask is not None or self.excluded_ids)


def draw(logits: Tensor, rows: Sequence[DrawSettings]) -> Tensor:
    """Draw the next token of each row.

    Args:
        logits: (N, V) of any float type; not modified.
        rows: N settings.
    Returns:
        (N,) token ids, on the device of the logits. ``token_logps`` returns their log-probabilities.
    """
    scores = adjusted_logits(logits, rows)
    is_greedy = [row.sampling.temperature == 0 for row in rows]
    if all(is_greedy):
        return scores.argmax(-1)
    drawn = draw_rows(scores, [row.noise.words(len(row.answer)) for row in rows], [row.sampling for row in rows])
    if not any(is_greedy):
        return drawn
    return torch.where(torch.tensor(is_greedy, device=drawn.device), scores.argmax(-1), drawn)


def draw_rows(scores: Tensor, keys: Sequence[tuple[int, int, int, int, int]], settings: Sequence[Sampling]) -> Tensor:
    """Draw a token for each row from the tokens that its settings allow.

    Args:
        scores: (N, V) float32 logits; -inf for a token that must not be drawn.
        keys: N tuples of five words (``NoiseKey.words``).
        settings: N sampling settings.
    Returns:
        (N,) token ids.
    """
    tokens, values = candidates(scores, settings)
    return gumbel_argmax(values, keys, scores.shape[1], tokens)


def draw_logps(logits: Tensor, rows: Sequence[DrawSettings], tokens: Tensor) -> Tensor:
    """Return (N,) float32 log-probabilities of (N,) tokens under the distribution that ``draw`` samples from."""
    ids, values = candidates(adjusted_logits(logits, rows), [row.sampling for row in rows])
    if ids is None:
        return token_logps(values, tokens.to(values.device))
    is_drawn = ids == tokens.to(values.device)[:, None]
    return values.masked_fill(~is_drawn, -torch.inf).amax(-1) - values.logsumexp(-1)


def adjusted_logits(logits: Tensor, rows: Sequence[DrawSettings]) -> Tensor:
    """Return (N, V) float32 logits with bias, penalties, grammar and excluded tokens applied; ``logits`` if there are
    none."""
    if not any(row.adjusts for row in rows):
        return logits.detach().float()
    scores = logits.detach().to(torch.float32, copy=True)
    if bias := [(at, *pair) for at, row in enumerate(rows) for pair in row.sampling.bias.items()]:
        places, (values,) = _entries(bias, scores)
        scores[places] += values
    penalized = [(at, row) for at, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    if found := [
        (at, token, row.sampling.repetition_penalty) for at, row in penalized for token in {*row.prompt, *row.answer}
    ]:
        places, (penalties,) = _entries(found, scores)
        before = scores[places]
        after = torch.where(before < 0, before * penalties, before / penalties)
        scores[places] = after.clamp(-_LARGEST, _LARGEST)
    used = [
        (at, token, row.sampling.presence_penalty, row.sampling.frequency_penalty, uses)
        for at, row in enumerate(rows)
        if row.sampling.presence_penalty or row.sampling.frequency_penalty
        for token, uses in Counter(row.answer).items()
    ]
    if used:
        places, (presence, frequency, uses) = _entries(used, scores)
        scores[places] -= frequency * uses + presence
    for at, row in enumerate(rows):
        if row.mask is not None:
            scores[at] += row.mask.to(scores.device)
    if excluded_ids := [(at, token, -torch.inf) for at, row in enumerate(rows) for token in row.excluded_ids]:
        places, (values,) = _entries(excluded_ids, scores)
        scores[places] = values
    return scores


def _entries(entries: Sequence[tuple[float, ...]], like: Tensor) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Split (row, token, value, ...) entries into an index and one float32 tensor per value."""
    rows, tokens, *values = zip(*entries, strict=True)
    index = torch.tensor(rows, device=like.device), torch.tensor(tokens, device=like.device)
    return index, [torch.tensor(each, dtype=torch.float32, device=like.device) for each in values]


def candidates(scores: Tensor, settings: Sequence[Sampling]) -> tuple[Tensor | None, Tensor]:
    """Return the tokens that can be drawn at a temperature above 0.

    Returns:
        tokens: (N, M) ids, ascending in each row, if every row is limited to a few tokens; None for all V of them.
        values: (N, M) or (N, V) score / temperature; -inf for excluded tokens and for padding.
    """
    vocabulary, column = scores.shape[1], _Column(scores.device)
    tokens: Tensor | None = None
    limits = [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in settings]
    if limited := [limit for limit in limits if limit < vocabulary]:
        largest = scores.topk(max(limited)).values
        least = largest.gather(1, column([min(limit, max(limited)) - 1 for limit in limits], torch.long))
        is_kept = (scores >= least) | column([limit == vocabulary for limit in limits], torch.bool)
        tokens, scores = _compact(is_kept, tokens, scores)
    values = scores
    if any(each.temperature != 1 for each in settings):
        values = scores / column([max(each.temperature, _COLDEST) for each in settings], torch.float32)
    if any(each.min_p > 0 or each.top_p < 1 for each in settings):
        chances = values.softmax(-1)
        least = column([each.min_p for each in settings], torch.float32) * chances.max(-1, keepdim=True).values
        chances = chances.masked_fill(chances < least, 0)
        is_kept = _in_nucleus(chances, column([each.top_p for each in settings], torch.float64)) & (chances >= least)
        tokens, values = _compact(is_kept, tokens, values)
    return tokens, values


def _compact(is_kept: Tensor, tokens: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor]:
    """Move the kept entries of each row to its front: (N, V) -> (N, M), with M the largest number kept.

    If much is kept, entries are only masked.
    """
    values = values.masked_fill(~is_kept, -torch.inf)
    counts = is_kept.sum(-1)
    longest = int(counts.max())
    if longest * 4 > is_kept.shape[1]:
        return tokens, values
    rows, columns = is_kept.nonzero(as_tuple=True)  # ordered by row, then by column
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    compact_tokens = columns.new_zeros(len(values), longest)
    compact_values = values.new_full((len(values), longest), -torch.inf)
    compact_tokens[rows, places] = columns if tokens is None else tokens[rows, columns]
    compact_values[rows, places] = values[rows, columns]
    return compact_tokens, compact_values


@dataclass(frozen=True)
class _Column:
    """Creates (N, 1) tensors with one value per row."""

    device: torch.device

    def __call__(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)[:, None]


def _in_nucleus(chances: Tensor, top_p: Tensor) -> Tensor:
    """Return (N, V), true for the smallest set of most likely tokens whose probabilities reach ``top_p``.

    Ties are broken by the smaller id (Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751).

    Args:
        chances: (N, V) probabilities up to a constant factor.
        top_p: (N, 1) float64; 1 keeps the whole row.
    """
    wanted, number = chances.sum(-1, keepdim=True, dtype=torch.float64) * top_p, _FIRST_SORTED
    while True:  # Few tokens usually suffice. Sorting a vocabulary of 150,000 takes 20 ms per row on a CPU.
        largest = chances.topk(min(number, chances.shape[1])).values  # sorted
        sums = largest.cumsum(-1, dtype=torch.float64)
        if number >= chances.shape[1] or bool(((sums[:, -1:] > wanted * (1 + _ROUNDING)) | (top_p >= 1)).all()):
            break
        number *= 16
    count = (sums - largest < wanted).sum(-1, keepdim=True).clamp(min=1)
    least = largest.gather(1, count - 1)
    is_tied = chances == least
    kept_ties = count - (largest > least).sum(-1, keepdim=True)
    if bool((is_tied.sum(-1, keepdim=True) > kept_ties).any()):
        is_tied &= is_tied.cumsum(-1) <= kept_ties
    return (chances > least) | is_tied | (top_p >= 1)


def token_logps(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return (N,) float32 log-probabilities of (N,) tokens under the model's own (N, V) logits, in nats."""
    logits = logits.detach().float()
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def log_probabilities(
    logits: Tensor, tokens: Tensor, top: int = 0, also: Sequence[Sequence[int]] = ()
) -> list[Logprob]:
    """Return the log-probabilities of one token per row, and of additional tokens, under the model's own logits.

    They are computed on the device of the logits for all rows at once, and read from it once.

    Args:
        logits: (N, V) logits.
        tokens: (N,) ids.
        top: number of most likely tokens to add.
        also: tokens to add, for each row.
    """
    ids, logps = tokens.to(logits.device)[:, None], logits.detach().float().log_softmax(-1)
    if top:
        ids = torch.cat([ids, logps.topk(min(top, logps.shape[1])).indices], 1)
    if longest := max(map(len, also), default=0):
        padded = [[*row, *[0] * (longest - len(row))] for row in also]
        ids = torch.cat([ids, torch.tensor(padded, device=logits.device)], 1)
    result = []
    for row, (of_row, values) in enumerate(zip(ids.tolist(), logps.gather(1, ids).tolist(), strict=True)):
        number = len(of_row) - longest + (len(also[row]) if also else 0)
        result.append(Logprob(of_row[0], values[0], tuple(zip(of_row[1:number], values[1:number], strict=True))))
    return result
