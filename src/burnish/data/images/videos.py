"""Videos as lists of frames.

``read_video`` returns the video of a record, a list of frames or a folder of them, as an ``ImageFile`` with ``frames``.
``patches_of_frames`` computes the patches of decoded frames like transformers' video processors, which require
torchvision. Video files are refused, because burnish has no decoder, and so are frames of different sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.data.images.image_file import BadImage, ImageFile
from burnish.data.images.sources import MediaReader, limits_of_part
from burnish.utils.json_files import shorten_value

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

PAIR = 2
"""Number of frames per temporal patch."""


def read_video(
    reader: MediaReader, value: Any, place: str, fps: float | None = None, min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> ImageFile:  # fmt: skip
    """Read the headers of the frames of a video.

    Args:
        value: a list of images, or the path of a folder of images, sorted by the numbers in their names.
        place: name of the video in its record: ``videos[1]``.
        fps, min_pixels, max_pixels: settings of this video, in place of those of the dataset.

    Raises:
        BadImage: with a message that begins with the place.
    """
    if isinstance(value, str | os.PathLike):
        value = _frames_in(reader, os.fspath(value), place)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise BadImage(f"{place} must be a list of frames, or a folder of them. Received: {type(value).__name__}.")
    if not value:
        raise BadImage(f"{place} has no frames.")
    of_frames = replace(reader, min_pixels=None, max_pixels=None)
    frames = [of_frames.image(frame, f"{place}[{number}]") for number, frame in enumerate(value)]
    first = frames[0]
    for frame in frames:
        if (frame.width, frame.height) != (first.width, first.height):
            sizes = f"{frame.width}x{frame.height}, but the first has {first.width}x{first.height}"
            raise BadImage(f"{frame.place} has {sizes}; all frames of a video must have the same size.")
    if len(frames) == 1 or (reader.video_max_pixels and len(frames) % PAIR):  # as LLaMA-Factory does
        frames.append(frames[-1])
    least, most = limits_of_part(min_pixels, max_pixels, reader.video_min_pixels, reader.video_max_pixels)
    return replace(
        first, place=place, frames=tuple(frames), fps=fps or reader.video_fps, min_pixels=least, max_pixels=most
    )


def is_last_repeated(video: ImageFile) -> bool:
    """Return whether ``read_video`` has repeated the last frame, which then has no time of its own."""
    return video.frames[-1] == video.frames[-2]  # with their places in the record, which differ otherwise


def _frames_in(reader: MediaReader, path: str, place: str) -> list[str]:
    found, named = Path(reader.file(path, place)), f'{place} "{shorten_value(path)}"'
    try:
        with os.scandir(found) as entries:
            names = [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):
        if found.is_file():
            raise BadImage(
                f"{named} is a file; video files are not decoded. Extract its frames, for example with ffmpeg, and "
                'pass the frames as a list or a folder: "videos": [["frames/1.jpg", "frames/2.jpg"]].'
            ) from None
        searched = " and ".join(map(str, reader.folders)) or Path.cwd()
        raise BadImage(f"{named} was not found. Searched: {searched}.") from None
    except OSError as error:
        raise BadImage(f"{named} cannot be read: {error.strerror}.") from None
    return [str(found / name) for name in sorted(names, key=_by_number)]


def _by_number(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that places ``frame10`` after ``frame9``, and ``frame1`` after ``frame01``."""
    return [(int(piece), "") if piece.isdecimal() else (0, piece) for piece in re.split(r"(\d+)", name)], name


@dataclass(frozen=True)
class VideoSettings:
    """The settings of a video processor.

    Args:
        min_pixels, max_pixels: limits of the pixels of a frame, or of all frames, depending on the family.
        is_capped, most_tokens: further limits (``cap_pixels_per_frame`` and ``max_video_tokens``).
        mean, std: (3,) mean and standard deviation of the colors, after scaling to [0, 1] by ``scale``.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    is_capped: bool
    most_tokens: int
    scale: float
    mean: Sequence[float]
    std: Sequence[float]
    resample: int

    @classmethod
    def of(cls, processor: Any, settings: Mapping[str, Any]) -> VideoSettings:
        """Create the settings from those of the video processor, with defaults from the image processor."""
        found = {**processor.to_dict(), **{name: value for name, value in settings.items() if value is not None}}
        size = found["size"]
        return cls(
            int(found["patch_size"]), int(found["merge_size"]),
            int(settings.get("min_pixels") or size["shortest_edge"]),
            int(settings.get("max_pixels") or size["longest_edge"]), bool(found.get("cap_pixels_per_frame")),
            int(found.get("max_video_tokens") or 0), float(found["rescale_factor"]), tuple(found["image_mean"]),
            tuple(found["image_std"]), int(found["resample"]),
        )  # fmt: skip


def patches_of_frames(frames: Sequence[Image], width: int, height: int, settings: VideoSettings) -> NDArray[Any]:
    """Return (patches, colors * 2 * patch * patch) float32. A patch spans two frames; an odd last frame is repeated.

    Args:
        frames: frames of equal size; they are resized to ``width`` and ``height``.
    Source: transformers, models/qwen2_vl/video_processing_qwen2_vl.py (``patchify``).
    """
    import numpy
    from PIL.Image import Resampling

    resized = [numpy.asarray(one.resize((width, height), Resampling(settings.resample))) for one in frames]
    resized += [resized[-1]] * (-len(resized) % PAIR)
    mean, std = (numpy.asarray(value, numpy.float32) / settings.scale for value in (settings.mean, settings.std))
    pixels = (numpy.stack(resized).astype(numpy.float32) - mean) / std
    patch, merge = settings.patch, settings.merge
    rows, columns = height // patch // merge, width // patch // merge
    cut = pixels.reshape(-1, PAIR, rows, merge, patch, columns, merge, patch, 3)
    # time, rows, columns, rows and columns of a merged patch, colors, frames of a pair, rows and columns of a patch
    patches: NDArray[Any] = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * PAIR * patch**2)
    return patches
