"""Packages that extend burnish: each declares entry points in groups that begin with "burnish."."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

GROUP = "burnish."
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class Extension:
    """An installed package with the modules of its entry points.

    Args:
        name: name of the distribution.
        version: its version.
        members: (group without "burnish.", name of the entry point, module) of each entry point.
    """

    name: str
    version: str
    members: tuple[tuple[str, str, str], ...]

    @property
    def packages(self) -> frozenset[str]:
        """Top-level names of its modules."""
        return frozenset(module.partition(".")[0] for _, _, module in self.members)


def extensions() -> list[Extension]:
    """Return the installed packages that extend burnish, by name."""
    found: dict[str, Extension] = {}
    for each in distributions():
        points = [point for point in each.entry_points if point.group.startswith(GROUP)]
        members = tuple((point.group.removeprefix(GROUP), point.name, point.module) for point in points)
        if members:
            found.setdefault(each.name, Extension(each.name, each.version, members))
    return [found[name] for name in sorted(found)]


def packages_of(modules: Iterable[str]) -> list[str]:
    """Return name and version of the extensions that contain any of ``modules``."""
    tops = {module.partition(".")[0] for module in modules}
    return [f"{each.name} {each.version}" for each in extensions() if each.packages & tops]


def deepest_location(error: BaseException) -> str:
    """Return file, line and function of the deepest frame of an exception in burnish or in an extension, or ""."""
    tops = frozenset[str]().union(*(each.packages for each in extensions()))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_ours = frame.filename.startswith(_OURS)
        if is_ours or not tops.isdisjoint((*path.parts[:-1], path.stem)):
            file = f"burnish{os.sep}{frame.filename.removeprefix(_OURS)}" if is_ours else frame.filename
            return f"{file}, line {frame.lineno}, {frame.name}()"
    return ""
