"""API for the images of datasets and predictions: thumbnails of files inside the roots.

In: the path of an image, as in a row of a plan or of predictions. Out: a JPEG of at most ``SIDE`` pixels, or with
``whole=1`` the file itself, which a conversation sends to a model. Files outside of the roots, also through links, and
files that are not images are rejected with the same error, whether they exist or not. Images that a dataset contains as
bytes are in the cache, named by the hash of their content.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from burnish.data.images.image_file import BadImage, in_memory, thumbnail
from burnish.serve.api.image_access import read_below
from burnish.serve.http.errors import APIError
from burnish.serve.page.site import Answer, Site
from burnish.utils.files import cache_home

SIDE, MOST_BYTES, MOST_WHOLE_BYTES, MOST_AT_ONCE = 384, 64_000_000, 20_000_000, 2
_KEPT = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


class Images:
    """One method per route."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._decoding = asyncio.Semaphore(MOST_AT_ONCE)

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Routes: method, path, handler."""
        yield "GET", "/api/images", self.image

    async def image(self, request: Request) -> Response:
        """One image. Raises APIError 404."""
        path, is_whole = request.query_params.get("path", ""), request.query_params.get("whole") == "1"
        async with self._decoding:
            body = await asyncio.to_thread(self._body, path, is_whole)
        return Response(body, media_type="application/octet-stream" if is_whole else "image/jpeg")

    def _body(self, path: str, is_whole: bool) -> bytes:
        content = self._content(path, MOST_WHOLE_BYTES if is_whole else MOST_BYTES)
        try:
            if is_whole:
                in_memory(content)
                return content
            return thumbnail(content, SIDE)
        except BadImage:
            raise _no_image() from None

    def _content(self, path: str, most_bytes: int) -> bytes:
        """The content of a file below a root, which is opened without following links."""
        cache = cache_home() / "images"
        if path.startswith(f"{cache}/") and _KEPT.fullmatch(path.removeprefix(f"{cache}/")):
            return _read(cache.resolve(), path.removeprefix(f"{cache}/"), most_bytes)
        allowed = self.site.places.within(path, "path") if path else None
        root = next((one for one in self.site.places.roots if allowed and allowed.is_relative_to(one)), None)
        if root is None or allowed is None:
            raise _no_image()
        return _read(root, str(allowed.relative_to(root)), most_bytes)


def _read(root: Path, inner: str, most_bytes: int) -> bytes:
    try:
        return read_below(root, inner, most_bytes, "path")
    except APIError:
        raise _no_image() from None


def _no_image() -> APIError:
    return APIError(404, "no_image", "The image does not exist or cannot be displayed.", param="path")
