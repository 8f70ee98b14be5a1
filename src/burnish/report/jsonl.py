"""``trainer_log.jsonl``: a row per log, with LLaMA-Factory's keys, for scripts and pages that follow a run.

    {"current_steps": 10, "total_steps": 171, "loss": 2.31, "lr": 4.9e-05, "epoch": 0.17, "percentage": 5.85,
     "elapsed_time": "0:00:12", "remaining_time": "0:03:13", "throughput": 8123.4, "total_tokens": 97481}

Evaluation rows carry ``eval_loss`` in place of ``loss`` and ``lr``. A run that goes on continues the file: rows that
lie beyond its checkpoint are cut away first, because those steps are taken again. Times and throughput count from
where this process took the run up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.core.events import TrainerCallback
from burnish.report.pace import Pace, clock_time
from burnish.report.results import write_whole

if TYPE_CHECKING:
    from burnish.core.state import TrainerState

LOG_NAME = "trainer_log.jsonl"


class JsonlCallback(TrainerCallback):
    """Writes on the main process, while a run trains.

    Args:
        folder: ``output_dir``; made if it is not there.
    """

    def __init__(self, folder: str | Path, pace: Pace | None = None) -> None:
        self.path = Path(folder) / LOG_NAME
        self.pace = pace or Pace()
        self._is_training = False

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._is_training = True
        self.pace.start(state.global_step, state.num_input_tokens_seen)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept_rows(self.path, state.global_step)))

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self._is_training or not logs:
            return
        with self.path.open("a", encoding="utf-8") as file:  # closed at once: who follows the file sees whole rows
            file.write(json.dumps(row_of(logs, state, self.pace)) + "\n")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._is_training = False


def row_of(logs: Mapping[str, Any], state: TrainerState, pace: Pace) -> dict[str, Any]:
    """One log as a row; a key without a value is left out."""
    step, total = state.global_step, state.max_steps
    values = {
        "current_steps": step,
        "total_steps": total,
        "loss": logs.get("loss"),
        **{name: value for name, value in logs.items() if name.startswith("eval_") and name.endswith("_loss")},
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


def kept_rows(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of an earlier part of the run that a continuation from ``step`` does not write again.

    A row that says no more than that the run ended, and a row that a killed process left half written, go too.
    """
    if step == 0 or not path.is_file():
        return []
    rows = _whole_rows(path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row.get("current_steps", step + 1) <= step and any("loss" in name for name in row)]


def _whole_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn: the process was killed while it wrote
        if isinstance(row, dict):
            rows.append(row)
    return rows
