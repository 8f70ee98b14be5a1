"""Words of the environment and of a command line that no option has read yet: numbers, and the hub that models and data
sets come from. The names of the hubs' variables are those of their own libraries, and LLaMA-Factory's for the choice
between them."""

from __future__ import annotations

import os


def number_in(text: str) -> float | None:
    """The number that ``text`` is; None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def count_in(text: str, usual: int = 0) -> int:
    """The whole number, 0 or above, that ``text`` is; ``usual`` where it is none."""
    return int(text) if text.strip().isdecimal() else usual


def uses_modelscope() -> bool:
    """Return whether ModelScope is asked in place of the Hugging Face hub."""
    return _is_set("USE_MODELSCOPE_HUB")


def is_offline() -> bool:
    """Return whether the user has switched off all requests to hubs."""
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
