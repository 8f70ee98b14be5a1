"""Check that paths from the web UI are inside the roots.

In: text. Out: a resolved path. Rejected with the same error, whether the path exists or not: a path outside the roots,
a symbolic link to the outside, a NUL character, a path that is too long.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from burnish.serve.http.errors import APIError
from burnish.utils.files import expand_user, is_below


class Roots:
    """The root folders. Relative paths start in the first one, which is also the working directory of new runs."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = [expand_user(root).resolve() for root in roots]

    @property
    def first(self) -> Path:
        return self.roots[0]

    def within(self, text: str, option: str, start: Path | None = None) -> Path:
        """The path that ``text`` names, with links resolved.

        Args:
            start: the folder that relative paths begin in; the first root by default.
        Raises:
            APIError: 422 if the path is not allowed.
        """
        outside = APIError(
            422, "outside", f'"{option}" must be a path inside {self.first}. Received: "{text[:200]}".', param=option
        )
        is_address = "://" in text or "::" in text  # fsspec reads file:///etc/passwd as a local file
        if "\0" in text or any(len(os.fsencode(part)) > 255 for part in text.split("/")) or len(text) > 4000:
            raise outside
        try:
            path = Path(os.path.expanduser(text))
            resolved = (path if path.is_absolute() else (start or self.first) / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise outside from error
        if is_address or not any(resolved.is_relative_to(root) for root in self.roots):
            raise outside
        return resolved

    def contains(self, path: Path) -> bool:
        """Return whether a path, with links resolved, is inside a root."""
        return is_below(path, self.roots)

    def display_path(self, path: Path) -> str:
        """The path relative to the first root if it is inside it, else absolute."""
        resolved = path.resolve()
        return str(resolved.relative_to(self.first)) if resolved.is_relative_to(self.first) else str(resolved)
