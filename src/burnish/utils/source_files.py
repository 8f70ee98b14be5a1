"""Hashes of source code: of a Python file, and of the local files that it imports."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from burnish.utils.collection import without_garbage_collection


def source_digest(file: Path, others: Sequence[Path] = ()) -> str:
    """Return a hash of a Python file, and of the files that it imports from its folder, its package or the working
    directory. 32 hexadecimal digits; "" if the file cannot be read.

    Of an installed package, other files of the same package are included, but not those of other packages.

    Args:
        file: the file.
        others: files that belong to it in another way; their imports are included, too.
    """
    digest = hashlib.sha256()
    try:
        for raw in _sources([file.resolve(), *others]):
            digest.update(raw)
    except OSError:
        return ""
    return digest.hexdigest()[:32]


def is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package, to Python or to burnish, rather than to the user's own code."""
    return "site-packages" in file.parts or any(file.is_relative_to(root) for root in _INSTALLED)


_INSTALLED = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())


def _sources(files: Sequence[Path]) -> Iterator[bytes]:
    seen: set[Path] = set()
    waiting = list(reversed(files))
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            raw = path.read_bytes()
            yield raw
            waiting += _imported_files(path, raw)


def _imported_files(path: Path, raw: bytes) -> Iterator[Path]:
    """Yield the files of the same package, and the local files, that the code ``raw`` in ``path`` imports."""
    root = _root(path)
    is_of_package = is_installed(path)
    package = root / path.relative_to(root).parts[0]
    for level, names in _imports(raw):
        if level:
            folders = [path.parents[min(level, len(path.parents)) - 1]]
        else:
            folders = [root] if is_of_package else [path.parent, root, Path.cwd()]
        places = [folder.joinpath(*name.split(".")) for folder in folders for name in names]
        files = [file.resolve() for place in places for file in (Path(f"{place}.py"), place / "__init__.py")]
        yield from (file for file in files if file.is_file() and not (is_of_package and package not in file.parents))


@lru_cache(maxsize=256)
def _imports(raw: bytes) -> list[tuple[int, list[str]]]:
    """Return (number of leading dots, names of modules) for each import statement of Python code."""
    try:
        with without_garbage_collection():  # Python below 3.11.8 may fail if it runs meanwhile (gh-106905)
            tree = ast.parse(raw)
    except (SyntaxError, ValueError):  # it was not imported, or not as Python
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.append((0, [alias.name for alias in node.names]))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{name}".strip(".") for name in ("", *(alias.name for alias in node.names))]
            found.append((node.level, names))
    return found


def _root(path: Path) -> Path:
    """Return the folder that contains the top-level package of a file."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder
