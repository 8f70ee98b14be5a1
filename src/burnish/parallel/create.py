"""Create the backend that the options and the number of processes select. Other backends are not imported."""

from __future__ import annotations

from burnish.loop.protocols import Parallel
from burnish.parallel.options import ParallelChoices
from burnish.parallel.selection import parallel_name
from burnish.parallel.single import SingleProcess


def create_parallel(options: ParallelChoices) -> Parallel:
    """The backend that the options and the number of processes select."""
    name = parallel_name(options)
    if name == "single":
        return SingleProcess(options)
    if name == "accelerate":
        from burnish.parallel.accelerate import AccelerateParallel

        return AccelerateParallel(options)
    if name == "fsdp":
        from burnish.parallel.fsdp.parallel import FsdpParallel

        return FsdpParallel(options)
    if name == "deepspeed":
        from burnish.parallel.deepspeed.parallel import DeepSpeedParallel

        return DeepSpeedParallel(options)
    from burnish.parallel.ddp import DdpParallel

    return DdpParallel(options)
