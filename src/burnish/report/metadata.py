"""The metadata of a run, for those who watch it from outside: a page, a script, another machine.

    launch.json    who runs it: the command, the process and its start, the host
    run.yaml       the given options, and where they were given; it can be run again
    events.jsonl   events: stages, checkpoints, bests, skipped steps, stops
    outcome.json   the end of the run, written last; a process that is killed leaves none

In: a plan's options and the events of the run. Out: these files, in ``output_dir``. Nothing here is read back by
the run, and nothing is asked of a device.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from burnish.config.errors import Problem, skipped_sentence
from burnish.config.secrets import has_secret_name, without_secrets
from burnish.loop.events import TrainerCallback
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.results import write_whole
from burnish.utils.files import appended, regular

LAUNCH, GIVEN, EVENTS, OUTCOME = "launch.json", "run.yaml", "events.jsonl", "outcome.json"
METADATA_NAMES = (LAUNCH, GIVEN, EVENTS, OUTCOME, "console.log")
_NOT_SOONER_S = 1.0
"""Between two events of a kind; what comes sooner is left out. Stages and endings are always kept."""
_ALWAYS = frozenset({"stage", "checkpoint", "stopping", "resumed", "skipped"})


class RunMetadata(TrainerCallback):
    """The files of one run, on its main process. A context: however the block ends, the outcome says so.

    Args:
        folder: ``output_dir``.
        described: an exception -> what a person is told of it.
    """

    def __init__(self, folder: str | Path, described: Callable[[BaseException], Problem]) -> None:
        self.folder, self._described = Path(folder), described
        self._written_s: dict[str, float] = {}
        self._step = 0
        self._best: float | None = None
        self._ending: dict[str, Any] | None = None

    def begin(self, given: str, devices: Iterable[str], rows: Mapping[str, int] = MappingProxyType({})) -> None:
        """Before the model is loaded.

        Args:
            given: the text of ``run.yaml``.
            devices: that the run uses.
            rows: how many were "seen" and "dropped".
        """
        (self.folder / OUTCOME).unlink(missing_ok=True)
        self._write(GIVEN, given)
        self._write(LAUNCH, json.dumps({**launched(devices), "rows": dict(rows)}, indent=1) + "\n")
        self.event("stage", "loading")

    def event(self, kind: str, text: str, **more: Any) -> None:
        now_s = time.time()
        if kind not in _ALWAYS and now_s - self._written_s.get(kind, 0.0) < _NOT_SOONER_S:
            return
        self._written_s[kind] = now_s
        row = {"time": round(now_s, 3), "step": self._step, "kind": kind, "text": text, **more}
        with suppress(OSError), appended(self.folder / EVENTS) as file:
            file.write(without_secrets(json.dumps(row, ensure_ascii=False)).encode() + b"\n")

    def stopped(self, exit_code: int) -> None:
        """A signal cut it short; it can go on."""
        sentence = f"Stopped at step {self._step}."
        self._ending = {"state": "stopped", "exit_code": exit_code, "sentence": sentence, "remedy": _AGAIN}

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
            ending = {"state": "stopped", "exit_code": code, "sentence": sentence, "remedy": _AGAIN}
            write_outcome(self.folder, ending, self._step)
        else:
            write_failure(self.folder, self._described(error), error, self._step)

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError):  # who looks from outside is not worth a training
            write_whole(self.folder / name, without_secrets(text))

    # --- what happens -------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        if state.global_step:
            self.event("resumed", f"continued from step {state.global_step}")
        self.event("stage", "training")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        if control.should_training_stop and state.global_step < state.max_steps:
            self.event("stopping", "stopping after this step")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if logs and logs.get("skipped_steps"):
            count = logs["skipped_steps"]
            self.event("skipped", skipped_sentence(count, state.global_step), count=count)

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


_AGAIN = "Run the same command again to resume from the last checkpoint."


def write_outcome(folder: Path, ending: Mapping[str, Any], step: int) -> None:
    """``outcome.json``, whole or not at all."""
    row = {"sentence": "", "remedy": "", "traceback": "", **ending, "step": step, "time": round(time.time(), 3)}
    with suppress(OSError):
        write_whole(folder / OUTCOME, without_secrets(json.dumps(row, ensure_ascii=False, indent=1)) + "\n")


def write_failure(folder: Path, problem: Problem, error: BaseException, step: int = 0) -> None:
    """The outcome of a run that failed. The first failure that is written counts."""
    if (folder / OUTCOME).exists():
        return
    sentence = " ".join(
        part for part in (f"{problem.where}:" if problem.where else "", problem.what, problem.why) if part
    )
    trace = "".join(traceback.format_exception(error))
    ending = {"state": "failed", "exit_code": 1, "sentence": sentence, "remedy": problem.remedy, "traceback": trace}
    write_outcome(folder, ending, step)


def is_of_this_process(folder: Path) -> bool:
    """Return whether ``launch.json`` names this process: whoever started it may have written the file before."""
    try:
        with regular(folder / LAUNCH) as file:
            launch = json.load(file)
        return bool(launch["pid"] == os.getpid() and launch["start_ticks"] == start_ticks(os.getpid()))
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- who runs it ------------------------------------------------------------------------------------------------------


def launched(devices: Iterable[str], pid: int | None = None, argv: Iterable[str] | None = None) -> dict[str, Any]:
    """The content of ``launch.json``, for this process or for one that this one has started."""
    from burnish import __version__

    pid = os.getpid() if pid is None else pid
    return {
        "argv": [without_secrets(word) for word in (sys.argv if argv is None else argv)],
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "boot_id": boot_id(),
        "host": socket.gethostname(),
        "user": os.environ.get("USER", "") or str(os.getuid()),
        "folder": os.getcwd(),
        "devices": list(devices),
        "time": round(time.time(), 3),
        "burnish": __version__,
    }


def start_ticks(pid: int) -> int | None:
    """Start of a process, in ticks since the machine did: with the pid, it names the process for good. None where
    there is no such process.
    """
    fields = process_fields(pid)
    return int(fields[19]) if fields else None


def process_fields(pid: int) -> list[str]:
    """Facts that the kernel tells of a process behind its name, beginning with its state; none where it is not there.

    Source: fields 3 and on of /proc/PID/stat, https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """This start of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- what was given ---------------------------------------------------------------------------------------------------


OF_ONE_START = ("overwrite_output_dir", "resume", "resume_from_checkpoint")
"""Options that say how a run begins. In the file that continues it they would begin it anew."""


def given_yaml(
    values: Mapping[str, Any], provenance: Mapping[str, str], left_out: Container[str] = (), command: str = "train"
) -> str:
    """The options that were given, one a line, with who gave each; JSON's values are YAML's. Secrets are left out.

    Args:
        left_out: names that are told, and have no effect where the file is read.
        command: the command of burnish that writes the file.
    """
    lines = [f"# The options of this run, written by burnish {command}. Rerun or resume: burnish train run.yaml"]
    for name, value in values.items():
        where = " ".join(provenance.get(name, "").split())
        if has_secret_name(name):
            lines.append(f"# {name} is a secret and is not saved.")
            continue
        mark = "# only for the start of the run: " if name in left_out else ""
        lines.append(f"{mark}{name}: {_yaml(value)}{f'  # {where}' if where else ''}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)
