"""Find the images that a record names.

Accepted are a path, a ``file://`` URL, a data URI, bytes, ``{"bytes": ..., "path": ...}`` as in the Image feature of
``datasets``, and a Pillow image. The result is an ``ImageFile``. Images that are not files are stored in the cache
under the hash of their content ($BURNISH_CACHE or ~/.cache/burnish, folder ``images``). Web URLs are rejected (nothing
is downloaded during training), and so are missing files and files that are not images.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from hashlib import sha256
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from burnish.config.errors import UserError
from burnish.data.images.image_file import BadImage, ImageFile, in_memory, read_header
from burnish.utils.files import cache_home, check_below_roots, temporary_path

_NOT_BASE64_CHARACTER = re.compile(r"[^A-Za-z0-9+/=\s]")
_BASE64_PREFIXES = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
_SHOWN = 60


class MissingImage(BadImage):
    """A file that does not exist. Args: nearest: a file with the same name in a nearby folder, or None."""

    def __init__(self, message: str, nearest: Path | None) -> None:
        super().__init__(message)
        self.nearest = nearest


@dataclass(frozen=True)
class MediaReader:
    """Finds the images of a dataset, and sets their size limits.

    Args:
        folders: folders that are searched for relative paths, in this order.
        min_pixels, max_pixels: see ``ImageFile``; ``video_...`` are those of videos.
        video_fps: frames per second of a video whose record does not set it.
        model_type: model type of a text-only model, for the error; "" if images are supported.
    """

    folders: Sequence[Path] = ()
    min_pixels: int | None = None
    max_pixels: int | None = None
    model_type: str = ""
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_fps: float = 2.0
    _looked_for: set[str] = field(default_factory=set, repr=False, compare=False)

    def image(self, value: Any, place: str, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageFile:
        """Return the image that a record names.

        Args:
            place: name of the image in its record, for example ``images[1]``.
            min_pixels, max_pixels: limits of this image.

        Raises:
            BadImage: with a sentence that begins with the place.
        """
        path, shown, is_stored = self._path(value, place)
        named = f"{place} {shown}".strip()
        try:
            known = {"modified_ns": 0} if is_stored else {}  # its name says what is in it
            least, most = limits_of_part(min_pixels, max_pixels, self.min_pixels, self.max_pixels)
            return read_header(path, place=place, min_pixels=least, max_pixels=most, **known)
        except BadImage as error:
            raise BadImage(f"{named} {error}") from None
        except OSError as error:
            if _is_base64_image(value):
                raise BadImage(
                    f'{named} is base64 without a data URI prefix. Prepend "data:image/jpeg;base64,".'
                ) from None
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise BadImage(f"{named} cannot be read: {error.strerror}.") from None
            looked = " and ".join(map(str, self.folders)) or str(Path.cwd())
            raise MissingImage(f"{named} was not found. Searched: {looked}.", self._nearest(Path(path).name)) from None
        except UnicodeEncodeError:
            raise BadImage(f"{named} cannot be read: its path is not valid Unicode.") from None

    def from_data_uri(self, uri: str, place: str, max_pixels: int | None = None) -> ImageFile:
        """Return the image of a data URI of a request, which is kept in memory only. Raises BadImage."""
        try:
            found = in_memory(_decode_uri(uri, place), place=place)
        except BadImage as error:
            message = str(error)
            raise BadImage(message if message.startswith(place) else f"{place} {message}") from None
        limits = [limit for limit in (max_pixels, self.max_pixels) if limit is not None]
        least, most = limits_of_part(None, min(limits, default=None), self.min_pixels, None)
        return replace(found, min_pixels=least, max_pixels=most)

    def _nearest(self, name: str) -> Path | None:
        """Return a file of this name at most two levels below the folders or their parents; the search runs once."""
        if self._looked_for:
            return None
        self._looked_for.add(name)
        places = [*self.folders, *(folder.parent for folder in self.folders)]
        found = (one for place in places for inner in ("*", "*/*") for one in place.glob(f"{inner}/{escape(name)}"))
        return next((one for one in islice(found, 1) if one.is_file()), None)

    def _path(self, value: Any, place: str) -> tuple[str, str, bool]:
        """Return the path of an image, its name for error messages, and whether it is stored in the cache."""
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), value)
        if isinstance(value, bytes | bytearray):
            return store_image(bytes(value)), "", True
        if isinstance(value, str) and value.startswith("data:"):
            return store_image(_decode_uri(value, place)), "", True
        if isinstance(value, str | os.PathLike):
            return self.file(os.fspath(value), place), f'"{_shorten(os.fspath(value))}"', False
        if callable(getattr(value, "save", None)) and hasattr(value, "getexif"):
            return store_image(_as_png(value)), "", True
        received = type(value).__name__ if value is not None else "null"
        raise BadImage(f"{place} must be a path, a data URI, bytes or a Pillow image. Received: {received}.")

    def file(self, path: str, place: str) -> str:
        """Return the path of a file or folder that a record names. Raises BadImage if it must not be opened."""
        scheme = urlsplit(path).scheme.lower() if "://" in path else ""
        if scheme == "file":
            path = unquote(urlsplit(path).path)
        elif scheme:
            raise BadImage(
                f"{place} is a URL. Images are not downloaded during training. Download the image first, and write its "
                "path."
            )
        if not path.strip():
            raise BadImage(f"{place} is an empty path.")
        if "\0" in path:
            raise BadImage(f"{place} is a path that contains a null byte.")
        path = os.path.expanduser(path)
        places = [os.path.join(folder, path) for folder in self.folders] or [path]
        found = next(filter(os.path.exists, places), places[0]) if len(places) > 1 else places[0]
        try:
            check_below_roots(found)
        except UserError as error:
            raise BadImage(f"{place}: {error}") from None
        return found


def limits_of_part(
    min_pixels: int | None, max_pixels: int | None, least: int | None, most: int | None
) -> tuple[int | None, int | None]:
    """Return the minimum and maximum number of pixels of an image: its own limits, otherwise those of the dataset as
    far as they do not contradict its own."""
    if min_pixels is None and max_pixels is not None and least is not None:
        least = min(least, max_pixels)
    if max_pixels is None and min_pixels is not None and most is not None:
        most = max(most, min_pixels)
    return min_pixels or least, max_pixels or most


def store_image(content: bytes) -> str:
    """Store content in the cache unless it exists, and return the path of the file."""
    name = sha256(content).hexdigest()
    path = cache_home() / "images" / name[:2] / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = temporary_path(path)
        partial.write_bytes(content)
        partial.replace(path)
    return str(path)


def _is_base64_image(value: Any) -> bool:
    """Return whether a value is the base64 of a JPEG, PNG, GIF or WebP file, rather than a path."""
    return isinstance(value, str) and value.startswith(_BASE64_PREFIXES) and len(value) > _SHOWN


def _decode_uri(uri: str, place: str) -> bytes:
    head, _, body = uri.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise BadImage(f'{place}: the data URI must begin with "data:image/...;base64,". Received: "{_shorten(head)}".')
    if broken := _NOT_BASE64_CHARACTER.search(body):
        raise BadImage(f"{place}: invalid base64 at character {broken.start() + 1:,}.")
    try:
        return b64decode(body)
    except (Error, ValueError):
        letters = len(body)
        raise BadImage(f"{place}: incomplete base64: it ends after character {letters:,}.") from None


def _as_png(image: Any) -> bytes:
    """Encode an image in memory as PNG, upright."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        upright = upright.convert("I;16" if upright.mode == "I" else "RGB")  # PNG has at most 16 bits per channel
    file = BytesIO()
    upright.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
