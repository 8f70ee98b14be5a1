"""``--profile``: time and memory of each part of a step.

Written to output_dir/profile: ``steps.txt``, a table of the parts of a step and of the slowest operations, and
``trace.json.gz``, a timeline of one step for https://ui.perfetto.dev or chrome://tracing.

The first steps are not measured, because they select kernels and allocate memory. The next steps are timed part by
part. Only the step after those is traced, because recording every operation takes time itself. On a GPU, each part ends
with a synchronization, so that its time is attributed correctly; steps without the profiler are slightly faster.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import ineffective_option_notes, option
from burnish.loop.events import TrainerCallback
from burnish.loop.loop import Loop
from burnish.loop.schedule import StepOptions
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.console import note
from burnish.utils.patching import Reason, patch

TRACE, TABLE = "trace.json.gz", "steps.txt"
WARM_UP = 2  # steps without measurement
_OPERATIONS = 15  # rows of the second table
_BETWEEN, _REST = "between steps: batches, logs, saves", "the rest of the step"


@dataclass
class ProfileOptions:
    """Profiling."""

    profile: bool = option(False, "Profile time and memory of a few steps, and save a trace to output_dir/profile.")
    profile_steps: int = option(4, "Number of steps to profile, after two warmup steps.", unit="steps", ge=1)


@notes
def profile_notes(options: ProfileOptions) -> list[str]:
    return ineffective_option_notes(options, {"profile_steps": "profile"})


class ProfileChoices(StepOptions, ProfileOptions):
    """Options that select the profiled steps."""


@check
def check_profile(options: ProfileChoices) -> Iterator[Problem]:
    needed = WARM_UP + options.profile_steps + 1
    if not options.profile or options.max_steps <= 0 or options.max_steps >= needed:
        return
    yield Problem(
        f'"profile" requires {needed} steps: {WARM_UP} for warmup, {options.profile_steps} timed, one traced. '
        f"Received: max_steps {options.max_steps}.",
        remedy=f"Set max_steps: {needed} or more, or a smaller profile_steps.",
        option=("profile", "profile_steps", "max_steps"),
    )


def start_profiling(run: Loop, folder: Path, options: ProfileOptions) -> None:
    """Time the parts of the run from now on, and write the results to ``folder`` after enough steps."""
    if run.parallel.rank != 0:
        return
    clock = PartClock(run.parallel.device)
    for owner, name, part in (
        (run.parallel, "to_device", "batch to the device"),
        (run.objective, "loss", "forward and loss"),
        (run.parallel, "backward", "backward"),
        (run.parallel, "clip", "gradient norm and clipping"),
        (run.parallel, "step", "optimizer"),
        (run.optimizer, "zero_grad", "optimizer"),
    ):
        patch(owner, name, clock.around(part, getattr(owner, name)), Reason(part, "its duration is measured (profile)"))
    run.callbacks.callbacks.append(ProfileCallback(clock, folder, options.profile_steps))


class PartClock:
    """Seconds and peak bytes of each part, accumulated while it is on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak_bytes: dict[str, int] = defaultdict(int)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(part):
                return function(*arguments, **named)

        return timed

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with record_function(name):
            if not self.is_on:
                yield
                return
            begin = self.now()
            restart_peak(self.device)
            yield
            self.seconds[name] += self.now() - begin
            self.peak_bytes[name] = max(self.peak_bytes[name], peak_bytes(self.device))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class ProfileCallback(TrainerCallback):
    """Switches the clock on and off, traces one step, and writes and prints the results."""

    def __init__(self, clock: PartClock, folder: Path, num_steps: int) -> None:
        self.clock = clock
        self.folder = folder
        self.num_steps = num_steps
        self.steps_begun = 0  # steps since this process started
        self.step_s = 0.0
        self.between_s = 0.0
        self.moment = 0.0  # time at which a step last began or ended
        self.trace: Any = None

    @property
    def is_timed(self) -> bool:
        return WARM_UP < self.steps_begun <= WARM_UP + self.num_steps

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps_begun += 1
        self.clock.is_on = self.is_timed
        if self.steps_begun == WARM_UP + self.num_steps + 1:
            on_gpu = [ProfilerActivity.CUDA] if self.clock.device.type == "cuda" else []
            self.trace = torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu], profile_memory=True)
            self.trace.start()
        elif self.is_timed:
            now = self.clock.now()
            self.between_s += now - self.moment if self.steps_begun > WARM_UP + 1 else 0.0
            self.moment = now

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_timed:
            now = self.clock.now()
            self.step_s += now - self.moment
            self.moment = now
            self.clock.is_on = False
        elif self.trace is not None:
            self.trace.stop()
            self._write(state.global_step)
            self.trace = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        needed = WARM_UP + self.num_steps + 1
        if self.steps_begun < needed:
            note(f"Nothing was profiled: profiling requires {needed} steps, and this run had {self.steps_begun}.")

    def _write(self, traced_step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trace.export_chrome_trace(str(self.folder / TRACE))
        device = self.clock.device.type
        text = "\n".join(
            [
                f"Time per step (mean of {self.num_steps} steps on {device})",
                *self._parts(),
                "",
                f"Slowest operations of step {traced_step} and the memory that they allocated",
                *_operations(self.trace, device),
            ]
        )
        (self.folder / TABLE).write_text(text + "\n", encoding="utf-8")
        note(
            f"\n{text}\n\nThe trace of step {traced_step} is in {self.folder / TRACE}. Open it in https://ui.perfetto.dev.\n"
        )

    def _parts(self) -> Iterator[str]:
        seconds = dict(self.clock.seconds)
        seconds[_REST] = max(0.0, self.step_s - sum(seconds.values()))
        seconds[_BETWEEN] = self.between_s
        whole = self.step_s + self.between_s
        yield f"  {'':38}{'ms':>10}{'share':>8}{'peak memory':>14}"
        for part, spent in seconds.items():
            peak = self.clock.peak_bytes.get(part)
            memory = f"{peak / 2**30:.2f} GiB" if peak else ""
            yield f"  {part:38}{1000 * spent / self.num_steps:10.1f}{spent / whole:8.1%}{memory:>14}".rstrip()
        yield f"  {'total':38}{1000 * whole / self.num_steps:10.1f}{1:8.1%}"


def _operations(trace: Any, device: str) -> Iterator[str]:
    """Yield a table of operations ordered by their own time, on the device if there is one."""
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    memory_of = "self_device_memory_usage" if device == "cuda" else "self_cpu_memory_usage"
    found = sorted(trace.key_averages(), key=lambda event: getattr(event, time_of), reverse=True)
    whole = sum(getattr(event, time_of) for event in found) or 1
    yield f"  {'':38}{'ms':>10}{'share':>8}{'calls':>8}{'MiB':>9}"
    for event in found[:_OPERATIONS]:
        spent, allocated = getattr(event, time_of), max(0, getattr(event, memory_of))  # microseconds, bytes
        yield f"  {_name(event):38}{spent / 1000:10.1f}{spent / whole:8.1%}{event.count:8}{allocated / 2**20:9.1f}"


def _name(event: Any) -> str:
    """Return the name of an operation in 37 characters. Entries of step parts are their time in Python."""
    name: str = event.key.removeprefix("autograd::engine::evaluate_function: ")
    if event.is_user_annotation:
        name += " (Python)"
    return name if len(name) <= 37 else name[:34] + "..."


# --- memory -----------------------------------------------------------------------------------------------------------

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak(device: torch.device) -> None:
    """Reset the peak memory counter."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # Linux: resets the peak resident set size (proc_pid_clear_refs(5))


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since ``restart_peak``: of the GPU, or of the process on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return 0
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")), "")
    return int(line.split()[1]) * 1024 if line else 0
