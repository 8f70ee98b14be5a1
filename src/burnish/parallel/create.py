"""Create the engine that the options and the number of processes select. Other engines are not imported."""

from __future__ import annotations

from burnish.loop.protocols import Engine
from burnish.parallel.choices import EngineChoices
from burnish.parallel.options import engine_name
from burnish.parallel.single import SingleEngine


def create_engine(options: EngineChoices) -> Engine:
    """The engine that the options and the number of processes select."""
    name = engine_name(options)
    if name == "single":
        return SingleEngine(options)
    if name == "accelerate":
        from burnish.parallel.accelerate import AccelerateEngine

        return AccelerateEngine(options)
    if name == "fsdp":
        from burnish.parallel.fsdp.engine import FsdpEngine

        return FsdpEngine(options)
    if name == "deepspeed":
        from burnish.parallel.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(options)
    from burnish.parallel.ddp import DdpEngine

    return DdpEngine(options)
