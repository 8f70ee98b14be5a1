"""Static files, read once and served from memory by exact name; a request path never reaches the file system.

The URL contains a hash of all files, ``static/3f2a91c07d11/base.js``, so that browsers can cache them indefinitely, and
modules can import each other by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from burnish.serve.http.errors import APIError

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json",
          ".woff2": "font/woff2"}  # fmt: skip
_COMMENTS = re.compile(rb"^[ \t]*//[^\n]*|/\*\*\s.*?\*/ ?", re.MULTILINE | re.DOTALL)
"""Matches the comments of a script: whole lines and JSDoc."""


class MemoryFiles:
    """The files of some folders, by name. Subfolders are not included.

    Args:
        folders: what is served.
        joined: further names, each for several of the files in one, in this order. They compress better and need one
            response.
    """

    def __init__(self, folders: Sequence[Path], joined: Mapping[str, Sequence[str]]) -> None:
        paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _KINDS]
        self.files = {path.name: (_content(path), _KINDS[path.suffix]) for path in paths}
        for name, parts in joined.items():
            assert name not in self.files, f"the name {name} is taken"
            self.files[name] = (b"\n".join(self.files[part][0] for part in parts), _KINDS[Path(name).suffix])
        content = b"".join(hashlib.sha256(name.encode() + body).digest() for name, (body, _) in self.files.items())
        self.version = hashlib.sha256(content).hexdigest()[:12]

    def address(self, name: str) -> str:
        """Return the URL of a file, relative to the root of the site."""
        assert name in self.files, f"there is no static file {name}"
        return f"static/{self.version}/{name}"

    async def answer(self, request: Request) -> Response:
        """The route ``/static/{version}/{name}``."""
        body, kind = self.files.get(request.path_params["name"], (b"", ""))
        if not kind or request.path_params["version"] != self.version:
            raise APIError(404, "unknown_url", "This URL does not exist.")
        return Response(body, headers={"cache-control": "public, max-age=31536000, immutable"}, media_type=kind)


def _content(path: Path) -> bytes:
    """Return the content of a file. The comments of a script, a fifth of its compressed size, are removed; its line
    numbers stay the same."""
    body = path.read_bytes()
    if path.suffix != ".js" or path.stem.endswith(".min"):
        return body
    return _COMMENTS.sub(lambda comment: b"\n" * comment[0].count(b"\n"), body)
