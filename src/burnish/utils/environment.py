"""Environment variables and texts that are read before options exist: numbers, and the hub of models and datasets. The
names of the variables are those of the hubs' libraries, and LLaMA-Factory's for the choice of the hub."""

from __future__ import annotations

import os


def number_in(text: str) -> float | None:
    """``text`` as a number; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def count_in(text: str, usual: int = 0) -> int:
    """``text`` as a non-negative integer; ``usual`` if it is not one."""
    return int(text) if text.strip().isdecimal() else usual


def uses_modelscope() -> bool:
    """Whether ModelScope is used instead of the Hugging Face hub."""
    return _is_set("USE_MODELSCOPE_HUB")


def is_offline() -> bool:
    """Whether the user has disabled all requests to hubs."""
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; on macOS, the number of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


LAUNCHER_VARIABLES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR",
    "MASTER_PORT",
)  # fmt: skip
"""Variables that launchers set."""


def remove_empty_variables() -> None:
    """Remove variables of launchers that are set to an empty text, which means that they are not set."""
    for name in LAUNCHER_VARIABLES:
        if name in os.environ and not os.environ[name].strip():
            del os.environ[name]


def launcher_number(name: str, default: int) -> int:
    """Return the number in a variable that a launcher sets; ``default`` if it is empty or not set.

    Raises:
        ValueError: if it is not a non-negative integer.
    """
    text = os.environ.get(name, "").strip()
    if text and count_in(text, -1) < 0:
        raise ValueError(f'The environment variable {name} must be a non-negative integer. Received: "{text}".')
    return count_in(text, default)
