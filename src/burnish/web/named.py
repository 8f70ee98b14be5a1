"""A model that was named when the page was started, besides those that it finds below its roots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NamedModel:
    """The model that ``burnish webchat`` is told to talk to.

    Args:
        words: that ``burnish api`` takes for it.
        folder: where their relative paths begin.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
