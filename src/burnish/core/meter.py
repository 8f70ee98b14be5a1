"""What happened since the last log, kept as sums on the device and read once.

Between two logs nothing is copied to the host: a read of one number from a GPU waits for all the work queued before
it. A log then costs one read, and one sum over ranks, of one small vector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from burnish.core.state import TrainerState
from burnish.core.types import Engine, Loss


class Meter:
    """Sums since the last log, and since the run began.

    Args:
        filter_non_finite: leave a NaN or infinite loss out of the logged mean (never out of the decision to apply
            the update): it counts as the mean of the steps since the last log, as in transformers.
    """

    def __init__(self, device: torch.device, filter_non_finite: bool = True) -> None:
        self.device = device
        self.filter_non_finite = filter_non_finite
        self.loss = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self.run_loss = 0.0  # since the run began, in whichever process
        self.run_steps = 0
        self.sums: dict[str, Tensor] = {}  # metric -> () sum on this rank
        self.weight = torch.zeros((), device=device)  # items over all ranks
        self.non_finite_steps = torch.zeros((), device=device)
        self.grad_norm: Tensor | None = None
        self.learning_rate = 0.0  # of the last step
        self.steps = 0  # since the last log
        self.steps_here = 0  # since train() began
        self.tokens = 0  # on this rank, since the last log
        self.rows = 0
        self.rows_here = 0
        self.run_non_finite = 0
        self.started_s = time.perf_counter()

    def add_step(
        self, loss: Tensor, weight: Tensor, sums: Mapping[str, Tensor], grad_norm: Tensor, learning_rate: float
    ) -> None:
        """One step: ``loss`` () this rank's part of the mean loss, ``weight`` () items of the step over all ranks."""
        finite = torch.isfinite(loss)
        self.non_finite_steps += ~(finite & torch.isfinite(grad_norm))
        if self.filter_non_finite:
            loss = torch.where(finite, loss, (self.loss / (1 + self.steps)).to(loss.dtype))
        self.loss += loss
        self.weight += weight
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()
        self.grad_norm, self.learning_rate = grad_norm, learning_rate
        self.steps += 1
        self.run_steps += 1
        self.steps_here += 1

    def add_rows(self, rows: int, tokens: int) -> None:
        self.rows += rows
        self.tokens += tokens

    def read(self, state: TrainerState, engine: Engine, flos_per_token: int = 0) -> dict[str, float]:
        """The means since the last log; counts go into ``state``, the sums start again. One device read.

        Returns:
            loss, grad_norm and one mean per metric; empty where no step was taken.
        """
        names = sorted(self.sums)
        over_ranks = engine.sum(self._vector(names))
        everywhere = torch.stack([self.weight, self._norm()]).to(over_ranks.dtype)
        loss, *metrics, non_finite, tokens, rows, weight, norm = torch.cat([over_ranks, everywhere]).tolist()
        means = {}
        if self.steps:
            means["loss"] = loss / self.steps
            if self.grad_norm is not None:
                means["grad_norm"] = norm
            means.update({name: value / max(weight, 1.0) for name, value in zip(names, metrics, strict=True)})
        self.run_loss += loss
        self.rows_here += int(rows)
        self.run_non_finite += int(non_finite) // engine.world_size
        state.num_input_tokens_seen += int(tokens)
        state.total_flos += int(tokens) * flos_per_token
        self._restart()
        return means

    def _vector(self, names: list[str]) -> Tensor:
        """(3 + metrics + 1,) what is summed over ranks: loss, metrics, non-finite steps, tokens, rows."""
        wide = self.loss.dtype
        counts = torch.tensor([self.tokens, self.rows], dtype=wide, device=self.device)
        values = [self.loss, *(self.sums[name].to(wide) for name in names), self.non_finite_steps.to(wide)]
        return torch.cat([torch.stack(values), counts])

    def _norm(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.grad_norm is None else self.grad_norm.to(self.weight.dtype)

    def collect(self, engine: Engine) -> None:
        """Before a checkpoint: rank 0 takes over the open sums of all ranks, so that one file holds them all."""
        if engine.world_size == 1:
            return
        names = sorted(self.sums)
        loss, *metrics, non_finite, tokens, rows = engine.sum(self._vector(names)).unbind()
        mine = float(engine.rank == 0)
        self.loss = loss * mine
        self.sums = {name: value * mine for name, value in zip(names, metrics, strict=True)}
        self.non_finite_steps = (non_finite * mine).to(self.non_finite_steps.dtype)
        self.tokens, self.rows = int(tokens.item() * mine), int(rows.item() * mine)

    def _restart(self) -> None:
        self.loss = torch.zeros_like(self.loss)
        self.sums = {}
        self.weight = torch.zeros_like(self.weight)
        self.non_finite_steps = torch.zeros_like(self.non_finite_steps)
        self.steps = self.tokens = self.rows = 0

    def summary(self) -> dict[str, float]:
        """What the last log of a run says: the mean loss of all its steps; runtime and rates of this process alone."""
        runtime_s = time.perf_counter() - self.started_s
        return {
            "train_runtime": runtime_s,
            "train_samples_per_second": self.rows_here / runtime_s,
            "train_steps_per_second": self.steps_here / runtime_s,
            "train_loss": self.run_loss / max(self.run_steps, 1),
        }

    def start(self) -> None:
        """train() begins: the rates of the summary count from here."""
        self.started_s = time.perf_counter()
        self.rows_here = self.steps_here = 0

    # A checkpoint between two logs carries the open sums, so that the next log of a continued run is the same number.

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss, "weight": self.weight, "sums": dict(self.sums), "steps": self.steps,
            "tokens": self.tokens, "rows": self.rows, "non_finite_steps": self.non_finite_steps,
            "run_loss": self.run_loss, "run_steps": self.run_steps,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor):
                value = value.to(self.device)
            if name == "sums":
                value = {key: tensor.to(self.device) for key, tensor in value.items()}
            setattr(self, name, value)


class Totals:
    """Sums over an evaluation set, on the device until its end."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.num_batches = 0

    def add(self, loss: Loss, weight: Tensor) -> None:
        for name, value in {"loss": loss.total, "weight": weight, **loss.sums}.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_batches += 1

    def means(self, engine: Engine) -> dict[str, float]:
        """Each sum divided by the weight of the whole set. One device read."""
        if not self.sums:
            return {}
        names = list(self.sums)
        totals = dict(zip(names, engine.sum(torch.stack(list(self.sums.values()))).tolist(), strict=True))
        weight = totals.pop("weight") or 1.0
        return {name: value / weight for name, value in totals.items()}


RATES = ("runtime", "samples_per_second", "steps_per_second")
"""What is said of the time of an evaluation, behind its prefix."""


class Clock:
    """The time since it was made, and the rates that follow from it."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    def rates(self, prefix: str, num_rows: int | None, num_steps: int) -> dict[str, float]:
        runtime_s = time.perf_counter() - self.started_s
        rows_per_second = None if num_rows is None else num_rows / runtime_s
        values = (runtime_s, rows_per_second, num_steps / runtime_s)
        return {f"{prefix}_{name}": value for name, value in zip(RATES, values, strict=True) if value is not None}
