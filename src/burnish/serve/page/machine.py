"""Use of this machine, for the head of the page: processors, memory, GPUs; what cannot be told is left out.

In: ``/proc`` and, where there is one, ``nvidia-smi``. Out: ``{"cpu": 0.61, "memory": [used, total], "gpus": [...]}`` in
shares and bytes. No library of models is asked, since that would take memory of the GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FRESH_S = 4.0
_GPU_WORDS = ("--query-gpu=index,memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits")
_SLOWEST_S = 3.0


class Machine:
    """The use of the processors is that since the reading before, so one object reads for all visitors.

    Args:
        proc: where the kernel tells of itself.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.proc, self.smi = proc, shutil.which("nvidia-smi")
        self._ticks = self._read_ticks()
        self._found: dict[str, Any] = {}
        self._found_s = -FRESH_S
        self._reading = threading.Lock()

    def use(self) -> dict[str, Any]:
        """The use as it was some seconds ago at most."""
        with self._reading:
            if time.monotonic() - self._found_s > FRESH_S:
                self._found = {"cpu": self._cpu(), "memory": self._memory(), "gpus": self._gpus()}
                self._found_s = time.monotonic()
            return self._found

    def _cpu(self) -> float | None:
        before, self._ticks = self._ticks, self._read_ticks()
        if before is None or self._ticks is None or self._ticks[1] <= before[1]:
            return None
        return (self._ticks[0] - before[0]) / (self._ticks[1] - before[1])

    def _read_ticks(self) -> tuple[int, int] | None:
        """(busy, all) ticks of all processors since the machine started."""
        with suppress(OSError, ValueError, IndexError):
            ticks = [int(word) for word in (self.proc / "stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and idle for a disk
        return None

    def _memory(self) -> list[int] | None:
        with suppress(OSError, ValueError, KeyError):
            text = (self.proc / "meminfo").read_text(encoding="ascii")
            lines = dict(line.split(":", 1) for line in text.splitlines())
            total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
            return [total - free, total]
        return None

    def _gpus(self) -> list[dict[str, Any]]:
        if self.smi is None:
            return []
        try:
            words = [self.smi, *_GPU_WORDS]
            ended = subprocess.run(words, capture_output=True, text=True, timeout=_SLOWEST_S, check=True)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return []
        return [gpu for line in ended.stdout.splitlines() if (gpu := gpu_of(line)) is not None]


def gpu_of(line: str) -> dict[str, Any] | None:
    """``0, 38000, 81920, 97`` in MiB and percent; the use is None where the driver says ``[N/A]``."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4 or not all(cell.isdigit() for cell in cells[:3]):
        return None
    index, used, total = map(int, cells[:3])
    share = int(cells[3]) / 100 if cells[3].isdigit() else None
    return {"index": index, "memory": [used * 2**20, total * 2**20], "use": share}
