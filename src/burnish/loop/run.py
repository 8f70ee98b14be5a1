"""The parts of one training run, as the loop receives them. Whoever assembles a run fills in every part; a function
that a script overrides (a microstep, an evaluation, a log) is a part like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from burnish.checkpoint.checkpoint import Checkpoints
from burnish.checkpoint.parts import Part
from burnish.loop.events import CallbackHandler
from burnish.loop.meter import Meter
from burnish.loop.protocols import Engine, EvalSet, Objective, Stream
from burnish.loop.schedule import Schedule
from burnish.loop.state import TrainerControl, TrainerState
from burnish.loop.types import Batch, Loss, StepBatch

Microstep: TypeAlias = "Callable[[Run, Batch, Tensor, bool], Loss]"
"""(run, micro-batch, () weight of the whole step, whether it is the step's last) -> its loss; gradients are added."""
Evaluate: TypeAlias = "Callable[[Run, EvalSet, str], dict[str, float]]"
"""(run, one set, prefix of its metrics) -> its metrics, which have been logged."""
Log: TypeAlias = "Callable[[Run, dict[str, Any]], None]"
Watch: TypeAlias = Callable[[Engine, int, StepBatch, Tensor, Tensor], None]
"""(engine, step, group, () loss, () gradient norm) of a step; ``SpikeWatch.look``."""


def unwatched(engine: Engine, step: int, group: StepBatch, loss: Tensor, norm: Tensor) -> None:
    """Look at nothing."""


def nowhere(items: Sequence[int]) -> str:
    """Return nothing: these rows nobody can name."""
    return ""


@dataclass
class Run:
    """The parts of one training run, and no behaviour."""

    model: nn.Module  # ``objective.module(...)`` as the engine prepared it
    objective: Objective
    engine: Engine
    stream: Stream
    optimizer: Any
    schedule: Schedule
    state: TrainerState
    control: TrainerControl
    callbacks: CallbackHandler
    meter: Meter
    checkpoints: Checkpoints
    parts: Mapping[str, Part]  # everything a checkpoint holds, by name
    microstep: Microstep  # ``loop.microstep``, or a script's own
    evaluate: Evaluate  # ``loop.evaluate``, or a script's own
    log: Log  # ``loop.log``, or a script's own
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)  # by name; "" for a single one
    flos_per_token: int = 0  # floating-point operations of forward and backward for one token
    watch: Watch = unwatched  # looks at each step that was taken, and may raise ``SpikeError``
    where: Callable[[Sequence[int]], str] = nowhere  # items of a step -> their records in words, "" where not known
    logs_tokens: bool = False  # num_input_tokens_seen in every log
