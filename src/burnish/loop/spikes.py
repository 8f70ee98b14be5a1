"""Spikes: steps whose loss or gradient is not finite, or whose gradient is far longer than those before it.

With ``on_spike: go_back`` such a step ends the attempt (``SpikeError``); whoever began it loads the newest whole
checkpoint, leaves the rows of the step out from there on, and goes on. The watch is a part of a checkpoint, because its
mean is over the last steps. It costs a read of the device in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.config.checks import notes
from burnish.config.options import option
from burnish.loop.protocols import Engine
from burnish.loop.types import StepBatch

_SEEN, _ENOUGH = 32, 8
MOST = 16
"""Times that a run goes back. More of them are a fault of the run, not of some rows."""


@dataclass
class SpikeOptions:
    """Loss and gradient spikes."""

    on_spike: str = option(
        "no",
        "go_back: after a step that is not finite or exceeds spike_ratio, return to the latest checkpoint "
        "and skip the examples of that step for the rest of the run. Adds a device synchronization per "
        "step.",
        choices=("no", "go_back"),
    )  # fmt: skip
    spike_ratio: float | None = option(
        None, "A gradient norm above this multiple of the mean of the last 32 steps counts as a spike.", gt=1
    )


class SpikeChoices(Protocol):
    """The options that say what a spike is."""

    on_spike: str
    spike_ratio: float | None


class SpikeError(RuntimeError):
    """A step was a spike. Args: items: of the step, by their index in the training set."""

    def __init__(self, what: str, items: Sequence[int]) -> None:
        super().__init__(what)
        self.items = items


class SpikeWatch:
    """The gradient norms of the last steps. Args: ratio: of ``SpikeOptions``."""

    def __init__(self, ratio: float | None) -> None:
        self.ratio = ratio
        self.norms: deque[float] = deque(maxlen=_SEEN)

    def check(self, engine: Engine, step: int, step_batch: StepBatch, loss: Tensor, norm: Tensor) -> None:
        """Raise SpikeError where the step that was just taken is a spike; on all ranks, where it is one on any."""
        usual = sum(self.norms) / len(self.norms) if len(self.norms) >= _ENOUGH else None
        is_applied = torch.isfinite(loss) & torch.isfinite(norm)
        # A loss scale that is too large for its gradients comes down by itself: such a step is none of the data's.
        is_finite = torch.isfinite(loss) if engine.scales_loss else is_applied
        is_long = norm > usual * self.ratio if usual is not None and self.ratio is not None else ~is_finite
        is_long = is_long & torch.isfinite(norm)
        counted = torch.stack([(~is_finite | is_long).float(), (~is_finite).float(), (~is_applied).float()])
        spikes, broken, skipped = engine.sum(counted).tolist()  # a read in every step: the price of the option
        if not spikes:
            if not skipped:
                self.norms.append(float(norm))
            return
        if broken:
            what = f"Step {step} was not finite (loss {float(loss):.4g}, gradient norm {float(norm):.4g})"
        else:
            what = f"The gradient of step {step} was {float(norm) / (usual or 1):.3g} times the usual norm"
        raise SpikeError(what, step_batch.items)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms = deque(state["norms"], maxlen=_SEEN)


@notes
def spike_notes(options: SpikeOptions) -> list[str]:
    """Note an option that has no effect."""
    unread = options.spike_ratio is not None and options.on_spike == "no"
    return ['"spike_ratio" has no effect without on_spike: go_back.'] if unread else []
