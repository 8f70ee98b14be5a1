"""Numbers of a model's config."""

from __future__ import annotations

from typing import Any


def largest_over_layers(config: Any, name: str) -> int | None:
    """Return a number of a transformers config, or None if it has none. If its layers differ, as the heads of Gemma 4,
    the largest one: the config itself raises an error then (``per_layer_config``)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        numbers = [getattr(layer, name, None) for layer in config.per_layer_config]
        return max((number for number in numbers if isinstance(number, int)), default=None)
    return value if isinstance(value, int) else None
