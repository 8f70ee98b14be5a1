"""Progress of a run in the terminal: first lines, live line, last lines.

A terminal shows a live line: bar, step, loss, learning rate, tokens per second, remaining time, last evaluation loss,
and, if the objective logs them, rewards, accuracy, margin, KL and response length. The same numbers are printed as
plain lines above it, or alone if the output is not a terminal (file, CI log). Of more than 2 x ``TRAIN_LINES`` logs,
at most ``TRAIN_LINES`` are printed, so that a log stays readable. With ``disable_tqdm``, every log is printed.

Nothing here accesses the device: all numbers were logged already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.config.errors import skipped_steps_message
from burnish.loop.events import TrainerCallback
from burnish.loop.schedule import StepPlan
from burnish.loop.state import RATES
from burnish.report import console
from burnish.report.console import GAP, bar
from burnish.report.options import ReportOptions
from burnish.report.pace import ROUNDING, Pace, format_count, short_loss, short_number, short_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from burnish.loop.state import TrainerControl, TrainerState

TRAIN_LINES = 16
EVAL_LINES = 8
"""Maximum numbers of lines about training and about evaluation of a long run."""

_EVAL = "eval "
_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "accuracy", "margin",
            "reward", "reward_std", "kl", "completions/mean_length")  # fmt: skip
"""Metrics shown in a line about training; the names are TRL's."""


@dataclass(frozen=True)
class RunFacts:
    """Facts for the first lines of a run.

    Args:
        steps: step plan of the run, which ``burnish explain`` also prints.
        per_device_batch_size: rows per micro-batch.
        accumulation: micro-batches per step.
        world_size: number of processes.
        trainable_parameters: number of trained parameters.
        all_parameters: number of all parameters.
        unit: what a row is: "example", or "pack" of several.
        num_events: number of logs, and of evaluations, of the run.
    """

    steps: StepPlan
    per_device_batch_size: int
    accumulation: int
    world_size: int
    trainable_parameters: int
    all_parameters: int
    unit: str = "example"
    num_events: tuple[float, float] = (math.inf, math.inf)

    def messages(self) -> list[str]:
        """Return the numbers of transformers' "Running training" banner, in three lines."""
        processes = format_count(self.world_size, "process", "processes")
        share = 100 * self.trainable_parameters / max(self.all_parameters, 1)
        return [
            f"Training for {format_count(self.steps.max_steps, 'step')}{self._share_of_data()}",
            f"  Effective batch size {self.steps.effective_batch_size} = {self.per_device_batch_size} per device"
            f" x {self.accumulation} gradient accumulation x {processes}",
            f"  {self.trainable_parameters:,} of {self.all_parameters:,} parameters are trained ({share:.3g}%)",
        ]

    def _share_of_data(self) -> str:
        if self.steps.rows is None or self.steps.epochs is None:
            return " on a streamed dataset"
        return f": {counted_epochs(self.steps.epochs)} of {format_count(self.steps.rows, self.unit)}"


def counted_epochs(epochs: float) -> str:
    """``1 epoch``, ``16 epochs``, ``2.35 epochs``, ``0.002 epochs``."""
    return format_count(round(epochs, 2) or float(f"{epochs:.1g}"), "epoch")


def progress_callback(options: ReportOptions, facts: RunFacts | None = None) -> TrainerCallback:
    """Return the callback that prints progress: a live line or plain lines, or every log with ``disable_tqdm``."""
    return PrinterCallback(facts) if options.disable_tqdm else ProgressCallback(facts)


class ProgressCallback(TrainerCallback):
    """Shows a live line in a terminal, and a limited number of plain lines; on the main process only."""

    def __init__(self, facts: RunFacts | None = None, pace: Pace | None = None) -> None:
        self.facts = facts
        self.pace = pace or Pace()
        self.seen = LatestMetrics()
        self._is_training = False
        self._first_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.pace.start(state.global_step, state.num_input_tokens_seen)
        self.seen = LatestMetrics(state.global_step, state.max_steps)
        self._first_step = state.global_step
        num_logs, num_evaluations = self.facts.num_events if self.facts is not None else (math.inf, math.inf)
        self._train_lines, self._eval_lines = (
            EvenlySpacedEvents(TRAIN_LINES, num_logs),
            EvenlySpacedEvents(EVAL_LINES, num_evaluations),
        )
        self._is_training = True
        _print_facts(self.facts, state)
        if console.is_terminal():
            console.begin_live(_LiveLine(self.seen, self.pace))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.step, self.seen.max_steps = state.global_step, state.max_steps
        self.pace.end_step()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.pace.leave_out()

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.eval_batches += 1

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "skipped_steps" in logs:
            console.warn(skipped_steps_message(logs["skipped_steps"], state.global_step))
        if "train_runtime" in logs:
            self.seen.summary = dict(logs)
        elif "loss" in logs:
            self._on_train_log(state, logs)

    def _on_train_log(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        seen = self.seen
        seen.step = state.global_step
        seen.loss, seen.learning_rate = logs["loss"], logs.get("learning_rate", seen.learning_rate)
        seen.tokens_per_second = self.pace.interval_rate(state.num_input_tokens_seen)
        seen.metrics = {name: logs[name] for name in _METRICS if logs.get(name) is not None}
        self.pace.begin_interval(state.num_input_tokens_seen)
        if self._train_lines.is_due(seen.step, seen.max_steps):  # in a terminal, above the live line
            console.note(seen.plain_line(self.pace))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.seen.eval_batches = 0
        self.pace.leave_out()
        if not state.is_world_process_zero or not metrics:
            return
        losses = [value for name, value in metrics.items() if name.startswith("eval_") and name.endswith("_loss")]
        if losses:
            self.seen.eval_loss = losses[0]
        if not self._is_training or self._eval_lines.is_due(state.global_step, state.max_steps):
            console.note(_eval_line(state, metrics))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._is_training:
            return
        self._is_training = False
        console.end_live()
        for line in _summary_lines(self.seen, state, self.pace, self._first_step):
            console.note(line)


class PrinterCallback(TrainerCallback):
    """Prints every log as a line, on the main process only."""

    def __init__(self, facts: RunFacts | None = None) -> None:
        self.facts = facts

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            _print_facts(self.facts, state)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        entries = (f"{k} {self._format(k, v)}" for k, v in logs.items() if k != "total_flos")
        console.note(f"step {state.global_step}/{state.max_steps}{GAP}{GAP.join(entries)}")

    @staticmethod
    def _format(name: str, value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return f"{value if name == 'learning_rate' else _round_number(value):.4g}"


def _round_number(value: float) -> float:
    """Return a logged number without a rounding error of 0."""
    return 0.0 if abs(value) < ROUNDING else value


class LatestMetrics:
    """The most recent logged numbers. The live line is drawn from them in a separate thread."""

    def __init__(self, step: int = 0, max_steps: int = 0) -> None:
        self.step, self.max_steps = step, max_steps
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.tokens_per_second: float | None = None
        self.eval_loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.eval_batches = 0  # of the current evaluation
        self.summary: dict[str, float] = {}

    @property
    def share(self) -> float:
        """Fraction of the run that is done, in [0, 1]."""
        return min(1.0, self.step / self.max_steps) if self.max_steps > 0 else 0.0

    def words(self, pace: Pace) -> Iterator[tuple[str, str, str]]:
        """Yield name, number and unit of each known value, most important first."""
        yield "", f"{self.step:>{len(str(self.max_steps))}}/{self.max_steps}", ""
        if self.loss is not None:
            yield "loss ", short_loss(self.loss), ""
        if self.eval_batches:
            yield "evaluating ", f"batch {self.eval_batches}", ""
        elif (left_s := pace.remaining_s(self.step, self.max_steps)) is not None and self.step < self.max_steps:
            yield "", short_time(left_s), " left"
        if self.learning_rate is not None:
            yield "lr ", f"{self.learning_rate:.1e}", ""
        if self.tokens_per_second:
            yield "", short_number(self.tokens_per_second), " tok/s"
        if self.eval_loss is not None:
            yield _EVAL, short_loss(self.eval_loss), ""
        for name, value in self.metrics.items():
            yield f"{name} ", f"{_round_number(value):.4g}", ""

    def plain_line(self, pace: Pace) -> str:
        """Return ``step  50/1200  loss 1.2345  1:23 left  lr 2.0e-04  12.3k tok/s``, without the evaluation loss."""
        entries = (name + number + unit for name, number, unit in self.words(pace) if name != _EVAL)
        return f"step {GAP.join(entries)}"


class EvenlySpacedEvents:
    """Selects at most ``most`` events of a run, evenly spaced, including the first and the last.

    If there are up to twice as many, all are selected, so that a log of regular steps has no gaps.
    """

    def __init__(self, most: int, num_events: float = math.inf) -> None:
        self.most, self._selects_all = most, num_events <= 2 * most
        self._passed = -1

    def is_due(self, step: int, max_steps: int) -> bool:
        if self._selects_all:
            return True
        mark = step * (self.most - 1) // max(max_steps, 1)
        if mark <= self._passed:
            return False
        self._passed = mark
        return True


class _LiveLine:
    """A line that fits the terminal: as many values as there is room for, and a bar in the remaining space."""

    def __init__(self, seen: LatestMetrics, pace: Pace) -> None:
        self.seen = seen
        self.pace = pace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield self.line(options.max_width, options.ascii_only)

    def line(self, width: int, ascii_only: bool = False) -> Text:
        from rich.text import Text

        parts: list[Text] = []
        left = width
        for name, number, unit in self.seen.words(self.pace):
            part = Text.assemble((name, "dim"), (number, "bold" if not parts else ""), (unit, "dim"))
            needed = part.cell_len + (len(GAP) if parts else 0)
            if needed > left:
                break
            parts.append(part)
            left -= needed
        drawn = bar(left - len(GAP), self.seen.share, ascii_only)
        return Text(GAP, no_wrap=True, overflow="crop", end="").join([*drawn, *parts])


def _print_facts(facts: RunFacts | None, state: TrainerState) -> None:
    for line in facts.messages() if facts else [f"Training for {format_count(state.max_steps, 'step')}"]:
        console.note(line)
    if state.global_step:
        console.note(f"  resumed from step {state.global_step:,}")


_COMPLETION_METRICS = ("_reward", "_reward_std", "_entropy", "/mean_length", "/clipped_ratio")


def _eval_line(state: TrainerState, metrics: Mapping[str, Any]) -> str:
    """Return the losses and metrics of an evaluation, without its duration."""
    shown = {n: v for n, v in metrics.items() if isinstance(v, int | float) and not n.endswith(RATES) and n != "epoch"}
    if any(name.endswith("/mean_length") for name in shown):  # metrics of completions: the log has many more
        shown = {name: value for name, value in shown.items() if name.endswith(_COMPLETION_METRICS) or "_pass@" in name}
    entries = (f"{name} {short_loss(value)}" for name, value in shown.items())
    where = [f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"] if state.max_steps else []
    return GAP.join([*where, *entries])


def _summary_lines(seen: LatestMetrics, state: TrainerState, pace: Pace, first_step: int) -> Iterator[str]:
    """Yield one or two lines that summarize the run.

    Args:
        seen: the most recent logged numbers.
        state: state of the trainer.
        pace: times of this process.
        first_step: step at which this process started; above 0 in a resumed run.
    """
    summary, tokens_per_second = seen.summary, pace.tokens_per_second(state.num_input_tokens_seen)
    end = f"Trained {format_count(state.global_step - first_step, 'step')}"
    resumed = f" since step {first_step:,}" if first_step else ""
    if state.global_step < state.max_steps:
        end = f"Stopped after step {state.global_step:,} of {state.max_steps:,}"
        resumed = f", {format_count(state.global_step - first_step, 'step')}{resumed}" if first_step else ""
    parts = [f"{end}{resumed} in {short_time(summary.get('train_runtime', pace.elapsed_s))}"]
    if "train_loss" in summary:
        parts.append(f"mean loss {short_loss(summary['train_loss'])}")
    if seen.loss is not None:
        parts.append(f"last {short_loss(seen.loss)}")
    if tokens_per_second > 0:
        parts.append(f"{short_number(tokens_per_second)} tokens/s")
    yield ", ".join(parts)
    if state.best_metric is not None and state.best_global_step is not None:
        yield f"Best evaluation: {short_loss(state.best_metric)} at step {state.best_global_step:,}"
