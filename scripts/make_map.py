"""Writes docs/map.md: the house as it stands, floor by floor, from the code itself.

In: the syntax trees of ``src/burnish``, and the floors that ``tests/test_architecture.py`` holds. Out: the page: what
each room is for (the first paragraph of its ``__init__``), its files with the first sentence of each, and which rooms
it takes from. ``--check`` writes nothing, and fails where the page is not what would be written.

    python scripts/make_map.py
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "burnish"
PAGE = ROOT / "docs" / "map.md"

INTRODUCTION = """\
# A map of the house

<!-- Made by scripts/make_map.py from the code; a test holds it against it. -->

From the top floor to the bottom; imports point down, and rooms of one floor do not know each other. Begin with
[`loop/loop.py`](../src/burnish/loop/loop.py), which is the whole of training; [from a file to the
weights](from-file-to-weights.md) walks through the rooms with one record in hand.
"""


def page() -> str:
    """The whole of docs/map.md."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_architecture import FLOORS

    takes = imports_between_rooms()
    lines = [INTRODUCTION]
    for floor in FLOORS:
        for room in sorted(floor, key=lambda name: (name != "loop", name)):
            if (SOURCE / room).is_dir() and any((SOURCE / room).rglob("*.py")):
                lines += [*of_room(room, takes[room])]
    return "\n".join(lines).rstrip() + "\n"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def of_room(room: str, takes_from: set[str]) -> list[str]:
    """One room: what it is for, what it takes, its files."""
    below = ", ".join(f"`{name}`" for name in sorted(takes_from)) or "no other room"
    lines = [f"## {room}", "", purpose(SOURCE / room / "__init__.py"), "", f"Takes from {below}.", ""]
    lines += ["| file | |", "|---|---|"]
    for file in sorted((SOURCE / room).rglob("*.py"), key=lambda path: (len(path.parts), path)):
        if file.name != "__init__.py":
            name = file.relative_to(SOURCE / room).as_posix()
            lines.append(f"| [`{name}`](../src/burnish/{room}/{name}) | {first_sentence(file)} |")
    return [*lines, ""]


def purpose(file: Path) -> str:
    """The first paragraph of a room's own docstring, as one line."""
    text = ast.get_docstring(tree_of(file)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def first_sentence(file: Path) -> str:
    """The first sentence of a file's docstring, as one line of a table."""
    text = " ".join((ast.get_docstring(tree_of(file)) or "").split("\n\n")[0].split())
    sentence = text.split(". ")[0].rstrip(".")
    return sentence.replace("``", "`").replace("|", "\\|")


def imports_between_rooms() -> dict[str, set[str]]:
    """Room -> the rooms that its files import from."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        room = file.relative_to(SOURCE).parts[0]
        for node in ast.walk(tree_of(file)):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            parts = (module or "").split(".")
            if parts[0] == "burnish" and len(parts) > 1 and parts[1] != room and (SOURCE / parts[1]).is_dir():
                found[room].add(parts[1])
    return found


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/map.md is old: run scripts/make_map.py")
    PAGE.write_text(text, encoding="utf-8")
