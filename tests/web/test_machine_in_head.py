"""The use of the machine that the page's head tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.serve.page.machine import Machine, gpu_of


def told(folder: Path, busy: int, idle: int) -> None:
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")


def test_the_use_is_that_since_the_reading_before_and_memory_is_what_is_not_available(tmp_path) -> None:
    told(tmp_path, 100, 100)
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    machine = Machine(tmp_path)
    machine.smi = None
    told(tmp_path, 160, 140)
    assert machine.use() == {"cpu": pytest.approx(0.6), "memory": [600 * 1024, 1000 * 1024], "gpus": []}
    told(tmp_path, 999, 999)
    assert machine.use()["cpu"] == pytest.approx(0.6)  # of a moment ago


@pytest.mark.run
def test_nothing_is_said_of_what_cannot_be_told(tmp_path) -> None:
    machine = Machine(tmp_path)
    machine.smi = str(tmp_path / "no-such-program")
    assert machine.use() == {"cpu": None, "memory": None, "gpus": []}


@pytest.mark.run
def test_gpus_are_read_from_the_drivers_own_table(tmp_path) -> None:
    program = tmp_path / "smi"
    program.write_text("#!/bin/sh\necho '0, 38000, 81920, 97'\necho '1, 5, 81920, [N/A]'\necho 'a fault'\n")
    program.chmod(0o755)
    machine = Machine(tmp_path)
    machine.smi = str(program)
    assert machine.use()["gpus"] == [
        {"index": 0, "memory": [38000 * 2**20, 81920 * 2**20], "use": 0.97},
        {"index": 1, "memory": [5 * 2**20, 81920 * 2**20], "use": None},
    ]
    assert gpu_of("No devices were found") is None
