"""The CPU allocator reuses memory that a training step frees."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.run

_FAULTS = """
import resource, torch
from burnish.parallel.memory import keep_freed_memory
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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is told, and this is another")
def test_step_reuses_memory_freed_by_previous_step() -> None:
    fresh, kept = (_faults(keeps) for keeps in (False, True))
    assert fresh >= 10 * 32  # 64 MiB or more per step, in pages of 2 MiB if the system has them
    assert kept < fresh / 5


def _faults(keeps: bool) -> int:
    """Return the page faults of the last ten of fifty steps in a new process."""
    return _printed(_FAULTS.format(keeps=keeps))


def _printed(code: str) -> int:
    """Return the number that ``code`` prints in a new process with default allocator and cache settings."""
    environment = {
        name: value for name, value in os.environ.items() if "MALLOC" not in name and "CACHE_CAPACITY" not in name
    }
    environment.pop("GLIBC_TUNABLES", None)
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(process.stdout)


def test_externally_configured_allocator_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.parallel.memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()


_GROWTH = """
import ctypes, torch
from burnish.parallel.memory import keep_few_kernels
if {bounds}:
    keep_few_kernels()

class Counts(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts
weight = torch.randn(64, 64, dtype=torch.bfloat16)
used = []
for rows in range(1, 601):
    torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    if rows in (300, 600):
        used.append(libc.mallinfo2().uordblks)
print(used[1] - used[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the allocator of glibc since 2.33 is asked")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
def test_kernel_cache_of_past_shapes_is_bounded() -> None:
    assert _printed(_GROWTH.format(bounds=True)) < 2**20


_HELD = """
import torch
from burnish.parallel.memory import keep_freed_memory

def held():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

assert keep_freed_memory({is_sharded})
torch.ones(8)
before, layers, between = held(), [], []
for _ in range(8):
    layers.append(torch.ones(2**22))
    between.append(torch.ones(2**16))
layers.clear()
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is told, and this is another")
def test_sharded_run_frees_gathered_layers_between_activations() -> None:
    whole, sharded = (_printed(_HELD.format(is_sharded=is_sharded)) for is_sharded in (False, True))
    assert whole >= 8 * 16  # MiB of layers
    assert sharded < 16
