"""Run one training with one or several processes on this machine and combine their measurements.

    python bench/processes.py COUNT SCRIPT [arguments ...]

The arguments are those of a training script of this folder. The output is one line of ``gauge.py`` for all processes:
labels and processor seconds are summed, memory is the maximum. It also has the share of time in which the training
thread is blocked, the time from the last step to the checkpoint on disk, and the size of the checkpoint. If a process
fails, the others are stopped and its output is reported. A single process is started in the same way.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gauge import MARK

HERE = Path(__file__).parent


def main(arguments: list[str]) -> None:
    count, script, *script_arguments = arguments
    results = [_figures(text) for text in outputs(int(count), [sys.executable, str(HERE / script), *script_arguments])]
    combined = combine(results)
    output = next((Path(item) for item in script_arguments if Path(item).is_absolute() and "/out/" in item), None)
    if output:
        combined["checkpoint_bytes"] = sum(file.stat().st_size for file in output.glob("checkpoint-*/**/*"))
    print(MARK + json.dumps(combined), flush=True)


def outputs(count: int, command: list[str]) -> list[str]:
    """Run processes and return the output of each.

    Raises:
        RuntimeError: with the last output of the first process that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115 (read at the end)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(count)}
    started = []
    for rank, file in enumerate(files):
        variables = (
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), **shared} if count > 1 else {}
        )
        started.append(subprocess.Popen(command, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT))
    waiting = dict(enumerate(started))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if process.returncode:
                for other in waiting.values():
                    other.kill()
                raise RuntimeError(f"rank {rank}: {_text(files[rank])[-1500:]}")
    return [_text(file) for file in files]


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _figures(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(text[-1500:])
    return dict(json.loads(lines[0].removeprefix(MARK)))


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of all processes into those of one training."""
    sums = {name: sum(each[name] for each in results) for name in ("labels", "cpu_s", "process_cpu_s")}
    largest = {
        name: max(each[name] for each in results) for name in ("peak_bytes", "steps_peak_bytes", "ends_s", "wall_s")
    }
    waited = sum(each["waited_s"] for each in results) / sum(each["wall_s"] for each in results)
    waits = [max(each) for each in zip(*(figures["save_waits_s"] for figures in results), strict=True)]
    return {**results[0], **sums, **largest, "waited_share": waited, "save_waits_s": waits}


if __name__ == "__main__":
    main(sys.argv[1:])
