"""One training by one or several processes of this machine, measured in each of them.

    python bench/processes.py COUNT SCRIPT [its words ...]

In: what a training script of this folder takes, the folder of the material and that of the output among it. Out: one
line of ``gauge.py`` over all processes: labels and processor seconds of all, the memory of the largest, the share of
time in which the thread that trains stands still, the time from the last step to the checkpoint on the disk, and its
size. A process that fails ends the others, and says why. One process is started the same way as two.
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


def main(words: list[str]) -> None:
    count, script, *more = words
    said = [_figures(text) for text in outputs(int(count), [sys.executable, str(HERE / script), *more])]
    found = joined(said)
    output = next((Path(word) for word in more if Path(word).is_absolute() and "/out/" in word), None)
    if output:
        found["checkpoint_bytes"] = sum(file.stat().st_size for file in output.glob("checkpoint-*/**/*"))
    print(MARK + json.dumps(found), flush=True)


def outputs(count: int, command: list[str]) -> list[str]:
    """Run processes. Returns what each of them said.

    Raises:
        RuntimeError: with the last words of the first that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115 (they are read at the end)
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(count)}
    started = []
    for rank, file in enumerate(files):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), **of_all} if count > 1 else {}
        started.append(subprocess.Popen(command, env=os.environ | place, stdout=file, stderr=subprocess.STDOUT))
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
    found = [line for line in text.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(text[-1500:])
    return dict(json.loads(found[0].removeprefix(MARK)))


def joined(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all processes as those of one training."""
    sums = {name: sum(each[name] for each in said) for name in ("labels", "cpu_s", "process_cpu_s")}
    largest = {
        name: max(each[name] for each in said) for name in ("peak_bytes", "steps_peak_bytes", "ends_s", "wall_s")
    }
    waited = sum(each["waited_s"] for each in said) / sum(each["wall_s"] for each in said)
    waits = [max(each) for each in zip(*(figures["save_waits_s"] for figures in said), strict=True)]
    return {**said[0], **sums, **largest, "waited_share": waited, "save_waits_s": waits}


if __name__ == "__main__":
    main(sys.argv[1:])
