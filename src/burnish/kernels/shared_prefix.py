"""Keys and values of sequences that share a prefix.

In: a tensor with one row per token, and the runs of tokens that each sequence attends to. Out: the concatenated rows of
all runs, shared ones repeated. The backward pass sums their gradients in float32.
"""

# T tokens, M rows of all runs (M >= T)

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Runs = tuple[tuple[int, int], ...]
"""(begin, length) of each run. Together they cover every token, and two runs are either equal or disjoint."""


def gather_runs(x: Tensor, runs: Runs) -> Tensor:
    """Concatenate the rows of all runs: (T, ...) -> (M, ...)"""
    rows: Tensor = _GatherRuns.apply(x, runs)  # type: ignore[no-untyped-call]
    return rows


class _GatherRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, runs: Runs) -> Tensor:
        ctx.runs, ctx.shape = runs, x.shape
        return torch.cat([x[begin : begin + length] for begin, length in runs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        uses: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for run, rows in zip(ctx.runs, torch.split(grad, [length for _, length in ctx.runs]), strict=True):
            uses[run].append(rows)
        summed = grad.new_empty(ctx.shape)
        for (begin, length), each in uses.items():
            into = summed[begin : begin + length]
            into.copy_(each[0] if len(each) == 1 else torch.stack(each).sum(0, dtype=torch.float32))
        return summed, None
