"""Text as a number, for words of the environment and of a command line that no option has read yet."""

from __future__ import annotations


def number_in(text: str) -> float | None:
    """The number that ``text`` is; None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def count_in(text: str, usual: int = 0) -> int:
    """The whole number, 0 or above, that ``text`` is; ``usual`` where it is none."""
    return int(text) if text.strip().isdecimal() else usual
