"""Passes without a gradient over completions: values of their tokens under the policy or the reference."""

# N tokens of completions in a micro-batch

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from burnish.loop.protocols import Parallel
from burnish.losses.base import Collate
from burnish.rollouts.samples import ScoredCompletion, collate_pack, pack_samples


def token_values(
    module: nn.Module, samples: Sequence[ScoredCompletion], collate: Collate, size: int, parallel: Parallel
) -> Iterator[tuple[ScoredCompletion, list[list[float]]]]:
    """Yield each completion with the log-probability, the entropy and, with a value head, the value of each of its
    tokens. Collective if weights are sharded: all ranks make the same number of passes.

    Args:
        module: a ``SequenceModel``. size: number of completions in a micro-batch.
    """
    passes = max(len(part) for part in parallel.gather_objects(range(0, len(samples), size)))
    for at in range(passes):
        part = samples[at * size : (at + 1) * size]
        batch = parallel.to_device(collate_pack(collate, pack_samples(part)))
        values = module(batch)
        number = sum(len(sample.ids) for sample in part)
        per_token = [values.token_logps, values.token_entropy]
        per_token += [] if values.token_values is None else [values.token_values]
        ordered = torch.zeros(len(per_token), max(number, 1), device=values.token_logps.device)
        ordered[:, batch["places"]] = torch.stack([each.float() for each in per_token])
        columns, begin = ordered.tolist(), 0
        for sample in part:
            end = begin + len(sample.ids)
            yield sample, [column[begin:end] for column in columns]
            begin = end
