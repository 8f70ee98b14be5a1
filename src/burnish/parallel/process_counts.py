"""Number of processes of a run, on this machine and in total, from the environment and the options.

In: the variables that launchers set (WORLD_SIZE, RANK, LOCAL_RANK; NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT for
several machines), and ``num_processes``. Out: numbers. Does not import torch, so that processes start quickly. Refuses
several machines without the rank of this one or the address of the first.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from burnish.config.errors import Problem
from burnish.parallel.accelerate_launch import is_kept_on_cpu
from burnish.utils.environment import count_in, usable_cores

AUTO = "auto"
_MAX_TESTED_CPU_PROCESSES = 8
"""Number of processes on CPUs that is accepted on any machine."""
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def is_launched() -> bool:
    """Whether a launcher started this process, as one of several or as the only one."""
    return bool(os.environ.get("WORLD_SIZE") and os.environ.get("RANK"))


def num_machines() -> int:
    return _number("NNODES", 1)


def machine_rank() -> int:
    """The rank of this machine, from 0."""
    return _number("NODE_RANK", 0)


def processes_here(requested: int | str, use_cpu: bool) -> int:
    """Number of processes on this machine: as requested, or one per visible GPU, and at least one.

    Args:
        requested: ``num_processes``. For auto, NPROC_PER_NODE is read, as in other trainers.
        use_cpu: whether GPUs are ignored.
    """
    if requested != AUTO:
        return int(requested)
    return _number("NPROC_PER_NODE", 0) or (1 if use_cpu or is_kept_on_cpu() else max(1, num_gpus()))


class ProcessOptions(Protocol):
    """Options that this module reads."""

    num_processes: int | str
    use_cpu: bool
    engine: str
    max_restarts: int
    stall_timeout_s: float | None


def needs_launcher(options: ProcessOptions) -> bool:
    """Whether the run must be started and monitored by another process."""
    return not is_launched() and (world_size(options) > 1 or options.max_restarts > 0 or bool(options.stall_timeout_s))


def world_size(options: ProcessOptions) -> int:
    """Number of processes of the run on all machines: as launched, or as ``burnish train`` would start them."""
    if is_launched():
        return _number("WORLD_SIZE", 1)
    here = 1 if options.engine == "single" else processes_here(options.num_processes, options.use_cpu)
    return here * num_machines()


def num_gpus() -> int:
    """Number of GPUs visible to this process, without a library that would initialize them."""
    installed = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else None
    for variable in _DEVICE_VARIABLES:
        if variable in os.environ:
            return _num_listed(os.environ[variable], installed)
    if installed is not None:
        return installed
    if not any(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/mem_banks/0")):
        return 0
    import torch

    return torch.cuda.device_count()


def _num_listed(names: str, installed: int | None) -> int:
    """Number of devices that CUDA makes visible for a list of indices and identifiers.

    The list ends before the first entry that is no device, such as -1. A device that is listed twice hides all.

    Args:
        installed: number of devices of this machine, None if unknown.
    """
    visible: list[int | str] = []
    for name in map(str.strip, names.split(",")):
        index = re.match(r"[-+]?\d+", name)
        if index is None and not name.startswith(("GPU-", "MIG-")):
            break
        if index is not None and not 0 <= int(index[0]) < (math.inf if installed is None else installed):
            break
        visible.append(name if index is None else int(index[0]))
    return len(visible) if len(set(visible)) == len(visible) else 0


def launcher_problems() -> Iterator[Problem]:
    """Problems of the variables with which a launcher tells a process its rank."""
    values = {name: os.environ.get(name, "").strip() for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    unread = [name for name, text in values.items() if text and count_in(text, -1) < 0]
    if unread:
        yield from (Problem(f'{name} must be a non-negative integer. Received: "{values[name]}".') for name in unread)
        return
    size, rank = count_in(values["WORLD_SIZE"], 1), count_in(values["RANK"], 0)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and not os.environ.get(name)]
    if not missing and size > rank:
        return
    what = f"but {', '.join(missing)} must be set too" if missing else f"and RANK is {rank}; ranks are numbered from 0"
    yield Problem(
        f"WORLD_SIZE is {values['WORLD_SIZE'] or 'not set'}, {what}.",
        remedy="Start the processes with burnish train or torchrun, which set these variables; or unset WORLD_SIZE "
        "and RANK for a run in one process.",
    )


def problems_of_machines() -> Iterator[Problem]:
    """Report what is missing for a run over several machines."""
    if is_launched():
        return
    values = {name: os.environ.get(name, "").strip() for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE")}
    unread = [name for name, text in values.items() if text and count_in(text, -1) < 0]
    if unread:
        yield from (Problem(f'{name} must be a non-negative integer. Received: "{values[name]}".') for name in unread)
        return
    if num_machines() == 1:
        return
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not os.environ.get(name, "").strip()]
    if missing:
        what = f"NNODES is {num_machines()}, but {', '.join(missing)} must be set too."
        yield Problem(
            what, remedy="NODE_RANK is the index of the node, starting at 0; MASTER_ADDR is the address of node 0."
        )
    elif not 0 <= machine_rank() < num_machines():
        yield Problem(f"NODE_RANK is {machine_rank()}, but there are {num_machines()} nodes, numbered from 0.")


def too_many_processes(requested: int | str, use_cpu: bool) -> Iterator[Problem]:
    """Report more processes than this machine has devices: NCCL permits one per GPU. On CPUs, more processes than
    cores are slow but work, so up to eight may be started on any machine to try a run.

    Args:
        requested: ``num_processes``.
        use_cpu: whether GPUs are ignored.
    """
    count, on_cpu = processes_here(requested, use_cpu), use_cpu or is_kept_on_cpu() or not num_gpus()
    devices = usable_cores() if on_cpu else num_gpus()
    most = max(_MAX_TESTED_CPU_PROCESSES, devices) if on_cpu else devices
    if count <= most:
        return
    name = "num_processes" if requested != AUTO else "NPROC_PER_NODE"
    what = f"{name} must be at most {most} on this machine ({'CPU cores' if on_cpu else 'GPUs'}: {devices}). "
    what += f"Received: {count}."
    remedy = f"Set {name} to {most} or less." if on_cpu else f"Set {name} to the number of GPUs per machine."
    yield Problem(what, remedy=remedy, option="num_processes")


def _number(name: str, default: int) -> int:
    return count_in(os.environ.get(name, ""), default)


def free_port() -> int:
    """An unused port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
