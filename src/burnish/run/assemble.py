"""The parts of a run, put together: one function for the command line (``build.py``) and for ``Trainer`` (``hf/``).

In: the options, and ``RunPieces``: what one run has and another has not. What a script overrides is such a piece. Out:
a ``Run``, at step 0. Nothing is read here, and nothing is written.

The order is that in which each part needs the one before it: the optimizer is made over the model's weights, the engine
prepares both, the schedule moves what it prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from burnish.checkpoint.checkpoint import Checkpoints
from burnish.checkpoint.parts import Stateful, parts_of
from burnish.loop.best import BestChoices, deciding_metric
from burnish.loop.events import CallbackHandler
from burnish.loop.loop import evaluate, log, microstep
from burnish.loop.meter import Meter
from burnish.loop.protocols import Engine, EvalSet, Objective, Stream
from burnish.loop.run import Evaluate, Log, Microstep, Run, nowhere, unwatched
from burnish.loop.schedule import StepPlan, schedule_of
from burnish.loop.spikes import SpikeWatch
from burnish.loop.state import TrainerState
from burnish.parallel.options import local_rank


class RunChoices(BestChoices, Protocol):
    """The options that decide how the parts of a run are put together."""

    logging_steps: float
    eval_steps: float | None
    save_steps: float
    logging_nan_inf_filter: bool
    save_only_model: bool
    save_in_background: bool
    save_total_limit: int | None


class ModelPart(Stateful, Protocol):
    """The weights as the part of a checkpoint called "model"."""

    model: nn.Module
    file_stem: str


@dataclass(frozen=True)
class RunPieces:
    """The parts of a run besides its options.

    Args:
        model: its ``model`` is what trains, on its device.
        optimizer: makes the optimizer; scheduler: makes the schedule of the optimizer that the engine prepared.
        rows: of a micro-batch.
        callbacks: with their control; they are told of the parts that are made here.
        checkpoints: the class of them, or what makes one of the same arguments.
        fingerprints, write_extras: of each checkpoint; see ``core.checkpoint``.
        eval_sets, evaluate, microstep, log, where: see ``core.run.Run``.
        spikes: the watch for them, a part of each checkpoint, where one is asked for.
        parts: of a checkpoint, besides those that every run has.
    """

    model: ModelPart
    objective: Objective
    engine: Engine
    stream: Stream
    optimizer: Callable[[], Any]
    scheduler: Callable[[Any], Any]
    steps: StepPlan
    rows: int
    callbacks: CallbackHandler
    folder: Path
    fingerprints: Mapping[str, Any]
    write_extras: Callable[[Path], None]
    checkpoints: Callable[..., Checkpoints] = Checkpoints
    meter: type[Meter] = Meter
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)
    evaluate: Evaluate = evaluate
    microstep: Microstep = microstep
    log: Log = log
    parts: Mapping[str, Any] = field(default_factory=dict)
    spikes: SpikeWatch | None = None
    where: Callable[[Sequence[int]], str] = nowhere
    flos_per_token: int = 0
    logs_tokens: bool = False


def assemble(options: RunChoices, pieces: RunPieces) -> Run:
    """The run that ``pieces`` make."""
    engine, callbacks, created = pieces.engine, pieces.callbacks, pieces.optimizer()
    model, optimizer = engine.prepare(pieces.objective.module(pieces.model.model), created)
    pieces.objective.setup(model)
    scheduler = pieces.scheduler(optimizer)
    state = first_state(options, pieces.steps, pieces.rows, engine)
    callbacks.state = state
    callbacks.parts |= {"model": pieces.model.model, "optimizer": optimizer, "lr_scheduler": scheduler}
    meter = pieces.meter(engine.device, options.logging_nan_inf_filter)
    watched = {} if pieces.spikes is None else {"spikes": pieces.spikes}
    others = {"stream": pieces.stream, "state": state, **pieces.parts, **watched, "meter": meter, **engine.parts}
    only_model = options.save_only_model
    parts = parts_of(pieces.model, pieces.model.file_stem, optimizer, scheduler, others, save_only_model=only_model)
    checkpoints = pieces.checkpoints(
        pieces.folder, fingerprints=pieces.fingerprints, write_extras=pieces.write_extras,
        limit=max(options.save_total_limit or 0, 0) or None, in_background=options.save_in_background,
        rank=engine.rank, world_size=engine.world_size, barrier=engine.barrier, listeners=callbacks, optimizer=created,
    )  # fmt: skip
    return Run(
        model=model, objective=pieces.objective, engine=engine, stream=pieces.stream, optimizer=optimizer,
        schedule=schedule_of(scheduler, partial(deciding_metric, options)), state=state, control=callbacks.control,
        callbacks=callbacks, meter=meter, checkpoints=checkpoints, parts=engine.sharded(parts),
        microstep=pieces.microstep, evaluate=pieces.evaluate, log=pieces.log, eval_sets=pieces.eval_sets,
        watch=unwatched if pieces.spikes is None else pieces.spikes.look, where=pieces.where,
        flos_per_token=pieces.flos_per_token, logs_tokens=pieces.logs_tokens,
    )  # fmt: skip


def first_state(options: RunChoices, steps: StepPlan, rows: int, engine: Engine) -> TrainerState:
    """Step 0 of a run of so many steps, with its intervals."""
    state = TrainerState(
        max_steps=steps.max_steps, num_train_epochs=steps.num_train_epochs, train_batch_size=rows,
        is_local_process_zero=local_rank() == 0, is_world_process_zero=engine.rank == 0,
    )  # fmt: skip
    state.compute_steps(options, steps.max_steps)
    return state


_PLANNED = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
            "is_local_process_zero", "is_world_process_zero")  # fmt: skip


@contextmanager
def keeping_plan(state: TrainerState) -> Iterator[None]:
    """Around the load of a checkpoint: what the options say of the whole run holds for the rest of it too."""
    planned = {name: getattr(state, name) for name in _PLANNED}
    yield
    state.load_state_dict(planned)
