"""Find runs in folders and determine their state.

In: folders. Out: ``FoundRun``. All information is read from files; there is no registry. Supported are runs of burnish,
and of LLaMA-Factory, transformers and TRL, which write ``trainer_log.jsonl`` or ``trainer_state.json``.

A run is alive if the process in its ``launch.json`` exists, with the same start time and the same boot of this machine.
Nothing is locked or written. The files are untrusted: a value of the wrong type counts as missing, and a folder that
cannot be read becomes a run in the state "unreadable", with the reason in ``sentence``.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

from burnish.config.errors import first_line
from burnish.report.metadata import EVENTS, LAUNCH, OUTCOME, PROGRESS, RUN_YAML, boot_id, start_ticks
from burnish.serve.page.runs.files import (
    LOG,
    STATE,
    checkpoints,
    has_unreadable_history,
    history,
    is_broken,
    is_checkpoint,
    object_in,
    run_yaml_text,
    tail_lines,
)

RunState: TypeAlias = Literal[
    "queued", "starting", "running", "saving", "evaluating", "stopping", "stopped", "done", "failed", "died",
    "elsewhere", "silent", "unreadable",
]  # fmt: skip
RunKind: TypeAlias = Literal["train", "predict", "eval"]
ALIVE: frozenset[str] = frozenset({"starting", "running", "saving", "evaluating", "stopping", "elsewhere"})
FINAL_STATES: frozenset[str] = frozenset({"stopped", "done", "failed", "died", "unreadable"})
"""States that last until a file of the run changes."""
_READ = (
    "", LOG, STATE, LAUNCH, OUTCOME, EVENTS, PROGRESS, RUN_YAML, "all_results.json", "train_results.json",
    "predict_results.json", "eval_results.json",
)  # fmt: skip
"""The folder of a run, and the files from which it is read."""
DEPTH, MOST_FOLDERS, LONGEST_S = 4, 5000, 2.0
MOST_CHARACTERS = 4000
_SILENT_AFTER_INTERVALS = 10
"""A run on another machine counts as silent after this multiple of the usual time between two rows."""


KnownRuns: TypeAlias = "dict[str, tuple[tuple[tuple[int, ...], ...], FoundRun, float]]"
"""Real path of a folder -> marks of its files, the run, and the time at which it was read (``time.monotonic``)."""


@dataclass(frozen=True)
class FoundRun:
    """One run.

    Args:
        id: opaque, the same for the same folder.
        maker: burnish, LLaMA-Factory or transformers (TRL's are the same).
        kind: training, prediction or evaluation.
        tokens_per_s: between the last two rows of training, or since the start if rows have no time.
        metrics: of a prediction or an evaluation.
        outcome: ``outcome.json`` of the last launch, if it exists.
        launch: ``launch.json``.
    """

    id: str
    folder: Path
    name: str
    maker: str
    state: RunState
    kind: RunKind = "train"
    step: int = 0
    total: int = 0
    epoch: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    started: float = 0.0
    changed: float = 0.0
    sentence: str = ""
    remedy: str = ""
    checkpoint: int | None = None
    best: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def id_of(folder: Path) -> str:
    """An id of twelve characters that does not reveal the path."""
    return hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12]


def find(roots: Sequence[Path], known: KnownRuns | None = None) -> list[FoundRun]:
    """The runs below the roots, the newest first.

    Args:
        roots: folders.
        known: runs that an earlier call has read; it is updated (``read_if_changed``).
    """
    folders = {os.path.realpath(folder): folder for root in roots for folder in run_folders(root)}
    known = {} if known is None else known
    for gone in known.keys() - folders.keys():
        known.pop(gone, None)
    found = [read_if_changed(folder, known, place) for place, folder in folders.items()]
    return sorted(filter(None, found), key=lambda run: -run.changed)


def read_if_changed(folder: Path, known: KnownRuns, place: str = "") -> FoundRun | None:
    """As ``read_run``. A run that was read is read again if one of its files has changed, or after a second if it has
    not ended.

    Args:
        known: the runs that were read; it is updated.
        place: real path of the folder, if it is known.
    """
    place = place or os.path.realpath(folder)
    marks, run, read_s = known.get(place, ((), None, 0.0))
    now = tuple(_file_version(f"{place}/{name}") for name in _READ)
    is_old = run is None or (run.state not in FINAL_STATES and time.monotonic() - read_s > 1.0)
    if is_old or marks != now:
        run = read_run(folder)
        if run is not None:
            known[place] = now, run, time.monotonic()
    return run


def _file_version(path: str) -> tuple[int, ...]:
    """Changes when a file is written or replaced, or when an entry of a folder is added or removed."""
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def run_folders(root: Path) -> Iterator[Path]:
    """Folders that contain a run, up to ``DEPTH`` levels deep, within limits of time and number. Links are not
    followed."""
    until, seen = time.monotonic() + LONGEST_S, 0
    waiting = [(root, 0)]
    while waiting and seen < MOST_FOLDERS and time.monotonic() < until:
        folder, depth = waiting.pop(0)
        seen += 1
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        if {entry.name for entry in entries} & {LOG, STATE, LAUNCH}:
            yield folder
        if depth < DEPTH:
            waiting += [
                (Path(entry.path), depth + 1) for entry in sorted(entries, key=_name) if _may_contain_runs(entry)
            ]


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _may_contain_runs(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith((".", "__", "node_modules")) or is_checkpoint(entry.name):
        return False
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def read_run(folder: Path) -> FoundRun | None:
    """Read a run from its files; None if the folder contains no run."""
    try:
        return _read_run(folder)
    except Exception as error:  # the files of one folder must not take the list of all runs away
        return _unreadable(folder, f"{type(error).__name__}: {first_line(error)}")


def _unreadable(folder: Path, why: str) -> FoundRun:
    sentence = f"Cannot read the files of this run: {why}."
    return FoundRun(
        id_of(folder), folder, folder.name, "", "unreadable", changed=_modified_s(folder), sentence=sentence
    )


def _read_run(folder: Path) -> FoundRun | None:
    launch, rows = _launch(folder), tail_lines(folder / LOG)
    logged = [] if rows else history(folder)
    if not launch and not rows and not logged:
        broken = [name for name in (LAUNCH, LOG, STATE) if is_broken(folder / name)]
        if not broken and has_unreadable_history(folder / STATE):  # called without any row of it
            broken = [STATE]
        return _unreadable(folder, f"{broken[0]} has an invalid format") if broken else None
    outcome = object_in(folder / OUTCOME)
    if _time(outcome) < _time(launch):
        outcome = {}  # of an earlier start
    trained = [row for row in rows or logged if "loss" in row]
    evaluated = [row["eval_loss"] for row in rows or logged if _is_number(row.get("eval_loss"))]
    last = (rows or logged or [{}])[-1]
    events = tail_lines(folder / EVENTS)
    changed = max((_modified_s(folder / name) for name in (LOG, STATE, LAUNCH, OUTCOME, PROGRESS)), default=0.0)
    started_from = max((_whole(event.get("step")) for event in events if _time(event) >= _time(launch)), default=0)
    state = run_state(launch, outcome, rows, events, folder, changed)
    kind = "train" if trained else _kind(folder, launch)
    progress = {} if kind == "train" else object_in(folder / PROGRESS)
    step = max(_whole(last.get("current_steps", last.get("step", outcome.get("step", 0)))), started_from)
    total = _whole(last.get("total_steps", last.get("max_steps", 0)))
    if progress:
        step, total = _whole(progress.get("done")), _whole(progress.get("total"))
    return FoundRun(
        id=id_of(folder), folder=folder, name=folder.name, maker=_framework(folder, launch, rows), state=state,
        kind=kind, metrics={} if kind == "train" else _metrics(folder, kind),
        step=step, total=total, epoch=_number(last.get("epoch")),
        loss=_number(trained[-1]["loss"]) if trained else None, eval_loss=_number(evaluated[-1]) if evaluated else None,
        tokens_per_s=_rate(trained), left_s=_number(progress.get("left_s")) or _seconds(last.get("remaining_time")),
        started=_time(launch) or _modified_s(folder), changed=changed,
        sentence=_text(outcome.get("sentence")) or _sentence(state, launch, folder),
        remedy=_text(outcome.get("remedy")), checkpoint=max(checkpoints(folder), default=None),
        best=next((_text(event.get("text")) for event in reversed(events) if event.get("kind") == "best"), ""),
        launch=launch, outcome=outcome,
    )  # fmt: skip


def _launch(folder: Path) -> dict[str, Any]:
    """``launch.json``, with its command as a list of texts."""
    launch = object_in(folder / LAUNCH)
    argv = launch.get("argv")
    return {**launch, "argv": _command(argv) if isinstance(argv, list) else []} if launch else {}


def _command(argv: Sequence[Any]) -> list[str]:
    """The command as a user types it: ``burnish`` instead of the path of its program or module."""
    words = [str(word) for word in argv]
    program = Path(words[0]).parts[-2:] if words else ()
    is_burnish = program[-1:] == ("burnish",) or program in (("burnish", "__main__.py"), ("burnish", "train.py"))
    return ["burnish", *words[1:]] if is_burnish else words


def run_state(
    launch: Mapping[str, Any], outcome: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]], folder: Path, changed: float,
) -> RunState:  # fmt: skip
    """The state of a run, from its files and the process that they name."""
    if outcome.get("state") in ("done", "stopped", "failed"):
        found: RunState = outcome["state"]
        return found
    if launch.get("host"):
        if launch.get("host") != socket.gethostname():
            quiet_s = max(60.0, _SILENT_AFTER_INTERVALS * _usual_interval_s(rows))
            return "elsewhere" if time.time() - changed < quiet_s else "silent"
        if not is_alive(launch):
            return "died"
        return _stage([event for event in events if _time(event) >= _time(launch)])  # without those of earlier starts
    is_finished = (folder / "all_results.json").is_file() or (folder / "train_results.json").is_file()
    percentage = rows[-1].get("percentage") if rows else None
    if is_finished or percentage == 100:
        return "done"
    return "running" if time.time() - changed < 120 else "stopped"


def _usual_interval_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median of the seconds between rows of training; a minute with fewer than two rows."""
    times = [_time(row) for row in rows if "loss" in row and _time(row)]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else 60.0


def is_alive(launch: Mapping[str, Any]) -> bool:
    """Return whether the launched process itself is still alive, since this start of the machine."""
    pid, ticks = launch.get("pid"), launch.get("start_ticks")
    if not isinstance(pid, int) or not 1 < pid < 2**31 or ticks is None or launch.get("boot_id") != boot_id():
        return False
    return bool(start_ticks(pid) == ticks)


def _stage(events: Sequence[Mapping[str, Any]]) -> RunState:
    for event in reversed(events):
        if event.get("kind") == "stopping":
            return "stopping"
        if event.get("kind") == "stage":
            stages: dict[Any, RunState] = {"training": "running", "saving": "saving", "evaluating": "evaluating"}
            return stages.get(_text(event.get("text")), "starting")
    return "starting"


def _framework(folder: Path, launch: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if launch or (folder / ".finished.json").is_file():
        return "burnish"
    return "LLaMA-Factory" if rows else "transformers"


def _kind(folder: Path, launch: Mapping[str, Any]) -> RunKind:
    """The kind of a run without training rows, from its command or its ``run.yaml``."""
    word = launch.get("argv", [])[1:2]
    if word in (["predict"], ["eval"]):
        return "predict" if word == ["predict"] else "eval"
    run_yaml = run_yaml_text(folder) if launch else ""
    set_to = dict(re.findall(r"^do_(train|eval|predict): (true|false)\b", run_yaml, re.MULTILINE))
    if set_to.get("train", "false") == "true" or "true" not in set_to.values():
        return "eval" if set_to.get("train") == "false" else "train"
    return "predict" if set_to.get("predict") == "true" else "eval"


def _metrics(folder: Path, kind: RunKind) -> dict[str, float]:
    """The numbers of its results, without the names' prefix."""
    found = object_in(folder / f"{kind}_results.json")
    numbers = {name.removeprefix(f"{kind}_"): value for name, value in found.items() if _is_number(value)}
    numbers.pop("epoch", None)  # of training that the command did not do
    return dict(list(numbers.items())[:12])


def _rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per second of the steps between the last two rows, or ``throughput``, which counts from the start."""
    if not rows:
        return None
    if (rate := _number(rows[-1].get("tokens_per_second"))) is not None:
        return rate
    if len(rows) > 1:
        names = ("total_tokens", "time", "current_steps")
        tokens, now_s, step = (_number(rows[-1].get(name)) or 0.0 for name in names)
        before, then_s, last = (_number(rows[-2].get(name)) or 0.0 for name in names)
        step_s = _number(rows[-1].get("step_seconds"))  # without the evaluations between the rows
        seconds = step_s * (step - last) if step_s else now_s - then_s
        if before and seconds > 0 and tokens > before:
            return (tokens - before) / seconds
    return _number(rows[-1].get("throughput"))


def _sentence(state: RunState, launch: Mapping[str, Any], folder: Path) -> str:
    host = _text(launch.get("host"))
    if state == "died" and is_broken(folder / OUTCOME):
        return f"{OUTCOME} has an invalid format, so it is unknown how the run ended."
    return {
        "died": "The process ended unexpectedly: it was killed, or the machine went down.",
        "elsewhere": f"Running on {host}.",
        "silent": f"Started on {host}, no updates for a long time.",
    }.get(state, "")


# --- values ----------------------------------------------------------------------------------------------------------


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) and abs(value) < 1e300 else None


def _text(value: Any) -> str:
    """A string without control characters; "" for any other type."""
    if not isinstance(value, str):
        return ""
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in value[:MOST_CHARACTERS])


def _time(of: Mapping[str, Any]) -> float:
    """A timestamp in seconds since 1970; 0 if it is invalid, or after the year 5138."""
    seconds = _number(of.get("time")) or 0.0
    return seconds if 0 < seconds < 1e11 else 0.0


def _whole(value: Any) -> int:
    return int(value) if _is_number(value) and abs(value) < 2**53 else 0


def _seconds(text: Any) -> float | None:
    """``0:03:13`` or ``1 day, 2:03:04`` as seconds."""
    if not isinstance(text, str) or len(text) > 40:
        return None
    days, _, clock = text.rpartition(", ")
    try:
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        return hours * 3600 + minutes * 60 + seconds + 86400 * int(days.split()[0] if days else 0)
    except ValueError:
        return None
