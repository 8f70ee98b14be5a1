"""Memory that was freed is kept for the next tensor, where a step on a CPU would fetch it from the system anew.

In: nothing. Out: whether the allocator was told. glibc gives a large block back to the operating system when it is
freed, and the next tensor of that size takes fresh pages, each of which the system fills with zeros at its first use.
A training step frees and takes the same sizes again and again; gigabytes of pages per step are such pages. What was
freed stays with the process; its peak rose by up to 3 % (https://man7.org/linux/man-pages/man3/mallopt.3.html).

Another allocator than glibc's is left alone, and so is one that was set up from outside.
"""

from __future__ import annotations

import ctypes
import os
import platform

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = -1, 2**31 - 1

_KERNELS = 128
"""More than one step has shapes of products, so that none is made twice in it."""


def keep_few_kernels() -> None:
    """Bound what is kept of matrix products on a CPU, before the first of them is made.

    oneDNN and torch's layer above it each keep a kernel per shape, 0.3 MB, of the last 1,024 shapes, and batches
    that are laid flat have new shapes in each step. What was set from outside stays
    (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html).
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_KERNELS))


def keep_freed_memory() -> bool:
    """For the whole process and until its end."""
    is_set = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if is_set or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    # Either alone is not enough: a block of its own mapping is unmapped when it is freed, and the end of the heap is
    # cut off when it is free.
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST)) and bool(set_option(_TRIM_THRESHOLD, _NEVER))
