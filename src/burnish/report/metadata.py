"""Metadata files of a run in ``output_dir``, for web UIs, scripts and other machines that observe it.

    launch.json    the process that runs it: command, process id and start, host
    run.yaml       the options that were set, and where; it can be run again
    events.jsonl   events: stages, checkpoints, best evaluations, skipped steps, stops
    progress.json  how far a prediction or an evaluation without training is
    outcome.json   how the run ended; a killed process leaves none

The run itself does not read these files, and writing them does not access the device.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from burnish.config.errors import Problem, UserError, causes, skipped_steps_message
from burnish.config.secrets import has_secret_name, mask_json, without_secrets
from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.results import write_text_atomically
from burnish.utils.files import open_for_appending, open_regular_file

LAUNCH, RUN_YAML, EVENTS, OUTCOME = "launch.json", "run.yaml", "events.jsonl", "outcome.json"
PROGRESS = "progress.json"
REQUESTED_YAML = ".requested.yaml"
"""Options of a requested resume. ``run.yaml`` keeps the options of the run until the request is accepted."""
METADATA_NAMES = (LAUNCH, RUN_YAML, REQUESTED_YAML, EVENTS, OUTCOME, PROGRESS, "console.log")
_MIN_WRITE_INTERVAL_S = 1.0
"""Minimum seconds between two events of a kind. Others are dropped, except those in ``_UNTHROTTLED_EVENTS``."""
_UNTHROTTLED_EVENTS = frozenset({"stage", "checkpoint", "stopping", "resumed", "skipped"})
_ENDED = ("Z", "X")
"""States of a process that has ended."""


class RunMetadata(TrainerCallback):
    """Writes the metadata files of a run, on its main process. As a context manager, it writes the outcome at the end.

    Args:
        folder: ``output_dir``.
        described: returns the description of an exception for the user.
    """

    def __init__(self, folder: str | Path, described: Callable[[BaseException], Problem]) -> None:
        self.folder, self._described = Path(folder), described
        self._written_s: dict[str, float] = {}
        self._step = 0
        self._is_training = False
        self._progress_begin: tuple[float, int] | None = None
        self._best: float | None = None
        self._ending: dict[str, Any] | None = None

    def begin(self, run_yaml: str, devices: Iterable[str], rows: Mapping[str, int] = MappingProxyType({})) -> None:
        """Write the first files, before the model is loaded.

        Args:
            run_yaml: content of ``run.yaml``, without secrets.
            devices: devices that the run uses.
            rows: numbers of rows "seen" and "dropped".
        """
        for name in (OUTCOME, PROGRESS):
            (self.folder / name).unlink(missing_ok=True)
        self._write(RUN_YAML, run_yaml)
        launch = {**launch_record(devices), "rows": dict(rows)}
        self._write(LAUNCH, json.dumps(mask_json(launch), indent=1) + "\n")
        self.event("stage", "loading")

    def event(self, kind: str, text: str, **more: Any) -> None:
        now_s = time.time()
        if kind not in _UNTHROTTLED_EVENTS and now_s - self._written_s.get(kind, 0.0) < _MIN_WRITE_INTERVAL_S:
            return
        self._written_s[kind] = now_s
        row = {"time": round(now_s, 3), "step": self._step, "kind": kind, "text": text, **more}
        with suppress(OSError), open_for_appending(self.folder / EVENTS) as file:
            file.write(json.dumps(mask_json(row), ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

    def progress(self, done: int, total: int) -> None:
        """Record the number of complete prompts or batches, at most once per second; always if all are complete."""
        now_s = time.time()
        if self._progress_begin is None:
            self.event("stage", "evaluating")
        if self._progress_begin is None or done < self._progress_begin[1]:  # or another set of examples has begun
            self._progress_begin = now_s, done
        if done < total and now_s - self._written_s.get(PROGRESS, 0.0) < _MIN_WRITE_INTERVAL_S:
            return
        self._written_s[PROGRESS] = now_s
        begin_s, begin = self._progress_begin
        left_s = (total - done) * (now_s - begin_s) / (done - begin) if done > begin else None
        row = {"time": round(now_s, 3), "done": done, "total": total, "left_s": left_s}
        self._write(PROGRESS, json.dumps(row) + "\n")

    def record_stop(self, exit_code: int) -> None:
        """Record that a signal stopped the run. It can be resumed."""
        sentence = f"Stopped at step {self._step}."
        self._ending = {"state": "stopped", "exit_code": exit_code, "sentence": sentence, "remedy": _RESUME_REMEDY}

    def __enter__(self) -> RunMetadata:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            write_outcome(self.folder, {"state": "done", "exit_code": 0, **(self._ending or {})}, self._step)
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130
            sentence = f"Stopped at step {self._step}, without a checkpoint of that step."
            ending = {"state": "stopped", "exit_code": code, "sentence": sentence, "remedy": _RESUME_REMEDY}
            write_outcome(self.folder, ending, self._step)
        else:
            write_failure(self.folder, self._described(error), error, self._step)

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError):  # a failed write of metadata must not stop the training
            write_text_atomically(self.folder / name, text)

    # --- events -------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step, self._is_training = state.global_step, True
        if state.global_step:
            self.event("resumed", f"resumed from step {state.global_step}")
        self.event("stage", "training")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        if control.should_training_stop and state.global_step < state.max_steps:
            self.event("stopping", "stopping after this step")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if logs and logs.get("skipped_steps"):
            count = logs["skipped_steps"]
            self.event("skipped", skipped_steps_message(count, state.global_step), count=count)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "done" in kwargs and not self._is_training:
            self.progress(kwargs["done"], kwargs["total"])

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        loss = metrics.get("eval_loss")
        self.event("evaluation", "evaluated" if loss is None else f"eval_loss {loss:.4f}")
        if state.best_metric is not None and state.best_metric != self._best:
            self._best = state.best_metric
            self.event("best", f"best evaluation so far: {state.best_metric:.4f}")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.event("checkpoint", f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        self.event("stage", "saving")


FINAL_STATES = ("done", "stopped")
"""States of a run that ended as intended."""
_RESUME_REMEDY = "Run the same command again to resume from the last checkpoint."


def write_outcome(folder: Path, ending: Mapping[str, Any], step: int) -> None:
    """Write ``outcome.json`` atomically."""
    row = {"sentence": "", "remedy": "", "traceback": "", **ending, "step": step, "time": round(time.time(), 3)}
    with suppress(OSError):
        write_text_atomically(folder / OUTCOME, json.dumps(mask_json(row), ensure_ascii=False, indent=1) + "\n")


def write_failure(folder: Path, problem: Problem, error: BaseException, step: int = 0) -> None:
    """Write the outcome of a failed run. Only the first failure is written."""
    if (folder / OUTCOME).exists():
        return
    sentence = " ".join(
        part for part in (f"{problem.where}:" if problem.where else "", problem.what, problem.why) if part
    )
    before = _launch(folder).get("before")
    if isinstance(before, dict) and before.get("state") in FINAL_STATES:
        ending = {**before, "sentence": f"The run was not resumed. {sentence}", "remedy": problem.remedy}
        write_outcome(folder, ending, before.get("step", step))
        return
    trace = "".join(traceback.format_exception(error))
    code = 2 if any(isinstance(cause, UserError) for cause in causes(error)) else 1
    ending = {"state": "failed", "exit_code": code, "sentence": sentence, "remedy": problem.remedy, "traceback": trace}
    write_outcome(folder, ending, step)


def is_of_this_process(folder: Path) -> bool:
    """Return whether ``launch.json`` describes this process. The program that started it may have written the file."""
    launch, pid = _launch(folder), os.getpid()
    return launch.get("pid") == pid and launch.get("start_ticks") == start_ticks(pid)


def _launch(folder: Path) -> dict[str, Any]:
    """``launch.json``; empty if it cannot be read."""
    try:
        with open_regular_file(folder / LAUNCH) as file:
            launch = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return launch if isinstance(launch, dict) else {}


# --- process ----------------------------------------------------------------------------------------------------------


def launch_record(
    devices: Iterable[str], pid: int | None = None, argv: Iterable[str] | None = None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of ``launch.json``, for this process or for one that it has started.

    Args:
        devices: devices that the run uses.
        pid, argv: the started process and its command. Default: those of this process.
        before: outcome of the run in its folder that is continued. It stays the outcome if the run cannot be continued.
    """
    from burnish import __version__

    pid = os.getpid() if pid is None else pid
    return {
        "argv": mask_json(list(sys.argv if argv is None else argv)),
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "boot_id": boot_id(),
        "host": socket.gethostname(),
        "user": os.environ.get("USER", "") or str(os.getuid()),
        "folder": os.getcwd(),
        "devices": list(devices),
        "time": round(time.time(), 3),
        "burnish": __version__,
        **({"before": dict(before)} if before else {}),
    }


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None if the process does not exist or has ended.

    Together with the process id it identifies a process uniquely. Linux counts the ticks since boot, so that they do
    not change with the clock. macOS has no such count; there they are counted since 1970.

    Source: fields 3 and 22, https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None if sys.platform == "linux" else _creation_ticks(pid)
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] not in _ENDED else None


def _creation_ticks(pid: int) -> int | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.Error:
        return None


def boot_id() -> str:
    """Return an id that changes at every boot of the machine, or "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- options ----------------------------------------------------------------------------------------------------------


START_ONLY_OPTIONS = ("overwrite_output_dir", "resume", "resume_from_checkpoint")
"""Options that control how a run begins. In the file that resumes the run they would start it over."""


def given_yaml(
    values: Mapping[str, Any], provenance: Mapping[str, str], left_out: Container[str] = (), command: str = "train",
    packages: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the options that were set as YAML, one per line, with their sources. Secrets are omitted.

    Args:
        values: option -> value. JSON values are valid YAML.
        provenance: option -> where it was set.
        left_out: options that are written as comments only.
        command: the burnish command that writes the file.
        packages: name and version of packages that extend burnish; listed in a comment.
    """
    lines = [f"# The options of this run, written by burnish {command}. Rerun or resume: burnish train run.yaml"]
    lines += [f"# Requires: {', '.join(packages)}"] if packages else []
    for name, value in values.items():
        where = without_secrets(" ".join(provenance.get(name, "").split()))
        if has_secret_name(name):
            lines.append(f"# {name} is a secret and is not saved.")
            continue
        mark = "# used only to start the run: " if name in left_out else ""
        lines.append(f"{mark}{name}: {_yaml(value)}{f'  # {where}' if where else ''}")
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", "\n".join(lines)) + "\n"


_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""Characters that a YAML file cannot contain, or that are line breaks in it. They are escaped in quoted text."""


def _yaml(value: Any) -> str:
    """Return a value in the notation that YAML shares with JSON, except that it has names for non-finite numbers."""
    if isinstance(value, Mapping):
        items = (f"{_yaml(str(name))}: {_yaml(item)}" for name, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False, default=str)
