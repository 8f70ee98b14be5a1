"""Files of a page, read once and served from memory by exact name: no path of a request ever reaches the disk.

Their address holds a hash of all of them, ``static/3f2a91c07d11/base.js``, so that a browser may keep them for ever,
and modules may name each other by their plain names.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from burnish.serve.http.errors import Refusal

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}


@dataclass(frozen=True)
class StaticFile:
    body: bytes
    zipped: bytes
    kind: str


class StaticFiles:
    """The files of some folders, by name; a folder within them is not looked into."""

    def __init__(self, folders: Sequence[Path], suffixes: frozenset[str] = frozenset(_KINDS)) -> None:
        paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in suffixes]
        self.files = {path.name: _file(path) for path in paths}
        digest = hashlib.sha256()
        for name, file in self.files.items():
            digest.update(name.encode() + b"\0" + hashlib.sha256(file.body).digest())
        self.version = digest.hexdigest()[:12]

    def address(self, name: str) -> str:
        """Relative to the root of the site."""
        assert name in self.files, f"there is no static file {name}"
        return f"static/{self.version}/{name}"

    async def answer(self, request: Request) -> Response:
        """The route ``/static/{version}/{name}``."""
        file = self.files.get(request.path_params["name"])
        if file is None or request.path_params["version"] != self.version:
            raise Refusal(404, "unknown_url", "There is nothing at this address.")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.zipped, headers={**headers, "content-encoding": "gzip"}, media_type=file.kind)
        return Response(file.body, headers=headers, media_type=file.kind)


def _file(path: Path) -> StaticFile:
    body = path.read_bytes()
    kind = _KINDS.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return StaticFile(body, gzip.compress(body, mtime=0), kind)
