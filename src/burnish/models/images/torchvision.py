"""Check whether the installed torchvision fits the installed torch: a broken one prevents transformers from loading
models."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from burnish.config.errors import Problem, UserError


def broken_torchvision() -> Problem | None:
    """Return a description of the problem with the installed torchvision; None if it works or is not installed."""
    if find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Problem(
            f"torchvision {_version('torchvision')} is not compatible with torch {_version('torch')} ({message}).",
            why="While it is installed, transformers cannot load many models, including text models.",
            remedy="Run: pip uninstall torchvision. burnish does not need it.",
        )
    return None


def raise_if_torchvision_is_broken(error: BaseException) -> None:
    """Raise UserError instead of ``error`` if a broken torchvision is the cause."""
    if problem := broken_torchvision():
        raise UserError(problem) from error


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "of an unknown version"
