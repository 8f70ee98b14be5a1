"""Write docs/map.md: an overview of the packages and modules by layer, generated from the code.

The layers are those of ``tests/test_architecture.py``. For each package, the page has its purpose (the first paragraph
of its ``__init__`` docstring), its modules with the first sentence of their docstrings, and the packages that it
imports. ``--check`` fails if the page is not up to date, and writes nothing.

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
# Modules

<!-- Made by scripts/make_map.py from the code; a test checks that it is up to date. -->

The packages of burnish by layer, from top to bottom. A package imports only lower layers, and packages of the same
layer do not import each other. Start with [`loop/loop.py`](../src/burnish/loop/loop.py), the training loop. [From a
file to the weights](from-file-to-weights.md) follows one record through the packages.
"""


def page() -> str:
    """Return the content of docs/map.md."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_architecture import LAYERS

    imported = imports_between_packages()
    lines = [INTRODUCTION]
    for layer in LAYERS:
        for package in sorted(layer, key=lambda name: (name != "loop", name)):
            if (SOURCE / package).is_dir() and any((SOURCE / package).rglob("*.py")):
                lines += [*section(package, imported[package])]
    return "\n".join(lines).rstrip() + "\n"


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def section(package: str, imported: set[str]) -> list[str]:
    """Return the section of a package."""
    below = ", ".join(f"`{name}`" for name in sorted(imported)) or "no other package"
    lines = [f"## {package}", "", purpose(SOURCE / package / "__init__.py"), "", f"Imports {below}.", ""]
    lines += ["| file | |", "|---|---|"]
    for file in sorted((SOURCE / package).rglob("*.py"), key=lambda path: (len(path.parts), path)):
        if file.name != "__init__.py":
            name = file.relative_to(SOURCE / package).as_posix()
            lines.append(f"| [`{name}`](../src/burnish/{package}/{name}) | {first_sentence(file)} |")
    return [*lines, ""]


def purpose(file: Path) -> str:
    """Return the first paragraph of a package docstring as one line."""
    text = ast.get_docstring(tree_of(file)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module docstring as one line of a table."""
    text = " ".join((ast.get_docstring(tree_of(file)) or "").split("\n\n")[0].split())
    sentence = text.split(". ")[0].rstrip(".")
    return sentence.replace("``", "`").replace("|", "\\|")


def imports_between_packages() -> dict[str, set[str]]:
    """Return package -> packages that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        package = file.relative_to(SOURCE).parts[0]
        for node in ast.walk(tree_of(file)):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            parts = (module or "").split(".")
            if parts[0] == "burnish" and len(parts) > 1 and parts[1] != package and (SOURCE / parts[1]).is_dir():
                found[package].add(parts[1])
    return found


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/map.md is outdated: run scripts/make_map.py")
    PAGE.write_text(text, encoding="utf-8")
