"""CPU, memory and GPU usage for the header of the web UI; values that cannot be measured are omitted.

Out: ``{"cpu": 0.61, "memory": [used, total], "gpus": [...]}`` in shares and bytes, from psutil and, if it is installed,
``nvidia-smi``. PyTorch is not used, since it would allocate GPU memory.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from typing import Any

import psutil

FRESH_S = 4.0
_GPU_WORDS = ("--query-gpu=index,memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits")
_SLOWEST_S = 3.0


class Machine:
    """CPU usage is measured since the previous reading, so all users share one object."""

    def __init__(self) -> None:
        self.smi = shutil.which("nvidia-smi")
        self._times = _cpu_times()
        self._found: dict[str, Any] = {}
        self._found_s = -FRESH_S
        self._reading = threading.Lock()

    def use(self) -> dict[str, Any]:
        """Current usage, cached for ``FRESH_S`` seconds."""
        with self._reading:
            if time.monotonic() - self._found_s > FRESH_S:
                memory, before, self._times = psutil.virtual_memory(), self._times, _cpu_times()
                used = [memory.total - memory.available, memory.total]
                self._found = {"cpu": _share(before, self._times), "memory": used, "gpus": self._gpus()}
                self._found_s = time.monotonic()
            return self._found

    def _gpus(self) -> list[dict[str, Any]]:
        if self.smi is None:
            return []
        try:
            command = [self.smi, *_GPU_WORDS]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_SLOWEST_S, check=True)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return []
        return [gpu for line in ended.stdout.splitlines() if (gpu := gpu_of(line)) is not None]


def _cpu_times() -> tuple[float, float]:
    """Busy seconds and total seconds of all cores. psutil computes percentages per thread, but different threads call
    this."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # user contains guest
    return whole - idle, whole


def _share(before: tuple[float, float], now: tuple[float, float]) -> float:
    busy, whole = now[0] - before[0], now[1] - before[1]
    return min(max(busy / whole, 0.0), 1.0) if whole > 0 else 0.0


def gpu_of(line: str) -> dict[str, Any] | None:
    """``0, 38000, 81920, 97`` in MiB and percent; the use is None where the driver says ``[N/A]``."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4 or not all(cell.isdigit() for cell in cells[:3]):
        return None
    index, used, total = map(int, cells[:3])
    share = int(cells[3]) / 100 if cells[3].isdigit() else None
    return {"index": index, "memory": [used * 2**20, total * 2**20], "use": share}
