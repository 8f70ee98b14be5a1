"""``trainer_log.jsonl``: one row per log, with LLaMA-Factory's keys, for scripts and web UIs that follow a run.

    {"current_steps": 10, "total_steps": 171, "loss": 2.31, "lr": 4.9e-05, "epoch": 0.17, "percentage": 5.85,
     "elapsed_time": "0:00:12", "remaining_time": "0:03:13", "throughput": 8123.4, "total_tokens": 97481,
     "grad_norm": 1.02, "step_seconds": 0.61, "tokens_per_second": 8210.9, "memory_bytes": 2147483648,
     "time": 1790000000.2}

The last five keys are burnish's: gradient norm, mean step time and tokens per second since the previous row of
training without evaluations and saves, current memory of the process (on a GPU, peak memory), and Unix time.
``throughput`` is the mean since the start of the process, with evaluations and saves. Other logged numbers keep their
names, which are TRL's: ``rewards/chosen``, ``rewards/margins``, ``logps/rejected``, ``kl``,
``completions/mean_length``. ``accuracy`` is LLaMA-Factory's name for ``rewards/accuracies``.

Evaluation rows have ``eval_loss`` instead of ``loss`` and ``lr``. A resumed run appends to the file, after removing
rows later than its checkpoint, because those steps are repeated. Times and throughput are measured from the step at
which this process started or resumed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.loop.events import TrainerCallback
from burnish.loop.state import RATES
from burnish.report.pace import Pace, clock_time
from burnish.report.results import write_text_atomically

if TYPE_CHECKING:
    from burnish.loop.state import TrainerControl, TrainerState

LOG_NAME = "trainer_log.jsonl"


class JsonlCallback(TrainerCallback):
    """Writes the log file while a run trains, on the main process.

    Args:
        folder: ``output_dir``, created if it does not exist.
        pace: measures elapsed time and speed.
    """

    def __init__(self, folder: str | Path, pace: Pace | None = None) -> None:
        self.path = Path(folder) / LOG_NAME
        self.pace = pace or Pace()
        self._is_training = False
        self._row_step = 0  # of the previous row of training
        self._waiting: list[str] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._is_training = True
        self.pace.start(state.global_step, state.num_input_tokens_seen)
        self._row_step = state.global_step
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(
            self.path, "".join(json.dumps(row) + "\n" for row in kept_rows(self.path, state.global_step))
        )

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not self._is_training or not logs:
            return
        row = {**row_of(logs, state, self.pace), **self._beside(logs, state)}
        self._waiting.append(json.dumps(row) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:  # closed at once, so that readers see complete rows
                file.writelines(self._waiting)
        except OSError:  # a full disk must not stop the run; these rows are written with the next one
            return
        self._waiting.clear()

    def _beside(self, logs: Mapping[str, Any], state: TrainerState) -> dict[str, Any]:
        """Return values that LLaMA-Factory's rows do not have, for a row of training steps."""
        found: dict[str, Any] = {"time": round(time.time(), 3)}
        if "loss" not in logs:
            return found
        step, tokens = state.global_step, state.num_input_tokens_seen
        if step > self._row_step:
            found["step_seconds"] = round(self.pace.interval_s / (step - self._row_step), 4)
            if tokens:
                found["tokens_per_second"] = round(self.pace.interval_rate(tokens), 2)
        self._row_step = step
        self.pace.begin_interval(tokens)
        found["memory_bytes"] = memory_bytes()
        return found | {name: logs[name] for name in ("grad_norm", "waiting") if logs.get(name) is not None}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.pace.end_step()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.pace.leave_out()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.pace.leave_out()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = False


def memory_bytes() -> int:
    """Return the memory of this process: the peak on its GPU, otherwise current memory. Does not synchronize."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)
    return pages * os.sysconf("SC_PAGE_SIZE")


def row_of(logs: Mapping[str, Any], state: TrainerState, pace: Pace) -> dict[str, Any]:
    """Convert a log to a row. Keys without a value are omitted."""
    step, total = state.global_step, state.max_steps
    values = {
        "current_steps": step,
        "total_steps": total,
        "loss": logs.get("loss"),
        **{name: value for name, value in logs.items() if is_measure(name)},
        "accuracy": logs.get("accuracy", logs.get("rewards/accuracies")),
        "lr": logs.get("learning_rate"),
        "epoch": logs.get("epoch", state.epoch),
        "percentage": round(100 * step / total, 2) if total else 100.0,
        "elapsed_time": clock_time(pace.elapsed_s),
        "remaining_time": clock_time(pace.remaining_s(step, total) or 0),
    }
    if state.num_input_tokens_seen:
        values["throughput"] = round(pace.tokens_per_second(state.num_input_tokens_seen), 2)
        values["total_tokens"] = state.num_input_tokens_seen
    return {name: value for name, value in values.items() if value is not None}


_NON_METRICS = {"loss", "learning_rate", "epoch", "total_flos", "num_input_tokens_seen", "grad_norm", "waiting",
                "skipped_steps"}  # fmt: skip


def is_measure(name: str) -> bool:
    """Return whether a logged number measures the model, rather than progress or speed."""
    return name not in _NON_METRICS and not name.startswith("train_") and not name.endswith(RATES)


def kept_rows(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of an earlier part of the run that a run resumed at ``step`` will not write again.

    The final row, which only marks the end of a run, and incomplete rows of a killed process are dropped.
    """
    if step == 0 or not path.is_file():
        return []
    rows = filter(None, map(parse_row, path.read_text(encoding="utf-8", errors="replace").splitlines()))
    return [row for row in rows if row.get("current_steps", step + 1) <= step and any("loss" in name for name in row)]


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """Return the object on a line, or None if the line is incomplete or not an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
