"""Machine usage in the header of the web UI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from burnish.serve.page import machine as module
from burnish.serve.page.machine import Machine, gpu_of


class Times(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float


def test_used_memory_excludes_available_and_is_cached_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([Times(10, 5, 85, 0), Times(60, 15, 115, 10), Times(200, 15, 115, 10)])  # 60 of 100 s were busy
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: next(readings))
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=400))
    machine = Machine()
    machine.smi = None
    assert machine.use() == {"cpu": pytest.approx(0.6), "memory": [600, 1000], "gpus": []}
    assert machine.use()["cpu"] == pytest.approx(0.6)  # the cached value


@pytest.mark.run
def test_missing_nvidia_smi_means_no_gpu(tmp_path) -> None:
    machine = Machine()
    machine.smi = str(tmp_path / "no-such-program")
    used, total = machine.use()["memory"]
    assert 0 < used < total
    assert machine.use()["gpus"] == []


@pytest.mark.run
def test_gpus_are_parsed_from_driver_output(tmp_path) -> None:
    program = tmp_path / "smi"
    program.write_text("#!/bin/sh\necho '0, 38000, 81920, 97'\necho '1, 5, 81920, [N/A]'\necho 'a fault'\n")
    program.chmod(0o755)
    machine = Machine()
    machine.smi = str(program)
    assert machine.use()["gpus"] == [
        {"index": 0, "memory": [38000 * 2**20, 81920 * 2**20], "use": 0.97},
        {"index": 1, "memory": [5 * 2**20, 81920 * 2**20], "use": None},
    ]
    assert gpu_of("No devices were found") is None
