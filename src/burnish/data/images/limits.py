"""Size limits of images in the files of an image processor (``export_image_limits``).

In: the files, copied from the base model, and the options. Out: the same files, with ``image_max_pixels`` and
``image_min_pixels`` in their settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isqrt
from pathlib import Path
from typing import Any

from burnish.data.images.options import ImageOptions


def apply_image_limits(files: Iterable[Path], options: ImageOptions, is_requested: bool) -> list[str]:
    """Write the limits into the files that exist, or say that they are missing there.

    Args:
        is_requested: whether to write them (``export_image_limits``).

    Returns:
        Notes for the user.
    """
    limited = f"{options.image_max_pixels:,}"
    kinds, is_changed, limits_edge = set(), False, False
    for file in filter(Path.is_file, files):
        content = json.loads(file.read_text(encoding="utf-8"))
        settings = content.get("image_processor", content)
        kind, before = str(settings.get("image_processor_type")), json.dumps(settings)
        kinds.add(kind)
        if kind.startswith(("Qwen", "Glm")):
            _limit_pixels(settings, options)
        elif kind.startswith("Pixtral"):
            _limit_edge(settings, options)
            limits_edge = True
        if json.dumps(settings) != before:
            is_changed = True
            if is_requested:
                file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not is_requested:
        what = f"The exported processor files are those of the base model, without image_max_pixels ({limited})."
        return [f"{what} Set export_image_limits: true to write it."] * is_changed
    if not is_changed:
        which = ", ".join(sorted(kinds)) or "the model without processor files"
        return [f'"export_image_limits" has no effect: {which} has no such limit, or a smaller one.']
    if limits_edge:
        edge = isqrt(options.image_max_pixels)
        return [f"The exported image processor limits the longer side of an image to {edge:,} pixels."]
    return [f"The exported image processor limits an image to {limited} pixels."]


def _limit_pixels(settings: dict[str, Any], options: ImageOptions) -> None:
    """Limit the number of pixels, in both forms of these files: ``size``, and ``min_pixels`` and ``max_pixels``."""
    size = settings.get("size") or {}
    own_least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 0
    own_most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    least = max(own_least, options.image_min_pixels)
    most = max(least, min(own_most or options.image_max_pixels, options.image_max_pixels))
    if (least, most) != (own_least, own_most):
        settings["size"] = {"shortest_edge": least, "longest_edge": most}
        settings.update(
            {name: value for name, value in (("min_pixels", least), ("max_pixels", most)) if name in settings}
        )


def _limit_edge(settings: dict[str, Any], options: ImageOptions) -> None:
    """Limit the longer side, the only limit of Pixtral's processor, to that of a square image."""
    size, edge = settings.get("size") or {}, isqrt(options.image_max_pixels)
    settings["size"] = {**size, "longest_edge": min(edge, size.get("longest_edge") or edge)}
