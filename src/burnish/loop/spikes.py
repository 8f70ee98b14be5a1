"""Detect spikes: steps with a non-finite loss or gradient, or with a gradient norm far above the recent mean.

With ``on_spike: rollback`` such a step raises ``SpikeError``. The caller loads the latest valid checkpoint, excludes
the rows of the step and continues. The recent norms are part of a checkpoint. Detection costs a device read per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.config.checks import notes
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.loop.protocols import Parallel
from burnish.loop.types import StepBatch

_WINDOW, _MIN_HISTORY = 32, 8
MAX_ROLLBACKS = 16
"""Maximum number of rollbacks. More of them indicate a problem of the run rather than of some rows."""


@dataclass
class SpikeOptions:
    """Loss and gradient spikes."""

    on_spike: str = option(
        "no",
        "rollback: after a step whose loss or gradient is not finite, or whose gradient norm exceeds spike_ratio, "
        "return to the latest checkpoint and skip the examples of that step for the rest of the run. Adds a device "
        "synchronization per step.",
        choices=("no", "rollback"),
        refused=lambda: ("go_back",),
    )  # fmt: skip
    spike_ratio: float | None = option(
        None, "A gradient norm above this multiple of the mean of the last 32 steps counts as a spike.", gt=1
    )


class SpikeError(RuntimeError):
    """Raised after a spike. ``indices`` are those of the rows of the step in the training set."""

    def __init__(self, what: str, indices: Sequence[int]) -> None:
        super().__init__(what)
        self.indices = indices


class SpikeWatch:
    """Gradient norms of the last steps. ``ratio`` is ``SpikeOptions.spike_ratio``."""

    def __init__(self, ratio: float | None) -> None:
        self.ratio = ratio
        self.norms: deque[float] = deque(maxlen=_WINDOW)

    def check(self, parallel: Parallel, step: int, step_batch: StepBatch, loss: Tensor, norm: Tensor) -> None:
        """Raise SpikeError on all ranks if the last step is a spike on any of them."""
        mean_norm = sum(self.norms) / len(self.norms) if len(self.norms) >= _MIN_HISTORY else None
        is_applied = torch.isfinite(loss) & torch.isfinite(norm)
        # A loss scale that is too large decreases by itself; such a step is not caused by the data.
        is_finite = torch.isfinite(loss) if parallel.scales_loss else is_applied
        exceeds_ratio = (
            norm > mean_norm * self.ratio if mean_norm is not None and self.ratio is not None else ~is_finite
        )
        exceeds_ratio = exceeds_ratio & torch.isfinite(norm)
        counted = torch.stack([(~is_finite | exceeds_ratio).float(), (~is_finite).float(), (~is_applied).float()])
        spikes, broken, skipped = parallel.sum(counted).tolist()  # one device read per step
        if not spikes:
            if not skipped:
                self.norms.append(float(norm))
            return
        if broken:
            numbers = f"loss {float(loss):.4g}, gradient norm {float(norm):.4g}"
            what = f"The loss or gradient of step {step} was not finite ({numbers})"
        else:
            what = f"The gradient of step {step} was {float(norm) / (mean_norm or 1):.3g} times the usual norm"
        raise SpikeError(what, step_batch.indices)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms = deque(state["norms"], maxlen=_WINDOW)


def spike_problems(options: SpikeOptions, inner_steps: int) -> Iterator[Problem]:
    """Yield a problem if the run would have to go back into the middle of a rollout.

    Args:
        options: options of the run.
        inner_steps: optimizer steps per step batch (``Objective.inner_steps``).
    """
    if options.on_spike == "no" or inner_steps == 1:
        return
    what = '"on_spike": "rollback" is not supported if several optimizer steps use the same rollout.'
    yield Problem(what, remedy="Set on_non_finite: skip instead.", option="on_spike")


@notes
def spike_notes(options: SpikeOptions) -> list[str]:
    """Note an option that has no effect."""
    unread = options.spike_ratio is not None and options.on_spike == "no"
    return ['"spike_ratio" has no effect without on_spike: rollback.'] if unread else []
