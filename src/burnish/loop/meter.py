"""Sums of loss, metrics, tokens and rows since the last log, kept on the device and read once.

Between two logs nothing is copied to the host, because reading one number from a GPU waits for all queued work. A log
costs one device read and one reduction over ranks of a small vector.

``IdleTime`` measures the fraction of time that the training thread waits for other processes or for data: the time in
which it neither ran nor was ready to run. On a CPU, where matrix products run in this thread, this is idle time. On a
GPU the thread runs ahead of the device, so the fraction is not logged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.loop.metrics import Metrics
from burnish.loop.protocols import Parallel
from burnish.loop.state import RATES, TrainerState
from burnish.loop.types import Loss, Metric, StepBatch


class Meter:
    """Sums since the last log, and since the start of the run.

    Args:
        filter_non_finite: exclude NaN and infinite losses from the logged mean. As in transformers, such a loss counts
            as the mean of the steps since the last log. The decision to apply the update is not affected.
    """

    def __init__(self, device: torch.device, filter_non_finite: bool = True) -> None:
        self.device = device
        self.filter_non_finite = filter_non_finite
        self.loss = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self.run_loss = 0.0  # since the start of the run, including earlier processes
        self.run_steps = 0  # without those that had no items
        self.metrics = Metrics()  # on this rank
        self.num_items = torch.zeros((), device=device)  # over all ranks
        self.non_finite_steps = torch.zeros((), device=device)
        self.empty_steps = torch.zeros((), device=device)  # steps without items, since the last log
        self.grad_norm: Tensor | None = None
        self.learning_rate = 0.0  # of the last step
        self.unlogged_steps: list[tuple[Tensor, Sequence[int]]] = []  # since the last log: () is finite, row indices
        self.logged_steps: list[tuple[Tensor, Sequence[int]]] = []  # the same for the steps of the last log
        self.steps = 0  # since the last log
        self.steps_here = 0  # since train() began
        self.tokens = 0  # on this rank, since they were last counted in the state
        self.rows = 0
        self.rows_here = 0
        self.num_non_finite = 0  # steps of the last log whose loss or gradient was not finite
        self.run_num_non_finite = 0  # since train() began
        self.started_s = time.perf_counter()
        self.idle_time = IdleTime()

    def add_step(
        self, step_batch: StepBatch, loss: Tensor, num_items: Tensor, sums: Mapping[str, Metric], grad_norm: Tensor,
        is_finite: Tensor, learning_rate: float,
    ) -> None:  # fmt: skip
        """Add the values of one step.

        Args:
            step_batch: its rows and tokens on this rank.
            loss: () this rank's part of the mean loss of the step.
            num_items: () number of items over all ranks.
            sums: metrics of this rank.
            grad_norm: () norm of the gradient.
            is_finite: () bool, whether loss and norm are finite.
            learning_rate: learning rate of the step.
        """
        self.rows += step_batch.num_rows
        self.tokens += step_batch.num_tokens
        self.non_finite_steps += ~is_finite
        self.unlogged_steps.append((is_finite, step_batch.indices))
        if self.filter_non_finite:
            loss = torch.where(torch.isfinite(loss), loss, (self.loss / (1 + self.steps)).to(loss.dtype))
        self.loss += loss
        self.num_items += num_items
        self.empty_steps += (num_items == 0) & (loss == 0)
        self.metrics.add(sums)
        self.grad_norm, self.learning_rate = grad_norm, learning_rate
        self.steps += 1
        self.run_steps += 1
        self.steps_here += 1

    def read(self, state: TrainerState, parallel: Parallel, flos_per_token: int = 0) -> dict[str, float]:
        """Return the means since the last log, add the counts to ``state``, and reset the sums. One device read.

        Returns:
            loss, grad_norm and one mean per metric. With several processes on CPUs also ``waiting``, the fraction of
            time spent waiting. Empty if no step was taken.
        """
        over_ranks = parallel.sum(torch.cat([self._vector(), self.loss.new_tensor(self.idle_time.read())]))
        extremes = self.metrics.extremes(parallel, over_ranks.dtype)
        wide = over_ranks.dtype
        everywhere = [self.num_items.to(wide), self.empty_steps.to(wide), self._norm().to(wide), *extremes]
        numbers = torch.cat([over_ranks, torch.stack(everywhere)]).tolist()
        loss, non_finite, tokens, rows, *addends, waited_s, passed_s = numbers[: len(over_ranks)]
        num_items, num_empty, norm, *ends = numbers[len(over_ranks) :]
        means = {}
        if self.steps:
            means["loss"] = loss / max(self.steps - int(num_empty), 1)
            if self.grad_norm is not None:
                means["grad_norm"] = norm
            means.update(self.metrics.means(addends, ends, max(num_items, 1.0), parallel.world_size))
            if parallel.world_size > 1 and self.device.type == "cpu":
                means["waiting"] = waited_s / max(passed_s, 1e-9)
        self.run_loss += loss
        self.run_steps -= int(num_empty)
        self.rows_here += int(rows)
        self.num_non_finite = int(non_finite) // parallel.world_size
        self.run_num_non_finite += self.num_non_finite
        _add_tokens(state, int(tokens), flos_per_token)
        self._restart()
        return means

    def count_tokens(self, state: TrainerState, parallel: Parallel, flos_per_token: int = 0) -> None:
        """Add the tokens since the last count to ``state``. One reduction and device read with several processes."""
        tokens = self.tokens
        if parallel.world_size > 1:
            tokens = int(parallel.sum(self.loss.new_tensor([tokens])).item())
        _add_tokens(state, tokens, flos_per_token)
        self.tokens = 0

    def _vector(self) -> Tensor:
        """(4 + number of metric addends,) values to sum over ranks: loss, non-finite steps, tokens, rows, metrics."""
        wide = self.loss.dtype
        counts = torch.tensor([self.tokens, self.rows], dtype=wide, device=self.device).unbind()
        return torch.stack([self.loss, self.non_finite_steps.to(wide), *counts, *self.metrics.addends(wide)])

    def _norm(self) -> Tensor:
        return torch.zeros_like(self.num_items) if self.grad_norm is None else self.grad_norm.to(self.num_items.dtype)

    def reduce_to_rank_0(self, parallel: Parallel) -> None:
        """Move the current sums of all ranks to rank 0 before a checkpoint, which stores them in one file."""
        if parallel.world_size == 1:
            return
        over_ranks = parallel.sum(self._vector())
        loss, non_finite, tokens, rows, *addends = over_ranks.unbind()
        is_first = float(parallel.rank == 0)
        self.loss = loss * is_first
        self.metrics.reduce_to_rank_0(addends, self.metrics.extremes(parallel, over_ranks.dtype), is_first)
        self.non_finite_steps = (non_finite * is_first).to(self.non_finite_steps.dtype)
        self.tokens, self.rows = int(tokens.item() * is_first), int(rows.item() * is_first)

    def clear_sums(self) -> None:
        """Set the sums over rows of this rank to zero. Values that are equal on all ranks are kept."""
        self.loss = torch.zeros_like(self.loss)
        self.metrics.clear_sums()
        self.non_finite_steps = torch.zeros_like(self.non_finite_steps)
        self.tokens = self.rows = 0
        self.unlogged_steps = []

    def _restart(self) -> None:
        self.loss = torch.zeros_like(self.loss)
        self.metrics = Metrics()
        self.num_items = torch.zeros_like(self.num_items)
        self.non_finite_steps = torch.zeros_like(self.non_finite_steps)
        self.empty_steps = torch.zeros_like(self.empty_steps)
        self.steps = self.tokens = self.rows = 0
        self.logged_steps, self.unlogged_steps = self.unlogged_steps, []

    def non_finite_indices(self) -> list[int]:
        """Indices of the rows of the non-finite steps of the last log. One device read."""
        return _non_finite_indices(self.logged_steps)

    def summary(self) -> dict[str, float]:
        """Metrics of the run, logged at its end: mean loss of all steps; runtime and rates since ``train()`` began."""
        runtime_s = time.perf_counter() - self.started_s
        return {
            "train_runtime": runtime_s,
            "train_samples_per_second": self.rows_here / runtime_s,
            "train_steps_per_second": self.steps_here / runtime_s,
            "train_loss": self.run_loss / max(self.run_steps, 1),
        }

    def start(self) -> None:
        """Reset the clock of the rates in the summary."""
        self.started_s = time.perf_counter()
        self.rows_here = self.steps_here = 0
        self.idle_time.read()

    # A checkpoint includes the sums since the last log, so the next log of a resumed run has the same values.

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss, "weight": self.num_items, "sums": self.metrics.state_dict(), "steps": self.steps,
            "tokens": self.tokens, "rows": self.rows, "non_finite_steps": self.non_finite_steps,
            "empty_steps": self.empty_steps, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate,
            "non_finite_indices": _non_finite_indices(self.unlogged_steps),
            "run_loss": self.run_loss, "run_steps": self.run_steps,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if name == "sums":
                self.metrics.load_state_dict(value, self.device)
            elif name == "non_finite_indices":
                self.unlogged_steps = [(torch.zeros((), dtype=torch.bool, device=self.device), value)]
            else:
                value = value.to(self.device) if isinstance(value, Tensor) else value
                setattr(self, "num_items" if name == "weight" else name, value)


def _add_tokens(state: TrainerState, num_tokens: int, flos_per_token: int) -> None:
    state.num_input_tokens_seen += num_tokens
    state.total_flos += num_tokens * flos_per_token


def _non_finite_indices(steps: Sequence[tuple[Tensor, Sequence[int]]]) -> list[int]:
    """Row indices of steps that are not finite. One device read."""
    if not steps:
        return []
    finite = torch.stack([is_finite for is_finite, _ in steps]).tolist()
    return [index for is_finite, (_, indices) in zip(finite, steps, strict=True) if not is_finite for index in indices]


class EvalSums:
    """Sums over an evaluation set, kept on the device until its end."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.num_items = torch.zeros(())
        self.num_batches = 0

    def add(self, loss: Loss, num_items: Tensor) -> None:
        self.metrics.add({"loss": loss.total.float(), **loss.sums})
        self.num_items = self.num_items.to(num_items.device) + num_items.float()
        self.num_batches += 1

    def means(self, parallel: Parallel) -> dict[str, float]:
        """Divide each sum by the items of the whole set, or by its own count. One device read."""
        if not self.num_batches:
            return {}
        over_ranks = parallel.sum(torch.stack([self.num_items, *self.metrics.addends(torch.float32)]))
        extremes = self.metrics.extremes(parallel, torch.float32)
        num_items, *numbers = torch.cat([over_ranks, *(end[None] for end in extremes)]).tolist()
        addends, ends = numbers[: len(over_ranks) - 1], numbers[len(over_ranks) - 1 :]
        return self.metrics.means(addends, ends, num_items or 1.0, parallel.world_size)


class Clock:
    """Measures the runtime since its creation, and rates."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    def rates(self, prefix: str, num_rows: int, num_steps: int) -> dict[str, float]:
        runtime_s = time.perf_counter() - self.started_s
        values = (runtime_s, num_rows / runtime_s, num_steps / runtime_s)
        return {f"{prefix}_{name}": value for name, value in zip(RATES, values, strict=True)}


class IdleTime:
    """Measures how long the thread that created it waits. ``read`` reads one small system file, which takes about 20
    microseconds (``run_delay`` in https://docs.kernel.org/scheduler/sched-stats.html). On systems other than Linux,
    time ready to run counts as waiting.
    """

    def __init__(self) -> None:
        self.passed_s, self.busy_s = time.perf_counter(), _busy_s()

    def read(self) -> tuple[float, float]:
        """Return the idle time and the elapsed time since the last call, in seconds."""
        passed_s, busy_s = time.perf_counter(), _busy_s()
        passed, busy = passed_s - self.passed_s, busy_s - self.busy_s
        self.passed_s, self.busy_s = passed_s, busy_s
        return max(0.0, passed - busy), passed


def _busy_s() -> float:
    """Seconds in which this thread ran or was ready to run."""
    try:
        ready_ns = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except OSError:
        ready_ns = 0
    return time.thread_time() + ready_ns / 1e9
