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


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
