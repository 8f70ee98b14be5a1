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
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another system")
def test_a_tensor_of_the_size_of_a_freed_one_takes_its_memory() -> None:
    fresh, kept = (_faults(keeps) for keeps in (False, True))
    assert fresh >= 10 * 32  # 64 MiB ten times, in pages of 2 MiB where the system has such
    assert kept < fresh / 10


def _faults(keeps: bool) -> int:
    """Pages fetched by ten tensors made one after the other, in a process of its own."""
    mine = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    code = _FAULTS.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_an_allocator_that_was_set_up_from_outside_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.engine.memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
