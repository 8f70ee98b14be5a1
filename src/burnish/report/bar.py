"""The bar of a line that shows how far something is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

GAP = "  "
_SHORTEST, _LONGEST = 5, 40


def bar(width: int, share: float, ascii_only: bool) -> list[Text]:
    """A bar of at most ``width`` columns, or nothing where that is too few: two kinds of line rather than two colours,
    so that it can be read without colour.

    Args:
        share: what is done, in [0, 1].
    """
    from rich.text import Text

    width = min(width, _LONGEST)
    if width < _SHORTEST:
        return []
    done, to_do = ("#", "-") if ascii_only else ("━", "─")
    filled = round(width * min(share, 1.0))
    return [Text.assemble((done * filled, "green"), (to_do * (width - filled), "dim"))]
