"""The hub that models and data sets come from, as environment variables choose it, and whether it may be asked.

The names of the variables are those of the hubs' own libraries, and LLaMA-Factory's for the choice between them.
"""

from __future__ import annotations

import os

_YES = {"1", "true", "yes", "on"}


def uses_modelscope() -> bool:
    """Return whether ModelScope is asked in place of the Hugging Face hub."""
    return _is_set("USE_MODELSCOPE_HUB")


def is_offline() -> bool:
    """Return whether the user has switched off all requests to hubs."""
    return _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES
