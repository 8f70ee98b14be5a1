"""Images that a request names by URL or path, if the operator allows it.

Each URL and path in a chat request is replaced by a data URI. URLs of hosts that ``allow_image_urls`` does not list,
files outside of ``media_root``, and images that are too large are rejected.

This runs before the prompt is rendered and in separate threads, since a host may be slow and prompts are rendered one
at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from base64 import b64encode
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from burnish.serve.http.errors import APIError
from burnish.serve.http.fetching import NotFetchedError, fetch

if TYPE_CHECKING:
    from burnish.serve.api.messages import ChatMessage, TextPart
    from burnish.serve.api.requests import ChatRequest

FETCH_TIMEOUT_S = 10.0
URLS_DISABLED = "is a URL, and this server does not fetch URLs. Send a data URI. (See the option allow_image_urls.)"
FILES_DISABLED = "must be a data URI (data:image/png;base64,...); files are not opened. (See the option media_root.)"


class ImageAccess:
    """Opens the images that requests refer to.

    Args:
        hosts: hosts from which images may be fetched (``allow_image_urls``).
        root: folder whose files may be read (``media_root``); None for no files.
        most_bytes: maximum size of an image.
    """

    def __init__(self, hosts: Collection[str] = (), root: str | None = None, most_bytes: int = 20_000_000) -> None:
        self.hosts = frozenset(host.lower() for host in hosts)
        self.root = None if root is None else Path(root).expanduser().resolve()
        self.most_bytes = most_bytes

    def needs(self, request: ChatRequest) -> bool:
        """Return whether any image must be fetched, read from a file, or rejected."""
        return any(self._is_elsewhere(part) for message in request.messages for part in message.parts)

    def load_images(self, request: ChatRequest) -> ChatRequest:
        """Return the request with all images as data URIs.

        Raises:
            APIError: 400, with the path of the image.
        """
        messages = [self._message(message, place) for place, message in enumerate(request.messages)]
        return request.model_copy(update={"messages": messages})

    def _message(self, message: ChatMessage, place: int) -> ChatMessage:
        if not any(map(self._is_elsewhere, message.parts)):
            return message
        parts: Sequence[TextPart] = [
            self._part(part, f"messages[{place}].content[{number}].image_url.url") if self._is_elsewhere(part) else part
            for number, part in enumerate(message.parts)
        ]
        return message.model_copy(update={"content": list(parts)})

    def _is_elsewhere(self, part: TextPart) -> bool:
        if part.image_url is None:
            return False
        url = part.image_url.url
        return not url.startswith("data:") or len(url) > max_data_uri_length(self.most_bytes)

    def _part(self, part: TextPart, param: str) -> TextPart:
        assert part.image_url is not None
        content = self.content(part.image_url.url, param)
        url = f"data:image/any;base64,{b64encode(content).decode()}"
        return part.model_copy(update={"image_url": part.image_url.model_copy(update={"url": url})})

    def content(self, url: str, param: str) -> bytes:
        """Return the bytes at a URL or path. Raises APIError: 400."""
        if url.startswith("data:"):
            raise _refusal(
                f"has {len(url):,} characters; the maximum size of an image is {self.most_bytes:,} bytes.", param
            )
        if _is_address(url):
            if not self.hosts:
                raise access_disabled_error(url, param)
            try:
                return fetch(url, self.hosts, self.most_bytes, FETCH_TIMEOUT_S)
            except NotFetchedError as error:
                raise _refusal(str(error), param) from None
        if self.root is None:
            raise access_disabled_error(url, param)
        return read_below(self.root, _path_of(url, param), self.most_bytes, param)


def access_disabled_error(url: str, param: str) -> APIError:
    """Return the error for an image URL or path if fetching or file access is disabled."""
    return _refusal(URLS_DISABLED if _is_address(url) else FILES_DISABLED, param)


def _is_address(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def max_data_uri_length(num_bytes: int) -> int:
    """Return the maximum length of a data URI for an image of this size. Base64 encodes three bytes as four letters."""
    return num_bytes * 4 // 3 + 100


def _path_of(url: str, param: str) -> str:
    """Return the path of a ``file://`` URL, or a path unchanged."""
    if "://" not in url:
        return url
    try:
        found = urlsplit(url)
    except ValueError:
        raise _refusal("is not a valid URL.", param) from None
    if found.scheme != "file" or found.netloc not in ("", "localhost"):
        raise _refusal("must be a data URI, an http or https URL, or the path of a file.", param)
    return unquote(found.path)


def read_below(root: Path, path: str, most_bytes: int, param: str) -> bytes:
    """Return the content of a regular file below ``root``, after resolving links.

    Files outside of ``root`` and missing files get the same error, so that clients cannot find out which files exist.
    The folders are opened one by one without following links, since a link could be created after the check.

    Raises:
        APIError: 400.
    """
    refusal = _refusal("is not a file inside media_root.", param)
    try:
        real = Path(os.path.realpath(root / path, strict=True))
        inner = real.relative_to(root)
        handle = _open_below(root, inner.parts)
    except (OSError, ValueError):
        raise refusal from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise refusal
    with os.fdopen(handle, "rb") as file:
        content = file.read(most_bytes + 1) if status.st_size <= most_bytes else None
    if content is None or len(content) > most_bytes:
        raise _refusal(f"is larger than {most_bytes:,} bytes.", param)
    return content


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """Return a file descriptor for the file at ``parts`` below ``root``. Raises OSError, also for links."""
    if not parts:
        raise OSError(errno.EISDIR, "a folder")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Without O_NONBLOCK, opening a pipe would block.
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _refusal(message: str, param: str) -> APIError:
    return APIError(400, "unsupported_content", f'"{param}" {message}', param=param)
