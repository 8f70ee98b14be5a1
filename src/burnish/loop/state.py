"""TrainerState and TrainerControl: the position of a run, and the actions that callbacks request.

Field names, JSON format and semantics are those of transformers, so callbacks of both libraries work with both
(https://huggingface.co/docs/transformers/main_classes/callback).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from burnish.loop.schedule import StepPlan, steps_of
from burnish.utils.json_files import read_object, write_json

STATE_NAME = "trainer_state.json"
RATES = ("runtime", "samples_per_second", "steps_per_second")
"""Names of the timings of an evaluation, without its prefix."""
_REQUIRED_FIELDS = (("global_step", int), ("max_steps", int), ("log_history", list))


class IntervalChoices(Protocol):
    """Options that are intervals in steps. Below 1: a fraction of all steps."""

    logging_steps: float
    eval_strategy: str
    eval_steps: float | None
    save_steps: float


@dataclass
class TrainerState:
    """The position of a run and its logs. Written as ``trainer_state.json`` with sorted keys."""

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] | Any = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []

    def compute_steps(self, args: IntervalChoices, max_steps: int) -> None:
        """Convert the intervals of ``args`` to steps. An interval below 1 is a fraction of ``max_steps``."""
        self.logging_steps = steps_of(args.logging_steps, max_steps, self.logging_steps)
        usual = self.logging_steps if args.eval_strategy == "steps" else self.eval_steps
        self.eval_steps = steps_of(args.eval_steps, max_steps, usual)
        self.save_steps = steps_of(args.save_steps, max_steps, self.save_steps)

    @classmethod
    def at_start(
        cls, options: IntervalChoices, steps: StepPlan, batch_size: int, rank: int = 0, local_rank: int = 0
    ) -> TrainerState:
        """The state at step 0 of a run. ``batch_size`` is the number of rows per micro-batch."""
        state = cls(
            max_steps=steps.max_steps, num_train_epochs=steps.num_train_epochs, train_batch_size=batch_size,
            is_local_process_zero=local_rank == 0, is_world_process_zero=rank == 0,
        )  # fmt: skip
        state.compute_steps(options, steps.max_steps)
        return state

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the fields of this version. Unknown fields are ignored."""
        names = {f.name for f in dataclasses.fields(self)}
        for name, value in state.items():
            if name in names:
                setattr(self, name, value)

    def save_to_json(self, json_path: str) -> None:
        write_json(Path(json_path), self.state_dict(), sort_keys=True)

    @classmethod
    def load_from_json(cls, json_path: str) -> TrainerState:
        state = cls()
        state.load_state_dict(read_object(Path(json_path), needs=_REQUIRED_FIELDS))
        return state


_PLAN_FIELDS = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
            "is_local_process_zero", "is_world_process_zero")  # fmt: skip


@contextmanager
def preserve_plan(state: TrainerState) -> Iterator[None]:
    """Restore the planned number of steps and intervals after the block, in which a checkpoint is loaded."""
    planned = {name: getattr(state, name) for name in _PLAN_FIELDS}
    yield
    state.load_state_dict(planned)


@dataclass
class TrainerControl:
    """Flags that callbacks set and the loop handles."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        return {"args": dataclasses.asdict(self), "attributes": {}}


def load_state(folder: Path) -> TrainerState:
    """Read the trainer state of the checkpoint ``folder``."""
    return TrainerState.load_from_json(str(folder / STATE_NAME))
