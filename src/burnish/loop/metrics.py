"""Metrics: values that are logged with the loss, each with its divisor.

In:  per micro-batch a mapping from names to metrics. A () tensor is a sum over the items of the loss and is divided by
their number. A ``Sum`` has its own count, or is not divided (minimum, maximum, last value).
Out: one number per name, over all micro-batches and ranks since the last log or over a whole evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.loop.protocols import Parallel
from burnish.loop.types import Metric, Sum


def join_metrics(metrics: Sequence[Metric]) -> Metric:
    """Combine one metric of several micro-batches, in their order. The result is detached from the autograd graph."""
    first = metrics[0]
    if isinstance(first, Tensor):
        return torch.stack([_tensor(metric).detach() for metric in metrics]).sum()
    totals = torch.stack([_sum(metric).total.detach() for metric in metrics])
    counts = torch.stack([_sum(metric).count.detach() for metric in metrics])
    if first.reduction == "mean":
        return Sum(totals.sum(), counts.sum())
    if first.reduction == "last":
        return Sum(totals[-1], counts[-1], "last")
    # A micro-batch without items has no minimum or maximum.
    nothing = torch.inf if first.reduction == "min" else -torch.inf
    values = torch.where(counts > 0, totals, nothing)
    return Sum(values.amin() if first.reduction == "min" else values.amax(), counts.sum(), first.reduction)


def join_metrics_by_name(several: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Apply ``join_metrics`` to each name. A name may be missing from some micro-batches."""
    by_name: dict[str, list[Metric]] = {}
    for metrics in several:
        for name, metric in metrics.items():
            by_name.setdefault(name, []).append(metric)
    return {name: join_metrics(metrics) for name, metrics in by_name.items()}


class Metrics:
    """Accumulates metrics: per rank for each micro-batch, over ranks once per log."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        self.by_name = join_metrics_by_name([self.by_name, metrics])

    def addends(self, dtype: torch.dtype) -> list[Tensor]:
        """() tensors to sum over ranks, in the order that ``means`` expects. A plain metric adds its sum, a ``Sum`` its
        total and count. A minimum or maximum adds its count only (see ``extremes``).
        """
        values: list[Tensor] = []
        for metric in self.by_name.values():
            if isinstance(metric, Tensor):
                values.append(metric.to(dtype))
            else:
                extreme = metric.reduction in ("min", "max")
                values += [torch.zeros_like(metric.total, dtype=dtype) if extreme else metric.total.to(dtype)]
                values += [metric.count.to(dtype)]
        return values

    def extremes(self, parallel: Parallel, dtype: torch.dtype) -> list[Tensor]:
        """() tensors: minimum or maximum over ranks of each metric with that reduction. One collective, or none."""
        selected = [m for m in self.by_name.values() if isinstance(m, Sum) and m.reduction in ("min", "max")]
        if not selected:
            return []
        of_ranks = parallel.gather(
            torch.stack([metric.total.to(dtype) for metric in selected])[None]
        )  # (ranks, extremes)
        return [
            (column.amin() if metric.reduction == "min" else column.amax())
            for metric, column in zip(selected, of_ranks.unbind(1), strict=True)
        ]

    def means(
        self, addends: Iterable[float], extremes: Iterable[float], num_items: float, world_size: int
    ) -> dict[str, float]:
        """Values for a log. A metric without items is omitted.

        Args:
            addends: result of ``addends``, summed over ranks and read from the device.
            extremes: result of ``extremes``, read from the device.
            num_items: number of items of the loss, the divisor of plain metrics.
            world_size: number of ranks.
        """
        values, ends, result = iter(addends), iter(extremes), {}
        for name, metric in self.by_name.items():
            if isinstance(metric, Tensor):
                result[name] = next(values) / num_items
                continue
            total, count = next(values), next(values)
            end = next(ends) if metric.reduction in ("min", "max") else 0.0
            if count > 0:
                result[name] = {"mean": total / count, "last": total / world_size}.get(metric.reduction, end)
        return result

    def reduce_to_rank_0(self, addends: Sequence[Tensor], extremes: Sequence[Tensor], is_first: float) -> None:
        """Replace the sums by those of all ranks if ``is_first`` is 1, or by zero if it is 0, before a checkpoint."""
        values, ends = iter(addends), iter(extremes)
        for name, metric in self.by_name.items():
            if isinstance(metric, Tensor):
                self.by_name[name] = next(values) * is_first
                continue
            total, count = next(values), next(values)
            total = next(ends) if metric.reduction in ("min", "max") else total * is_first
            self.by_name[name] = Sum(total, count * is_first, metric.reduction)

    def clear_sums(self) -> None:
        """Set sums and counts to zero, and keep minima and maxima."""
        for name, metric in self.by_name.items():
            if isinstance(metric, Tensor):
                self.by_name[name] = torch.zeros_like(metric)
            else:
                is_extreme = metric.reduction in ("min", "max")
                total = metric.total if is_extreme else torch.zeros_like(metric.total)
                self.by_name[name] = Sum(total, torch.zeros_like(metric.count), metric.reduction)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: m if isinstance(m, Tensor) else {"total": m.total, "count": m.count, "reduction": m.reduction}
            for name, m in self.by_name.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.by_name = {
            name: value.to(device)
            if isinstance(value, Tensor)
            else Sum(value["total"].to(device), value["count"].to(device), value["reduction"])
            for name, value in state.items()
        }


def _tensor(metric: Metric) -> Tensor:
    assert isinstance(metric, Tensor), "a metric must be reported as a plain sum in all micro-batches or in none"
    return metric


def _sum(metric: Metric) -> Sum:
    assert isinstance(metric, Sum), "a metric must be reported with a count in all micro-batches or in none"
    return metric
