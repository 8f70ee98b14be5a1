"""Load the image family of a run's model, which determines the tokens of an image."""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.data.images.families import AnyFamily, family_name, family_of
from burnish.data.images.family import FAMILIES, Checkpoint, Family
from burnish.data.images.options import ImageOptions, apply_image_options, backend_of, shrinks_images
from burnish.models.images.processor import load_composed_processor, load_image_processor, video_settings_in
from burnish.models.options import ModelOptions
from burnish.models.source import PROCESSOR_FILES, local_folder
from burnish.utils.json_files import read_object


def load_family(
    options: ModelOptions, config: Any, tokenizer: Any, notes: list[str] | None = None,
    images: ImageOptions | None = None, refused: list[UserError] | None = None,
) -> Family | None:  # fmt: skip
    """Return the family of the model, or None for a text-only model.

    Args:
        images: options of images; None for the defaults.
        notes: receives notes for the user.
        refused: receives the reason if images cannot be used; the model can still be trained on text.
    """
    if getattr(config, "vision_config", None) is None:
        return None
    name = options.model_name_or_path or ""
    folder = local_folder(name, options, "model_name_or_path", PROCESSOR_FILES, with_weights=False)
    path = folder / "processor_config.json"
    settings = read_object(path) if path.is_file() else {}
    try:
        processor = load_image_processor(options, backend_of(images))
        if images is not None and notes is not None:
            notes += apply_image_options(processor, config, images)
        composed = None if family_name(config) in FAMILIES else load_composed_processor(options)
        crops = None if images is None else images.image_do_pan_and_scan
        videos = video_settings_in(folder, settings)
        checkpoint = Checkpoint(
            config, processor, tokenizer, settings, shrinks_images(images), composed, crops, videos
        )  # fmt: skip
        found = family_of(checkpoint)
        if isinstance(found, AnyFamily) and notes is not None:
            notes.append(found.note)
        return found
    except UserError as error:
        if notes is not None:
            notes.append(f"Images cannot be used: {error}")
        if refused is not None:
            refused.append(error)
        return None
