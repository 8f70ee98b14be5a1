"""Sizes of JPEG and PNG files from their headers.

Pillow parses all tables of a header, which takes eight times as long: most of the time to read 100,000 of them. Here
only the segments that determine size and orientation are parsed. ``upright_size`` returns None for anything unusual,
and for all other formats; Pillow then reads the file, with its own error messages.
"""

from __future__ import annotations

from struct import error as TooShort
from struct import unpack_from
from zlib import crc32

_BEGIN_BYTES, _LONG_BYTES = 4096, 1 << 18
"""Bytes that are read at first, and if the header does not end within them: EXIF may contain a thumbnail of 64 KB."""

# --- JPEG -------------------------------------------------------------------------------------------------------------

_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Markers of a frame header that Pillow decodes: baseline, extended, progressive."""
_SCAN = 0xDA
"""Marker of the pixels, at the end of the header."""
_TABLES = frozenset((0xC4, 0xDB, 0xDD, 0xE0, 0xED, 0xEE, 0xFE))
"""Markers before it without influence on the size: tables, restart interval, JFIF, Photoshop, Adobe, comment."""
_APP1, _APP2 = 0xE1, 0xE2
_EXIF, _XMP, _ICC = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0", b"ICC_PROFILE\0"
_ORIENTATION, _SHORT = 0x0112, 3
_UNIT_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
"""Type of a TIFF tag -> bytes per value."""

# --- PNG --------------------------------------------------------------------------------------------------------------

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MODES = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""Color type -> bit depths that Pillow decodes."""
_PLAIN = frozenset((b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"sBIT", b"bKGD", b"hIST", b"pHYs", b"tIME", b"cICP"))
"""Chunks without influence on size, orientation and number of frames."""


def upright_size(path: str) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG or PNG file with one frame, after its orientation; None: Pillow must read it."""
    try:
        with open(path, "rb", buffering=0) as file:
            begin = file.read(_BEGIN_BYTES)
            measure = _jpeg if begin.startswith(b"\xff\xd8\xff") else _png if begin.startswith(_SIGNATURE) else None
            if measure is None:
                return None
            try:
                return measure(begin)
            except TooShort:
                return measure(begin + file.read(_LONG_BYTES)) if len(begin) == _BEGIN_BYTES else None
    except (OSError, TooShort):
        return None


def _jpeg(begin: bytes) -> tuple[int, int] | None:
    """Return the size from the segments before the pixels. Raises TooShort if ``begin`` ends among them."""
    at, size, turn, has_exif, has_xmp = 2, None, None, False, False
    while True:
        mark, marker, length = unpack_from(">BBH", begin, at)
        end = at + 2 + length
        if end > len(begin):
            raise TooShort
        if mark != 0xFF:
            return None
        if marker == _SCAN:
            break
        if marker in _FRAMES and length >= 8:
            bits, height, width, layers = unpack_from(">BHHB", begin, at + 4)
            size = (width, height) if bits == 8 and layers in (1, 3, 4) else None
        elif marker == _APP1 and begin.startswith(_EXIF, at + 4) and not has_exif:
            has_exif, turn = True, _orientation(begin[at + 10 : end])
        elif marker == _APP1 and begin.startswith(_XMP, at + 4):
            has_xmp = True
        elif marker not in _TABLES and not (marker == _APP2 and begin.startswith(_ICC, at + 4)):
            return None
        at = end
    if size is None or (turn is None and (has_exif or has_xmp)):  # XMP may contain the orientation
        return None
    return size[::-1] if turn is not None and 5 <= turn <= 8 else size


def _orientation(exif: bytes) -> int | None:
    """Return the orientation in an EXIF segment; None if it has none, or is not as the standard describes it."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    found = None
    try:
        (directory,) = unpack_from(f"{order}I", exif, 4)
        (count,) = unpack_from(f"{order}H", exif, directory)
        for at in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, number, value = unpack_from(f"{order}HHII", exif, at)
            size = number * _UNIT_BYTES.get(kind, len(exif))
            if size > 4 and value + size > len(exif):
                return None  # Pillow ignores all tags that follow
            if tag == _ORIENTATION:
                if kind != _SHORT or number != 1:
                    return None
                (found,) = unpack_from(f"{order}H", exif, at + 8)
    except TooShort:
        return None
    return found


def _png(begin: bytes) -> tuple[int, int] | None:
    """Return the size from the chunks before the pixels. Raises TooShort if ``begin`` ends among them."""
    at, size = len(_SIGNATURE), None
    while True:
        length, name = unpack_from(">I4s", begin, at)
        if name == b"IDAT":
            return size
        end = at + 8 + length
        (checksum,) = unpack_from(">I", begin, end)
        if checksum != crc32(begin[at + 4 : end]):
            return None
        if name == b"IHDR" and length == 13 and size is None:
            width, height, bits, colors, *methods = unpack_from(">IIBBBBB", begin, at + 8)
            if bits not in _MODES.get(colors, ()) or any(methods[:2]):
                return None
            size = width, height
        elif name not in _PLAIN:
            return None
        at = end + 4
