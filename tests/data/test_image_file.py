"""Image files: the size from the header, and the pixels that the model receives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from burnish.config.errors import UserError
from burnish.data.images import image_file
from burnish.data.images.headers import upright_size
from burnish.data.images.image_file import BadImage, load, orientation, read_header


def make_image(width: int = 6, height: int = 4, mode: str = "RGB") -> Image.Image:
    values = numpy.arange(width * height * 3, dtype=numpy.uint8).reshape(height, width, 3)
    return Image.fromarray(values).convert(mode)


def save(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
def test_header_and_pixels_follow_exif(tmp_path, turn, kind):
    exif = Image.Exif()
    exif[0x0112] = turn
    path = save(tmp_path, make_image(), f"p.{kind}", exif=exif)
    header = read_header(path)
    assert (header.width, header.height) == ((4, 6) if turn >= 5 else (6, 4))
    image = load(header)
    assert image.size == (header.width, header.height)
    if kind == "png" and turn == 6:  # a quarter turn to the right: the first row becomes the last column
        assert (numpy.asarray(image)[:, -1] == numpy.asarray(make_image())[0]).all()


def exif_of(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F] = "camera"
    exif[0x0112] = turn
    return exif


PLAIN_JPEGS = (
    {},
    {"progressive": True},
    {"comment": b"a comment"},
    {"icc_profile": b"profile" * 50},
    {"icc_profile": b"profile" * 5000},
    {"dpi": (72, 72)},
    {"exif": exif_of(3), "xmp": b"<x:xmpmeta/>"},
)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", PLAIN_JPEGS, ids=",".join)
def test_the_size_of_a_usual_jpeg_needs_no_decoder(tmp_path, mode, options):
    path = save(tmp_path, make_image(mode=mode), "p.jpg", **options)
    assert upright_size(str(path)) == (6, 4)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_the_size_of_a_usual_png_needs_no_decoder(tmp_path, mode):
    image = make_image().convert("I").convert(mode) if mode == "I;16" else make_image(mode=mode)
    path = save(tmp_path, image, "p.png", dpi=(72, 72), **({"transparency": 0} if mode == "P" else {}))
    assert upright_size(str(path)) == (6, 4)


def test_other_headers_are_left_to_pillow(tmp_path):
    long = save(tmp_path, make_image(), "long.jpg", icc_profile=b"profile" * 50_000)
    text = PngInfo()
    text.add_text("Title", "a title")
    others = [
        save(tmp_path, make_image(), "untagged.jpg", exif=Image.Exif()),
        save(tmp_path, make_image(), "described.jpg", xmp=b'<rdf tiff:Orientation="6"/>'),
        save(tmp_path, make_image(), "turned.png", exif=exif_of(6)),
        save(tmp_path, make_image(), "several.mpo", save_all=True, append_images=[make_image()]),
        save(tmp_path, make_image(), "several.png", save_all=True, append_images=[make_image(mode="L").convert("RGB")]),
        save(tmp_path, make_image(), "text.png", pnginfo=text),
        save(tmp_path, make_image(), "p.webp"),
        tmp_path / "missing.jpg",
    ]
    others[0].write_bytes(_with_exif(others[0].read_bytes(), b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"))
    assert [upright_size(str(path)) for path in others] == [None] * len(others)
    assert [read_header(path).width for path in [long, *others[:-1]]] == [6, 6, 4, 4, 6, 6, 6, 6]


def _with_exif(jpeg: bytes, exif: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + jpeg[2:]


@pytest.mark.filterwarnings("ignore:Tag data larger", "ignore:Truncated File Read")
@pytest.mark.parametrize("name", ["p.jpg", "turned.jpg", "p.png"])
def test_a_file_with_a_damaged_header_is_read_as_pillow_reads_it(tmp_path, name):
    options = {"exif": exif_of(6)} if "turned" in name else {}
    content, path = save(tmp_path, make_image(), name, **options).read_bytes(), tmp_path / f"damaged_{name}"
    damaged = [content[:length] for length in range(3, len(content), 7)]
    damaged += [content[:at] + b"\xa5" + content[at + 1 :] for at in range(3, len(content), 3)]
    num_read = 0
    for damaged_content in damaged:
        path.write_bytes(damaged_content)
        if size := upright_size(str(path)):
            try:
                with Image.open(path) as image:
                    assert (image.size[::-1] if orientation(image) >= 5 else image.size) == size
            except UnidentifiedImageError:  # damage of tables, which is detected when the pixels are decoded
                continue
            num_read += 1
    assert num_read > 10


def test_a_header_is_read_once_for_all_records_about_an_image(tmp_path, monkeypatch):
    path = save(tmp_path, make_image(), "p.jpg")
    first = read_header(path, place="images[0]")
    monkeypatch.setattr(image_file, "upright_size", lambda path: pytest.fail("was read again"))
    assert read_header(path, place="images[1]") == replace(first, place="images[1]")
    monkeypatch.undo()
    save(tmp_path, make_image(8, 4), "p.jpg")
    assert read_header(path).width == 8


def test_transparent_pixels_become_white(tmp_path):
    for mode in ("RGBA", "LA"):
        transparent = make_image(mode=mode)
        transparent.putalpha(0)
        assert (numpy.asarray(load(read_header(save(tmp_path, transparent, f"{mode}.png")))) == 255).all()
    palette = make_image(mode="P")
    path = save(tmp_path, palette, "p.png", transparency=palette.getpixel((0, 0)))
    assert load(read_header(path)).getpixel((0, 0)) == (255, 255, 255)


def test_16_bit_grayscale_is_scaled(tmp_path):
    ramp = numpy.linspace(0, 65535, 24).round().astype(numpy.uint16).reshape(4, 6)
    image = load(read_header(save(tmp_path, Image.fromarray(ramp), "deep.png")))
    assert (numpy.asarray(image)[..., 0] == numpy.rint(ramp / 257)).all()


def test_animation_gives_its_first_frame(tmp_path):
    first, second = (Image.new("RGB", (5, 5), color) for color in ("red", "blue"))
    path = save(tmp_path, first, "a.gif", save_all=True, append_images=[second])
    assert read_header(path).is_animated
    assert load(read_header(path)).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>", 'begins "<!DOCTYPE ht"'),
        (b"\x00\x01\x02\x03", "begins with the bytes 00 01 02 03"),
    ],
)
def test_non_image_file_is_rejected_by_its_first_bytes(tmp_path, content, message):
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(BadImage, match=message):
        read_header(tmp_path / "x.jpg")


def test_image_with_too_many_pixels_is_rejected_from_its_header(tmp_path):
    path = save(tmp_path, Image.new("1", (10, 10)), "large.png")
    content = bytearray(path.read_bytes())
    content[16:24] = (30000).to_bytes(4, "big") + (20000).to_bytes(4, "big")
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(BadImage, match="30000x20000 pixels; the maximum is 178,956,970"):
        read_header(path)


def test_truncated_or_replaced_image_is_rejected_when_decoded(tmp_path):
    path = save(tmp_path, make_image(300, 200), "p.jpg")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is truncated"):
        load(read_header(path))
    image = read_header(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match="has changed since the dataset was tokenized"):
        load(image)
