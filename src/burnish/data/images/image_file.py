"""Image files: size from the header, and pixels.

``read_header`` returns an ``ImageFile`` with width and height from the header, after applying the EXIF orientation, so
that the tokens of a row are known without decoding. ``load`` returns the pixels. Bytes of a record and data URIs are
stored as files (``sources.py``), so that a row holds a path instead of pixels.

Files that are not images, images of more than ``MAX_PIXELS`` pixels, and files that have changed since their header
was read are rejected.

Pixels are upright RGB. Transparent colors are composited on white; 16-bit gray is scaled by 1/257; the first frame or
page is used. Everything else is converted to RGB by Pillow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO

from burnish.config.errors import MissingExtraError, UserError
from burnish.data.images.headers import upright_size
from burnish.utils.files import special_file_kind

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 178_956_970
"""Maximum number of pixels: the limit at which Pillow assumes a decompression bomb."""
MAX_THUMBNAIL_PIXELS = 50_000_000
"""Maximum number of pixels of an image for ``thumbnail``: 200 MB while it is decoded."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "MPO", "TIFF", "PPM", "AVIF", "JPEG2000", "DIB", "ICO", "PCX", "QOI",
            "SGI", "TGA")  # fmt: skip
"""Supported formats. Pillow has more; its EPS reader starts another program, Ghostscript."""
_AVERAGED, _BOX, _NEAREST = ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr"), 4, 0
_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 swap width and height
_ORIENTATION_KEYS = frozenset(("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"))
"""Keys of ``image.info`` from which Pillow reads an orientation."""
_TRANSPOSE_METHODS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
          7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip


class BadImage(ValueError):
    """A file that cannot be used as an image; the message continues a sentence that begins with its name."""


class DamagedImage(UserError):
    """An image with a valid header that cannot be decoded.

    Args:
        image: the image, whose record ``run.loop`` adds to the message.
        what: the end of the message, as of ``BadImage``.
    """

    def __init__(self, image: ImageFile, what: str) -> None:
        where = image.place if image.content else image.path
        super().__init__(f"the image {what}", where=where, remedy="Replace the file.")
        self.image, self.what = image, what


class UnsupportedMedia(BadImage):
    """A video in a record for a model that supports images only."""


@dataclass(frozen=True)
class ImageFile:
    """An image in a message, or at its place in a row.

    Args:
        path: absolute path of the file.
        width, height: size in pixels, after applying the EXIF orientation.
        num_bytes, modified_ns: size and modification time of the file when its header was read. With the path they
            identify the image.
        min_pixels, max_pixels: limits to which the image is resized before the image processor
            (``Family.given_sizes``); None: only the limits of the processor apply.
        place: name of the image in its record: ``images[1]``.
        is_animated: whether the file has several frames or pages; the first one is used.
        begin, end: range [begin, end) of its tokens in a row, including the markers among them.
        content: bytes of an image that is only in memory; ``path`` is then a name for them.
        frames: frames of a video, in order and of equal size; empty for an image. ``path`` is that of the first.
        fps: frames per second of a video.
        is_padded: whether the image is padded to a square instead of split into tiles (``Family.in_row``).
    """

    path: str
    width: int
    height: int
    num_bytes: int = 0
    modified_ns: int = 0
    min_pixels: int | None = None
    max_pixels: int | None = None
    place: str = ""
    is_animated: bool = False
    begin: int = 0
    end: int = 0
    content: bytes = field(default=b"", repr=False)
    frames: tuple[ImageFile, ...] = ()
    fps: float = 0.0
    is_padded: bool = False

    @property
    def identity(self) -> str:
        """Return a value that is equal for two images only if the model receives the same pixels."""
        own = f"{self.path}|{self.num_bytes}|{self.modified_ns}|{self.min_pixels}|{self.max_pixels}"
        own += "|padded" * self.is_padded
        return "|".join([own, str(self.fps), *(frame.identity for frame in self.frames)]) if self.frames else own

    @property
    def files(self) -> tuple[ImageFile, ...]:
        """The frames of a video; the image itself otherwise."""
        return self.frames or (self,)

    def shrunk(self, factor: float) -> ImageFile:
        """Return the image with at most the fraction ``factor`` of its current pixels."""
        num_pixels = min(self.width * self.height, self.max_pixels or self.width * self.height)
        most = int(num_pixels * factor)
        return replace(self, max_pixels=most, min_pixels=min(self.min_pixels or most, most))

    def as_json(self) -> dict[str, Any]:
        """Return the image as it is stored in a row; ``from_json`` reads it."""
        own = vars(self)
        found = {name: own[name] for name in _IMAGE_FIELDS}  # ten times as fast as asdict
        if self.content:
            found["content"] = self.content
        if self.frames:
            frames = [{name: getattr(frame, name) for name in _FRAME_FIELDS} for frame in self.frames]
            found |= {"frames": frames, "fps": self.fps}
        return found

    def at_tokens(self, begin: int, end: int) -> ImageFile:
        """Return the image with its position in a row, the tokens [begin, end)."""
        return ImageFile(**{**vars(self), "begin": begin, "end": end})  # faster than dataclasses.replace

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ImageFile:
        """Return the image that ``as_json`` stored."""
        frames = tuple(cls(**frame) for frame in found.get("frames") or ())
        optional = {"fps": found.get("fps") or 0.0, "is_padded": bool(found.get("is_padded"))}
        return cls(**{**found, "frames": frames, **optional})


_IMAGE_FIELDS = tuple(one.name for one in fields(ImageFile) if one.name not in ("content", "frames", "fps"))
_FRAME_FIELDS = ("path", "width", "height", "num_bytes", "modified_ns")


def images_of(row: Mapping[str, Any], prefix: str = "") -> list[ImageFile]:
    """Return the images of a row, in the order of their placeholders.

    Args:
        prefix: "kl_" for the second sequence of KTO. Both responses of a pair share the images with the prefix "".
    """
    return [ImageFile.from_json(one) for one in row.get(f"{prefix}images") or ()]


def files_of(row: Mapping[str, Any]) -> list[ImageFile]:
    """Return the image files of a row; of a video, its frames."""
    images = [*images_of(row), *images_of(row, "kl_")]
    return [file for image in images for file in image.files]


def read_header(path: str | Path, **known: Any) -> ImageFile:
    """Read the header of an image file without decoding it (0.1 ms). Args: known: additional fields.

    Raises:
        BadImage: if the file is not an image or too large.
        FileNotFoundError: if the file does not exist.
    """
    path = os.path.abspath(path)
    status = os.stat(path)
    if not S_ISREG(status.st_mode) and (kind := special_file_kind(Path(path))) != "a folder":
        raise BadImage(f"is {kind}, which is not supported.")  # a pipe without a writer would block
    width, height, is_animated = _measure(path, status.st_size, status.st_mtime_ns)
    of_file = {"num_bytes": status.st_size, "modified_ns": status.st_mtime_ns, "is_animated": is_animated, **known}
    return ImageFile(path, width, height, **of_file)


@lru_cache(maxsize=1 << 16)
def _measure(path: str, num_bytes: int, modified_ns: int) -> tuple[int, int, bool]:
    """Return width, height and ``is_animated`` of a file of this size and modification time.

    Records about the same image share the result. Raises: BadImage, OSError.
    """
    check_pillow()  # which decodes the pixels later
    if size := upright_size(path):
        check_size(*size)
        return *size, False
    with _open_image(path) as image:
        return _header(image)


def content_hash(image: ImageFile) -> str:
    """Return a hash of an image as the model sees it: the content of its files, and its pixel limits."""
    own = f"{image.min_pixels}|{image.max_pixels}|{image.width}x{image.height}{'|padded' * image.is_padded}"
    found = sha256(own.encode())
    for file in image.files:
        content = file.content or Path(file.path).read_bytes()
        found.update(f"|{len(content)}|".encode() + content)
    return found.hexdigest()


def in_memory(content: bytes, **known: Any) -> ImageFile:
    """Read the header of an image that is not stored as a file. Args: known: additional fields. Raises: BadImage."""
    name = f"memory:{sha256(content).hexdigest()}"
    with _open_image(BytesIO(content)) as image:
        width, height, is_animated = _header(image)
    return ImageFile(name, width, height, is_animated=is_animated, num_bytes=len(content), content=content, **known)


def _header(image: Image) -> tuple[int, int, bool]:
    """Return width and height after the EXIF orientation, and whether there are several frames. Raises: BadImage."""
    width, height = image.size
    if orientation(image) >= 5:
        width, height = height, width
    # The second image of an MPO file of a phone is a preview or another exposure.
    is_animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    check_size(width, height)
    return width, height, is_animated


def check_size(width: int, height: int) -> None:
    """Raise BadImage for an image that is too large or empty."""
    if width * height > MAX_PIXELS:
        raise BadImage(f"has {width}x{height} pixels; the maximum is {MAX_PIXELS:,}.")
    if not width * height:
        raise BadImage(f"has {width}x{height} pixels.")


def load(image: ImageFile) -> Image:
    """Decode an image to RGB, with the size from its header.

    Raises:
        DamagedImage: if the file is truncated or not an image.
        UserError: if it has changed since its header was read.
    """
    return upright(image).convert("RGB")


def upright(image: ImageFile) -> Image:
    """Like ``load``, before gray, palette and CMYK images are converted to RGB."""
    if image.content:
        return _decode(BytesIO(image.content), image, len(image.content))
    path = Path(image.path)
    if not path.is_file():
        raise UserError("the image no longer exists.", where=image.path, remedy="Restore the file.")
    size = path.stat().st_size
    if image.num_bytes and size != image.num_bytes:
        what = f"the image file has changed since the dataset was tokenized ({size:,} bytes, was {image.num_bytes:,})."
        raise UserError(what, where=image.path, remedy="Restore the file, or start a new run.")
    return _decode(image.path, image, size)


def _decode(file: str | BytesIO, image: ImageFile, size: int) -> Image:
    try:
        with _open_image(file) as opened:
            turn = orientation(opened)
            opened.load()
            return _rotate(_without_alpha(opened), turn)
    except (BadImage, OSError, SyntaxError, EOFError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise DamagedImage(image, decoding_error_in_words(error, size)) from None


def thumbnail(content: bytes, side: int) -> bytes:
    """Return a JPEG thumbnail: upright, on white, at most ``side`` pixels wide and high.

    Raises:
        BadImage: if the file is not an image, is damaged, or needs too much memory to decode.
    """
    made = BytesIO()
    try:
        with _open_image(BytesIO(content)) as opened:
            turn = orientation(opened)
            opened.draft("RGB", (side, side))  # a JPEG is decoded at a fraction of its size
            if opened.width * opened.height > MAX_THUMBNAIL_PIXELS:
                raise BadImage(f"has {opened.width}x{opened.height} pixels, too many to display.")
            opened.load()
            scale = min(1.0, side / max(opened.size))
            size = (max(1, round(opened.width * scale)), max(1, round(opened.height * scale)))
            small = opened.resize(size, _BOX if opened.mode in _AVERAGED else _NEAREST)
            _rotate(_without_alpha(small), turn).convert("RGB").save(made, "JPEG", quality=85)
    except (OSError, SyntaxError, EOFError, ValueError) as error:
        raise error if isinstance(error, BadImage) else BadImage(decoding_error_in_words(error, len(content))) from None
    return made.getvalue()


def decoding_error_in_words(error: BaseException, num_bytes: int) -> str:
    """Return the end of the error message for an image with a valid header that cannot be decoded."""
    if isinstance(error, BadImage):
        return str(error)
    if "truncated" in str(error):
        return f"is truncated: the file ends after {num_bytes:,} bytes, before the end of the image data."
    return f"is corrupted and cannot be decoded ({error})."


def orientation(image: Image) -> int:
    """Return the EXIF orientation, 1 to 8, without decoding. Pillow would decode a PNG without EXIF to look for it
    after the pixels.

    Returns 1 for TIFF, which Pillow rotates itself.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    if not _ORIENTATION_KEYS.intersection(image.info):  # a third of the time of a header
        return 1
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def check_pillow() -> None:
    """Raise MissingExtraError if Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise MissingExtraError("Pillow", "an image", "images") from None


def _open_image(path: str | BytesIO) -> Image:
    """Open a file or bytes as an image without decoding its pixels."""
    import warnings

    check_pillow()
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # half of MAX_PIXELS
        try:
            return Image.open(path, formats=_formats())
        except Image.DecompressionBombError:
            width, height = _size_of_large(path)
            raise BadImage(f"has {width}x{height} pixels; the maximum is {MAX_PIXELS:,}.") from None
        except UnidentifiedImageError:
            raise BadImage(_not_an_image(path)) from None
        except (OSError, SyntaxError, ValueError) as error:
            if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
                raise
            raise BadImage(f"is not an image that can be read ({error}).") from None


@cache
def _formats() -> list[str]:
    """Return the supported formats that this version of Pillow has."""
    from PIL import Image

    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _size_of_large(path: str | BytesIO) -> tuple[int, int]:
    """Return the size in a header for which ``Image.open`` fails because it is too large."""
    from PIL import Image

    with _bytes_of(path) as file:
        begin = file.read(16)
        for factory, accepts in Image.OPEN.values():
            if accepts is not None and accepts(begin) is True:
                file.seek(0)
                return factory(file, "").size
    return 0, 0


def _bytes_of(path: str | BytesIO) -> BinaryIO:
    return open(path, "rb") if isinstance(path, str) else BytesIO(path.getvalue())


def _not_an_image(path: str | BytesIO) -> str:
    with _bytes_of(path) as file:
        begin = file.read(12)
    if not begin:
        return "is empty (0 bytes)."
    shown = begin.decode("utf-8", "replace")
    beginning = f'begins "{shown}"' if shown.isprintable() else f"begins with the bytes {begin[:8].hex(' ')}"
    return f"is not an image ({beginning})."


def _without_alpha(image: Image) -> Image:
    """Composite transparent colors on white, and scale 16-bit gray to 8 bits."""
    import numpy
    from PIL import Image as pil

    if image.mode.startswith("I"):
        values = numpy.asarray(image).astype(numpy.float64)
        return pil.fromarray(numpy.clip(numpy.rint(values / 257), 0, 255).astype(numpy.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return pil.alpha_composite(pil.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image


def _rotate(image: Image, turn: int) -> Image:
    from PIL import Image as pil

    return image.transpose(pil.Transpose[_TRANSPOSE_METHODS[turn]]) if turn in _TRANSPOSE_METHODS else image
