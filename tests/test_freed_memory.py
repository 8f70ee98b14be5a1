"""The allocator of a training on a CPU keeps what a step frees for the next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, torch
from burnish.engine.memory import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()

def step():
    return [torch.ones(count) for count in (2**24, 3 * 2**18, 2**18, 2**20)]

for _ in range(40):  # until the heap has a place for each
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is told, and this is another")
def test_a_step_takes_the_memory_that_the_step_before_it_freed() -> None:
    fresh, kept = (_faults(keeps) for keeps in (False, True))
    assert fresh >= 10 * 32  # 64 MiB and more in each step, in pages of 2 MiB where the system has such
    assert kept < fresh / 5


def _faults(keeps: bool) -> int:
    """Pages fetched by the last ten of fifty steps, in a process of its own."""
    mine = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    code = _FAULTS.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_an_allocator_that_was_set_up_from_outside_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.engine.memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
