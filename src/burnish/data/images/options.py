"""Options of images: their location and their size limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from burnish.config.checks import check
from burnish.config.errors import MissingExtraError, Problem, UserError
from burnish.config.options import option
from burnish.data.images.sources import MediaReader


@dataclass
class ImageOptions:
    """Images."""

    media_dir: str | None = option(
        None,
        "Folder for relative image paths of a dataset. Default: the folder of the data file, then dataset_dir.",
        aliases=("image_dir",), names_place=True,
    )  # fmt: skip
    image_max_pixels: int = option(
        768 * 768, "Maximum number of pixels per image. Larger images are scaled down before they are passed to the "
        "image processor.", ge=1, unit="pixels",
    )  # fmt: skip
    image_min_pixels: int = option(
        32 * 32, "Minimum number of pixels per image. Smaller images are scaled up before they are passed to the "
        "image processor.", ge=1, unit="pixels",
    )  # fmt: skip
    video_max_pixels: int = option(
        256 * 256, "Maximum number of pixels per video frame. Larger frames are scaled down before they are passed to "
        "the image processor.", ge=1, unit="pixels",
    )  # fmt: skip
    video_min_pixels: int = option(
        16 * 16, "Minimum number of pixels per video frame. Smaller frames are scaled up before they are passed to the "
        "image processor.", ge=1, unit="pixels",
    )  # fmt: skip
    video_fps: float = option(2.0, "Frame rate of videos, in frames per second. A video is a list of frames.", gt=0)
    image_fit: Literal["keep", "shrink"] = option(
        "keep",
        "What to do with a record whose images do not fit into cutoff_len: keep the size of its images and drop the "
        "record (keep), or resize its images until they fit (shrink).",
    )
    image_backend: Literal["pil", "torchvision"] = option(
        "pil", "Backend of the image processor. The results of the two backends differ by at most 1/255 per pixel."
    )
    crop_to_patches: bool | None = option(
        None, "Split images into tiles (InternVL). Default: as in the image processor's config."
    )
    image_do_pan_and_scan: bool | None = option(
        None,
        "Add crops of images that are not square (pan and scan, Gemma 3). Default: as in the image processor's config.",
    )


def backend_of(options: ImageOptions | None) -> str:
    return "pil" if options is None else options.image_backend


def shrinks_images(options: ImageOptions | None) -> bool:
    return options is not None and options.image_fit == "shrink"


def apply_image_options(processor: Any, config: Any, options: ImageOptions) -> list[str]:
    """Apply the options to an image processor.

    Returns:
        A sentence for each option that has no effect on this model.

    Raises:
        UserError: if the limits are smaller than a patch.
    """
    notes = []
    tiles, crops = options.crop_to_patches, options.image_do_pan_and_scan
    if tiles is not None and hasattr(processor, "crop_to_patches"):
        processor.crop_to_patches = tiles
    elif tiles is not None:
        notes.append(f'"crop_to_patches" has no effect on {config.model_type}: it applies to InternVL only.')
    if crops is not None and not hasattr(processor, "do_pan_and_scan"):
        notes.append(f'"image_do_pan_and_scan" has no effect on {config.model_type}: it applies to Gemma 3 only.')
    patch, merge = getattr(processor, "patch_size", None), getattr(processor, "merge_size", None)
    least = (patch * merge) ** 2 if isinstance(patch, int) and isinstance(merge, int) else 0
    if options.image_max_pixels < least:
        what = f"image_max_pixels ({options.image_max_pixels}) is smaller than one patch of this model ({least})."
        raise UserError(what, remedy=f"Set image_max_pixels: {least} or more.", option="image_max_pixels")
    most = (processor.size or {}).get("longest_edge") if str(config.model_type).startswith(("qwen", "glm")) else None
    if most is not None and most < options.image_max_pixels != ImageOptions.image_max_pixels:
        notes.append(
            f"image_max_pixels ({options.image_max_pixels:,}) has no effect: the image processor's own limit is "
            f"{most:,} pixels."
        )
    return notes


@check
def check_images(options: ImageOptions) -> Iterator[Problem]:
    if options.image_backend == "torchvision" and find_spec("torchvision") is None:
        missing = MissingExtraError("torchvision", "image_backend: torchvision", option="image_backend")
        yield from list(missing.problems)
        return
    for kind in ("image", "video"):
        most, least = (getattr(options, f"{kind}_{side}_pixels") for side in ("max", "min"))
        if most < least:
            what = f"{kind}_max_pixels ({most}) is below {kind}_min_pixels ({least})."
            yield Problem(what, remedy="Raise the first or lower the second.", option=(f"{kind}_max_pixels",))


def limits_of(options: ImageOptions, folders: Sequence[Path] = ()) -> MediaReader:
    """Return a ``MediaReader`` with the size limits of the options.

    Args:
        folders: see ``MediaReader``; none for requests.
    """
    of_videos = (options.video_min_pixels, options.video_max_pixels, options.video_fps)
    return MediaReader(folders, options.image_min_pixels, options.image_max_pixels, "", *of_videos)
