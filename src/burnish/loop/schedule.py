"""Number of steps, and learning rate schedules.

The number of steps, the rows of a step and the learning rate are computed by pure functions, so ``explain`` prints the
same numbers that the loop uses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from burnish.config.conversion import as_type
from burnish.config.errors import Problem, UserError, argument_error_in_words
from burnish.config.options import option


@dataclass
class StepOptions:
    """Batch size and number of steps."""

    per_device_train_batch_size: int = option(
        8, "Number of examples per micro-batch and device in training.", unit="examples", ge=1
    )
    per_device_eval_batch_size: int = option(
        8, "Number of examples per batch and device in evaluation.", unit="examples", ge=1
    )
    gradient_accumulation_steps: int = option(1, "Number of micro-batches per optimizer step.", ge=1)
    num_train_epochs: float = option(3.0, "Number of training epochs.", unit="epochs", gt=0, lt=math.inf)
    max_steps: int = option(-1, "Total number of training steps. Overrides num_train_epochs if positive.", ge=-1)
    dataloader_drop_last: bool = option(False, "Drop the last examples of an epoch if they do not fill a batch.")


@dataclass
class LRScheduleOptions:
    """Learning rate schedule."""

    lr_scheduler_type: str = option("linear", "Learning rate schedule.", choices=lambda: schedule_names())
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None, "Arguments of the learning rate schedule, such as num_cycles or min_lr."
    )
    warmup_steps: float = option(
        0, "Number of linear warmup steps. Below 1: a fraction of all steps.", unit="steps", ge=0, lt=math.inf
    )
    warmup_ratio: float = option(
        0.0, "Fraction of all steps used for warmup. warmup_steps takes precedence.", ge=0, le=1
    )


@dataclass(frozen=True)
class StepPlan:
    """The number of rows, steps and epochs of a run.

    ``steps_per_epoch`` includes the incomplete last step of an epoch, as in transformers 5.
    """

    rows: int | None  # in the training set; None if its length is unknown
    rows_per_step: int  # over all micro-batches and ranks; a rollout trains several steps on them
    steps_per_epoch: int
    max_steps: int
    num_train_epochs: int  # rounded up
    trained_per_step: int = 0  # sequences over all micro-batches and ranks; 0: same as rows_per_step
    steps_per_rate: int = 1  # steps with one learning rate: those of a rollout, where max_steps counts rollouts

    @property
    def effective_batch_size(self) -> int:
        """Number of sequences per training step, over all micro-batches and ranks."""
        return self.trained_per_step or self.rows_per_step

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning rate schedule."""
        return -(-self.max_steps // self.steps_per_rate)

    @property
    def epochs(self) -> float | None:
        """``max_steps`` in epochs, as a fraction. None if the length of the training set is unknown."""
        return None if self.rows is None or not self.steps_per_epoch else self.max_steps / self.steps_per_epoch


NO_STEPS = StepPlan(0, 0, 0, 0, 0)
"""The plan of a run that only evaluates or predicts."""


def steps_of(interval: float | None, max_steps: int, fallback: float) -> int:
    """Convert an interval to a number of steps. Below 1: a fraction of ``max_steps``, rounded up."""
    value = fallback if interval is None else interval
    return math.ceil(max_steps * value) if value < 1 else int(value)


def plan_steps(
    options: StepOptions, rows: int | None, world_size: int = 1, inner_steps: int = 1, rows_per_rank: int | None = None,
    counts_rollouts: bool = False,
) -> StepPlan:  # fmt: skip
    """Compute the number of steps.

    Args:
        options: batch sizes, epochs and ``max_steps``.
        rows: length of the training set; None if unknown.
        world_size: number of ranks.
        inner_steps: optimizer steps per step batch (``Objective.inner_steps``).
        rows_per_rank: rows per rank and step batch, if they differ from those of the micro-batches.
        counts_rollouts: whether ``max_steps`` and the schedule count rollouts of ``inner_steps`` steps.

    Raises:
        UserError: if the run would have no steps, or if the length is unknown and ``max_steps`` is not set.
    """
    trained = options.per_device_train_batch_size * options.gradient_accumulation_steps * world_size
    per_batch = (rows_per_rank or options.per_device_train_batch_size) * world_size
    rows_per_step = per_batch if rows_per_rank else trained
    steps_per_rate = inner_steps if counts_rollouts else 1
    asked_steps = options.max_steps * steps_per_rate
    if rows is None:
        if options.max_steps <= 0:
            raise UserError(
                "The training set has no length, so max_steps must be a positive number. Received: -1.",
                option="max_steps",
            )
        return StepPlan(None, rows_per_step, asked_steps, asked_steps, sys.maxsize, trained, steps_per_rate)
    used = rows - rows % per_batch if options.dataloader_drop_last else rows
    steps_per_epoch = math.ceil(used / rows_per_step) * inner_steps
    if steps_per_epoch == 0:
        raise UserError(
            f"The training set has {rows} examples, fewer than one batch of {per_batch}, and "
            "dataloader_drop_last is set: no training step would run.",
            remedy="Lower per_device_train_batch_size, or set dataloader_drop_last: false.",
            option="dataloader_drop_last",
        )
    max_steps, epochs = math.ceil(options.num_train_epochs * steps_per_epoch), math.ceil(options.num_train_epochs)
    if options.max_steps > 0:
        max_steps, epochs = asked_steps, math.ceil(asked_steps / steps_per_epoch)
    return StepPlan(rows, rows_per_step, steps_per_epoch, max_steps, epochs, trained, steps_per_rate)


def warmup_steps_of(options: LRScheduleOptions, max_steps: int) -> int:
    """Number of warmup steps: from 1 on a count, below 1 a fraction of ``max_steps``, rounded up."""
    if options.warmup_steps >= 1:
        return int(options.warmup_steps)
    return math.ceil(max_steps * (options.warmup_steps or options.warmup_ratio))


def _never_reaches_peak(options: LRScheduleOptions, max_steps: int) -> bool:
    return warmup_steps_of(options, max_steps) >= max_steps > 0 and options.lr_scheduler_type != "constant"


def check_schedule(options: LRScheduleOptions, max_steps: int) -> Iterator[Problem]:
    """Yield a problem if the warmup is longer than the run."""
    if options.warmup_steps < 1 or not _never_reaches_peak(options, max_steps):
        return
    what = (
        f"the learning rate would never reach its peak: {options.warmup_steps:g} warmup steps (warmup_steps) in a "
        f"run of {max_steps} steps."
    )
    yield Problem(
        what, remedy=f"Set warmup_steps below {max_steps}, or train longer.", option=("warmup_steps", "max_steps")
    )


def schedule_notes(options: LRScheduleOptions, max_steps: int) -> list[str]:
    """Return notes about a schedule that does not fit the run: a fractional warmup covers all steps after rounding up,
    as in a test run of one step, or the phases of ``warmup_stable_decay`` are longer than the run."""
    if options.lr_scheduler_type == "warmup_stable_decay" and (found := _phase_notes(options, max_steps)):
        return found
    if options.warmup_steps >= 1 or not _never_reaches_peak(options, max_steps):
        return []
    name = "warmup_steps" if options.warmup_steps else "warmup_ratio"
    return [
        f"The learning rate never reaches its peak: {name} {options.warmup_steps or options.warmup_ratio:g}, "
        f"rounded up, covers the whole run ({max_steps} step{'s' * (max_steps != 1)})."
    ]


def _phase_notes(options: LRScheduleOptions, max_steps: int) -> list[str]:
    known = options.lr_scheduler_kwargs or {}
    phases = {"warmup_steps": warmup_steps_of(options, max_steps)}
    phases |= {name: int(known[name]) for name in ("num_stable_steps", "num_decay_steps") if known.get(name)}
    if sum(phases.values()) <= max_steps:
        return []
    shown = ", ".join(f"{name} {number}" for name, number in phases.items() if number)
    return [
        f"The phases of lr_scheduler_type warmup_stable_decay ({shown}) are longer than the run of {max_steps} steps, "
        "so the decay is not completed."
    ]


# --- curves -----------------------------------------------------------------------------------------------------------
# Each is (step, warmup, total, **arguments) -> the factor of the learning rate at that step. Names, arguments and
# values are those of transformers.optimization; tests compare them.


def _after_warmup(curve: Callable[..., float]) -> Callable[..., float]:
    """Linear from 0 to 1 over ``warmup`` steps, then ``curve`` of the completed fraction of the remaining steps."""

    def factor(step: int, warmup: int, total: int, **arguments: Any) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return curve((step - warmup) / max(1, total - warmup), **arguments)

    return factor


def _cosine(passed: float, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * passed)))


def _cosine_with_restarts(passed: float, num_cycles: int = 1) -> float:
    if passed >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * passed) % 1.0))))


def _cosine_with_min_lr(passed: float, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> float:
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * passed))
    return max(0.0, factor * (1 - min_lr_rate) + min_lr_rate)


def _polynomial(step: int, warmup: int, total: int, lr_init: float, lr_end: float = 1e-7, power: float = 1.0) -> float:
    if step < warmup:
        return step / max(1, warmup)
    if step > total:
        return lr_end / lr_init
    remaining: float = (1 - (step - warmup) / max(1, total - warmup)) ** power
    return ((lr_init - lr_end) * remaining + lr_end) / lr_init


def _inverse_sqrt(step: int, warmup: int, total: int, timescale: int | None = None) -> float:
    timescale = timescale or warmup or 10_000
    if step < warmup:
        return step / max(1, warmup)
    return 1.0 / math.sqrt((step + timescale - warmup) / timescale)


def _cosine_warmup_with_min_lr(
    step: int, warmup: int, total: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0,
    warmup_lr_rate: float | None = None,
) -> float:  # fmt: skip
    if step < warmup:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, warmup)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup - 1)
    passed = (step - warmup + 1.0) / max(1, total - warmup)
    return _cosine_with_min_lr(passed, num_cycles, min_lr_rate)


def _warmup_stable_decay(
    step: int, warmup: int, total: int, num_decay_steps: int = 0, num_stable_steps: int | None = None,
    warmup_type: str = "linear", decay_type: str = "cosine", min_lr_ratio: float = 0.0, num_cycles: float = 0.5,
) -> float:  # fmt: skip
    stable = num_stable_steps if num_stable_steps is not None else total - warmup - num_decay_steps
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda p: p,
        "cosine": lambda p: 0.5 * (1.0 - math.cos(math.pi * p)),
        "1-sqrt": lambda p: 1.0 - math.sqrt(1.0 - p),
    }
    if step < warmup:
        return max(0.0, shapes[warmup_type](step / max(1, warmup)) * (1.0 - min_lr_ratio) + min_lr_ratio)
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + num_decay_steps:
        passed = (step - warmup - stable) / max(1, num_decay_steps)
        falls: dict[str, Callable[[float], float]] = {
            "linear": lambda p: 1.0 - p,
            "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * p)),
            "1-sqrt": lambda p: 1.0 - math.sqrt(p),
        }
        return max(0.0, falls[decay_type](passed) * (1.0 - min_lr_ratio) + min_lr_ratio)
    return min_lr_ratio


_FACTORS: dict[str, Callable[..., float]] = {
    "linear": _after_warmup(lambda passed: max(0.0, 1.0 - passed)),
    "cosine": _after_warmup(_cosine),
    "cosine_with_restarts": _after_warmup(_cosine_with_restarts),
    "polynomial": _polynomial,
    "constant": lambda step, warmup, total: 1.0,
    "constant_with_warmup": lambda step, warmup, total: step / max(1.0, warmup) if step < warmup else 1.0,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _after_warmup(_cosine_with_min_lr),
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
FOLLOWS_METRIC = ("reduce_lr_on_plateau", "greedy")
_FOLLOWS_METRIC = {"ReduceLROnPlateau", "GreedyLR"}  # class names in torch and transformers


def follows_metric(scheduler: Any) -> bool:
    """Return whether a scheduler of torch, transformers or a script is advanced by evaluations instead of steps."""
    return any(kind.__name__ in _FOLLOWS_METRIC for kind in type(scheduler).__mro__)


def schedule_names() -> list[str]:
    return [*_FACTORS, *FOLLOWS_METRIC]


def lr_factor(options: LRScheduleOptions, max_steps: int, learning_rate: float) -> Callable[[int], float]:
    """step -> factor of the learning rate, for a ``LambdaLR`` and for ``explain``.

    Args:
        options: name and arguments of the schedule.
        max_steps: number of steps of the run.
        learning_rate: peak learning rate, needed for an absolute ``min_lr`` or ``lr_end``.

    Raises:
        UserError: if ``lr_scheduler_kwargs`` has an argument or value that the schedule does not accept.
    """
    warmup, curve = warmup_steps_of(options, max_steps), _FACTORS[options.lr_scheduler_type]
    with report_schedule_errors(options):
        arguments = _curve_arguments(options, max_steps, warmup, learning_rate)
        for step in (0, warmup, (warmup + max_steps) // 2, max_steps):
            curve(step, warmup, max_steps, **arguments)
    return lambda step: curve(step, warmup, max_steps, **arguments)


def _curve_arguments(options: LRScheduleOptions, max_steps: int, warmup: int, learning_rate: float) -> dict[str, Any]:
    """``lr_scheduler_kwargs`` with rates converted to fractions of the peak."""
    name = options.lr_scheduler_type
    arguments = {key: _checked_argument(key, raw) for key, raw in (options.lr_scheduler_kwargs or {}).items()}
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        arguments = {key: value for key, value in arguments.items() if value is not None}
        if len({"min_lr", "min_lr_rate"} & arguments.keys()) != 1:
            raise ValueError("exactly one of min_lr and min_lr_rate is required")
    if name == "polynomial":
        arguments["lr_init"] = learning_rate
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        # Default of LLaMA-Factory: a third of the steps after the warmup is stable, the rest decays.
        stable = arguments.setdefault("num_stable_steps", (max_steps - warmup) // 3)
        arguments["num_decay_steps"] = max_steps - warmup - stable
    for lowest in ("min_lr", "lr_end"):
        if arguments.get(lowest, 0) > learning_rate:
            raise ValueError(f"{lowest} {arguments[lowest]:g} is above learning_rate {learning_rate:g}")
    if "min_lr" in arguments:
        arguments["min_lr_rate"] = arguments.pop("min_lr") / learning_rate
    return arguments


_FRACTION, _NOT_NEGATIVE = (0.0, 1.0), (0.0, math.inf)
_ARGUMENTS: dict[str, tuple[Any, tuple[float, float]]] = {
    "num_cycles": (float, _NOT_NEGATIVE), "power": (float, _NOT_NEGATIVE), "lr_end": (float, _NOT_NEGATIVE),
    "min_lr": (float | None, _NOT_NEGATIVE), "min_lr_rate": (float | None, _FRACTION),
    "min_lr_ratio": (float, _FRACTION), "warmup_lr_rate": (float | None, _FRACTION),
    "num_decay_steps": (int, _NOT_NEGATIVE), "num_stable_steps": (int | None, _NOT_NEGATIVE),
    "timescale": (int | None, _NOT_NEGATIVE),
}  # fmt: skip
"""Numbers among the arguments of the curves: type, smallest and largest value."""


def _checked_argument(name: str, raw: Any) -> Any:
    """Convert a number that may be text, as YAML reads ``1e-5``. Raises ValueError for a value out of bounds."""
    if name not in _ARGUMENTS:
        return raw
    kind, (lowest, highest) = _ARGUMENTS[name]
    try:
        value = as_type(kind, raw)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if value is not None and not lowest <= value <= highest:
        bounds = "at least 0" if math.isinf(highest) else f"between {lowest:g} and {highest:g}"
        raise ValueError(f"{name} must be {bounds}. Received: {raw!r}")
    return value


@contextmanager
def report_schedule_errors(options: LRScheduleOptions) -> Iterator[None]:
    """Convert errors that a schedule raises for its arguments to UserError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        name = options.lr_scheduler_type
        what = f'invalid lr_scheduler_kwargs for lr_scheduler_type "{name}": {argument_error_in_words(error)}'
        raise UserError(f"{what.rstrip('.')}.", option=("lr_scheduler_kwargs", "lr_scheduler_type")) from error
