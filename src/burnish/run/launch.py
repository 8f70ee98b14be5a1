"""Launcher: starts the processes of a run on this machine.

``launch`` returns an exit status, or None if this process should do the work itself because one process is enough or
another launcher has already started it.

The first process of a machine writes to the terminal. The output of the others is kept in case one of them fails. A
signal is forwarded to the first process, which agrees with the others on the step after which all stop. If a process
dies, the others end within seconds, and its last message is printed last. With ``max_restarts``, all processes are
restarted from the newest checkpoint.

No heavy library is imported here; the started processes import what they need.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from burnish.config.errors import Problem
from burnish.config.options import RawValue, raise_if
from burnish.parallel.process_counts import (
    AUTO,
    free_port,
    launcher_problems,
    machine_rank,
    needs_launcher,
    num_machines,
    problems_of_machines,
    too_many_processes,
    world_size,
)
from burnish.report import console
from burnish.run.recovery.interrupt import KEEP_RUNNING
from burnish.utils.environment import count_in, number_in, usable_cores

PROGRAM = ("-P", "-m", "burnish.train")  # -P: do not import modules from the current folder
FORWARDED = (signal.SIGINT, signal.SIGTERM, *KEEP_RUNNING)
_USER_ERROR = 2
STALLED = ".stalled"
"""Suffix of a process's failure file, to which ``run/recovery/stall.py`` writes the stacks."""
_TERMINATION_GRACE_S = 3.0
_POLL_INTERVAL_S = 0.05
_LAST_LINES = 12


def launch(argv: Sequence[str], values: Mapping[str, RawValue]) -> int | None:
    """Run ``burnish train`` in several processes on this machine, wait for them, and print failures.

    Args:
        argv: arguments of ``burnish train``.
        values: option values parsed from ``argv``.
    Returns:
        Exit status of the run, or None if it should run in this process.
    Raises:
        UserError: if a variable for several machines is missing, or if there are more processes than devices.
    """
    request = LaunchRequest.of(values)
    raise_if([*launcher_problems(), *problems_of_machines()])
    if not needs_launcher(request):
        return None
    raise_if(too_many_processes(request.num_processes, request.use_cpu))
    argv, restarts = list(argv), 0
    num_processes = world_size(request) // num_machines()
    while True:
        with tempfile.TemporaryDirectory(prefix="burnish-") as folder:
            ended = Processes(argv, num_processes, Path(folder)).wait()
        if not ended.failures:
            return ended.status
        if not ended.may_succeed_again or restarts == request.max_restarts:
            for problem in ended.failures:
                console.problem(problem)
            return ended.status
        restarts += 1
        console.warn(f"{ended.failures[-1]}\nRestarting (attempt {restarts} of {request.max_restarts}).")
        argv = with_resume(argv, request.output_dir)


@dataclass
class LaunchRequest:
    """Options needed before the plan exists. Invalid values are ignored here, because the plan reports them."""

    num_processes: int | str = AUTO
    max_restarts: int = 0
    use_cpu: bool = False
    engine: str = AUTO
    stall_timeout_s: float | None = None
    output_dir: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, RawValue]) -> LaunchRequest:
        text = {name: str(item.value).strip().lower() for name, item in values.items()}
        processes = text.get("num_processes", AUTO)
        return cls(
            count_in(processes) or AUTO,
            count_in(text.get("max_restarts", "")),
            any(text.get(name, "") in ("true", "yes", "on", "1") for name in ("use_cpu", "no_cuda")),
            text.get("engine", AUTO),
            number_in(text.get("stall_timeout_s", "")),
            str(values["output_dir"].value) if "output_dir" in values else None,
        )


def with_resume(argv: Sequence[str], output_dir: str | None) -> list[str]:
    """Return the arguments for a restart, which resumes from the newest checkpoint if there is one."""
    saved = Path(output_dir).glob("checkpoint-*/manifest.json") if output_dir else ()
    if not any(saved):
        return list(argv)
    return [*argv, "--overwrite_output_dir", "false", "--resume", "auto", "--resume_from_checkpoint", "true"]


@dataclass(frozen=True)
class ProcessesEnded:
    """How the processes ended.

    Args:
        status: exit status of the run.
        failures: messages to print; empty if the processes succeeded or were asked to stop.
        may_succeed_again: whether a restart could help.
    """

    status: int
    failures: tuple[Problem | str, ...] = ()
    may_succeed_again: bool = False


class Processes:
    """The processes of this machine."""

    def __init__(self, argv: Sequence[str], count: int, folder: Path) -> None:
        self.folder = folder
        self.received: int | None = None
        self.killed: list[subprocess.Popen[bytes]] = []
        self.world_size = count * num_machines()
        self.ranks = [machine_rank() * count + place for place in range(count)]
        common = self._environment(count)
        self.running = [self._start_process(argv, place, rank, common) for place, rank in enumerate(self.ranks)]

    def _environment(self, count: int) -> dict[str, str]:
        """Return the common environment. Unless OMP_NUM_THREADS is set, the cores are divided evenly."""
        variables = {**os.environ, "WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(count)}
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
        if num_machines() == 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables.setdefault("MASTER_PORT", "29500")
        return variables

    def _start_process(
        self, argv: Sequence[str], place: int, rank: int, common: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            **common, "RANK": str(rank), "LOCAL_RANK": str(place), console.FAILURE_FILE: str(self._failure_file(rank)),
        }  # fmt: skip
        output: Any = None if place == 0 else self._log(rank).open("wb")
        try:
            return subprocess.Popen(  # noqa: S603 - this program, with its own arguments
                [sys.executable, *PROGRAM, *argv], env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output,
                process_group=0,  # so that the terminal sends Ctrl-C to this process only, which forwards it
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        finally:
            if output is not None:
                output.close()

    def wait(self) -> ProcessesEnded:
        """Wait until all processes have ended."""
        with self._forwarding():
            try:
                while self._are_running() and not self._is_over():
                    time.sleep(_POLL_INTERVAL_S)
                until = time.monotonic() + _TERMINATION_GRACE_S
                while self._are_running() and time.monotonic() < until:
                    time.sleep(
                        _POLL_INTERVAL_S
                    )  # time for processes to notice the failure and clear their progress bar
            finally:
                self._kill()
        if self._has_stopped() or not any(map(self._has_failed, self.running)):
            return ProcessesEnded(exit_status(self.running[0].returncode))
        return self._failure()

    def _are_running(self) -> bool:
        return any(process.poll() is None for process in self.running)

    def _is_over(self) -> bool:
        return self._has_stopped() or any(map(self._has_failed, self.running))

    def _has_stopped(self) -> bool:
        """Return whether the first process has ended because of a signal that was forwarded to it."""
        status = self.running[0].poll()
        return self.received is not None and status is not None and exit_status(status) > 128

    def _has_failed(self, process: subprocess.Popen[bytes]) -> bool:
        return process.poll() not in (None, 0) and process not in self.killed

    def _kill(self) -> None:
        """Kill the remaining processes. This is safe, because an incomplete checkpoint is ignored."""
        for process in self.running:
            if process.poll() is None:
                self.killed.append(process)
                process.kill()
                process.wait()
        if self.running[0] in self.killed and sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # show the cursor, which the progress bar had hidden

    # --- failures -----------------------------------------------------------------------------------------------------

    def _failure(self) -> ProcessesEnded:
        """Return the failure of the process that failed first; the others failed as a consequence."""
        failed = [
            (rank, process) for rank, process in zip(self.ranks, self.running, strict=True) if self._has_failed(process)
        ]
        rank, process = min(failed, key=self._time_of_failure)
        status = exit_status(process.returncode)
        stalled = [(rank, self._stacks(rank)) for rank in self.ranks if self._stacks(rank)]
        if stalled:
            stacks = "\n".join(f"  {self._place(rank)}:\n{text}" for rank, text in stalled)
            return ProcessesEnded(
                status, (f"The run made no progress for longer than stall_timeout_s.\n{stacks}",), True
            )
        failure = self._failure_file(rank)
        if not failure.is_file():
            return ProcessesEnded(status, (self._unexplained_failure(rank, process.returncode),), True)
        *first, last = failure.read_text(encoding="utf-8").rstrip(console.END_OF_PROBLEM).split(console.END_OF_PROBLEM)
        if status == _USER_ERROR or self.world_size == 1:
            return ProcessesEnded(status, (*first, last))
        return ProcessesEnded(status, (*first, f"{last}\n  {self._place(rank)}."), True)

    def _time_of_failure(self, failed: tuple[int, subprocess.Popen[bytes]]) -> tuple[float, int]:
        """Sorting key: processes killed by a signal come first, since they did not fail because of another process."""
        failure = self._failure_file(failed[0])
        return failure.stat().st_mtime if failure.is_file() else 0.0, failed[0]

    def _unexplained_failure(self, rank: int, returncode: int) -> Problem:
        how = (
            f"was terminated by {signal.Signals(-returncode).name}"
            if returncode < 0
            else f"exited with status {returncode}"
        )
        killed = (
            "The process may have been killed because the system ran out of memory."
            if returncode == -signal.SIGKILL
            else ""
        )
        log = self._log(rank)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        last = "\n".join(f"    {line}" for line in lines[-_LAST_LINES:])
        why = f"{killed}\n  Last output:\n{last}".strip() if last else killed
        return Problem(f"{self._place(rank)} {how}.", why=why)

    def _place(self, rank: int) -> str:
        return f"Process {rank} of {self.world_size} on {socket.gethostname()}"

    def _failure_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.failure"

    def _stacks(self, rank: int) -> str:
        """Return the thread stacks that a stalled process has written, indented."""
        path = Path(str(self._failure_file(rank)) + STALLED)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        return "\n".join(f"    {line}" for line in lines)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forward signals to the first process, which tells the others at the end of its step."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number not in KEEP_RUNNING:
            self.received = number
        if self.running[0].poll() is None:
            self.running[0].send_signal(number)


def exit_status(returncode: int) -> int:
    """Return an exit status as shells report it: 128 + signal for a process ended by a signal."""
    return 128 - returncode if returncode < 0 else returncode


def _end_with_parent() -> None:
    """Make Linux terminate this process when its parent dies (prctl, PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
