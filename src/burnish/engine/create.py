"""The choice of an engine. In: options, and the processes that were started. Out: the engine; no other is imported."""

from __future__ import annotations

from burnish.core.protocols import Engine
from burnish.engine.base import SingleEngine
from burnish.engine.choices import EngineChoices
from burnish.engine.options import engine_name


def create_engine(options: EngineChoices) -> Engine:
    """The engine that the options and the number of processes ask for."""
    name = engine_name(options)
    if name == "single":
        return SingleEngine(options)
    if name == "accelerate":
        from burnish.engine.accelerate import AccelerateEngine

        return AccelerateEngine(options)
    if name == "fsdp":
        from burnish.engine.fsdp import FsdpEngine

        return FsdpEngine(options)
    if name == "deepspeed":
        from burnish.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(options)
    from burnish.engine.ddp import DdpEngine

    return DdpEngine(options)
