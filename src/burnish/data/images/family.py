"""Image families: the tokens that a vision model expects for an image of a given size.

A ``Family`` is created from the configuration, image processor and tokenizer of a checkpoint. It returns the text
around an image and its token ids, which depend on width and height only. Models of another family and tokenizers
without the control tokens of the family are rejected.

A template writes one ``mark``, a control token, for each image; ``chat/images.py`` replaces its id by ``ids``.

    @FAMILIES.register("llava")
    class Llava(Family):
        mark = "<image>"
        def ids(self, width, height): ...

Sizes and counts are those of transformers' image and composed processors (each class names its file).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.config.registry import Registry
from burnish.data.images.image_file import BadImage, ImageFile, UnsupportedMedia, upright
from burnish.loop.types import Ids

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT_RATIO = 200
"""Largest aspect ratio that Qwen's and GLM's image processors accept."""


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint from which a family is created.

    Args:
        config: the model's configuration.
        processor: the image processor (``AutoImageProcessor``, never the composed processor).
        tokenizer: the tokenizer, with the control tokens of images.
        settings: content of ``processor_config.json``; empty if the file is missing.
        video_settings: settings of the video processor; empty if the checkpoint has none.
        shrinks: whether images are resized if their row is too long (``image_fit: shrink``).
        composed: the composed processor, for a model without a registered family.
        pan_and_scan: whether crops of elongated images are added (Gemma 3); None: as in the image processor's config.
    """

    config: Any
    processor: Any
    tokenizer: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    shrinks: bool = False
    composed: Any = None
    pan_and_scan: bool | None = None
    video_settings: Mapping[str, Any] = field(default_factory=dict)


class Family:
    """A family of models, for one checkpoint.

    Args:
        source: the checkpoint.

    ``mark`` is the control token for one image in the text of a template. ``placeholder`` is the token whose embedding
    the model replaces by a feature of the image. ``template_text`` is the text of a named template for an image, and
    ``chat_template_text`` the text that replaces the mark of a chat template; both contain the mark once. ``video_...``
    are the same for a video, or "" in families without videos; a tokenizer may lack their tokens.
    """

    mark = "<image>"
    placeholder = ""  # default: the mark
    template_text = ""
    chat_template_text = ""
    video_mark = video_placeholder = video_template_text = ""
    around: tuple[str, ...] = ()
    """Control tokens directly around the mark; truncation keeps them together with the image."""
    in_front = False
    """Whether images precede the text of the template, wherever the record has them."""
    squeezes = False
    """Whether LLaMA-Factory also raises sides below 28 pixels and limits the aspect ratio to ``MAX_ASPECT_RATIO``."""

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.processor, self.tokenizer = source, source.processor, source.tokenizer
        self.model_type = str(source.config.model_type)
        self.placeholder = self.placeholder or self.mark
        self.template_text = self.template_text or self.mark
        self.chat_template_text = self.chat_template_text or self.mark
        self.mark_id, self.placeholder_id = self.token_id(self.mark), self.token_id(self.placeholder)
        vocabulary = source.tokenizer.get_vocab()
        self.video_mark_id = vocabulary.get(self.video_mark, -1)
        placeholders = (self.placeholder_id, vocabulary.get(self.video_placeholder, -1))
        self.placeholder_ids = frozenset(placeholders) - {-1}
        self._ids: dict[tuple[int, int], Ids] = {}

    @property
    def controls(self) -> tuple[str, ...]:
        """Return the control tokens of images, which only a template can produce."""
        of_videos = (self.video_mark, self.video_placeholder) if self.video_mark_id >= 0 else ()
        return tuple(dict.fromkeys((self.mark, self.placeholder, *self.around, *of_videos)))

    def token_id(self, word: str) -> int:
        """Return the id of a control token. Raises UserError if the tokenizer does not have it."""
        found = self.tokenizer.get_vocab().get(word)
        if found is None:
            what = f'the tokenizer has no token "{word}", the image placeholder of {self.model_type}.'
            raise UserError(what, remedy="Use the tokenizer that belongs to the model.")
        return int(found)

    def ids(self, width: int, height: int) -> Ids:
        """Return the ids that replace the mark of an image; width and height are those of the input of the image
        processor."""
        if (width, height) not in self._ids:
            self._ids[width, height] = self._ids_of_size(width, height)
        return self._ids[width, height]

    def _ids_of_size(self, width: int, height: int) -> Ids:
        raise NotImplementedError

    def before(self, image: ImageFile) -> str:
        """Return the text that the composed processor inserts before an image of this size."""
        return ""

    def of(self, image: ImageFile, num_images: int = 1) -> Ids:
        """Return the ids that replace the mark of an image. Args: num_images: number of images in the row, including
        this one."""
        return self.of_video(image) if image.frames else self.ids(*self.given_sizes(image)[-1])

    def in_row(self, image: ImageFile, num_images: int) -> ImageFile:
        """Return ``image`` with the settings that depend on the ``num_images`` images of its row."""
        return image

    def of_video(self, video: ImageFile) -> Ids:
        """Return the ids that replace the mark of a video."""
        raise NotImplementedError

    def opening(self, video: ImageFile) -> str:
        """Return the text at the start of ``of_video``. A named template outputs it with the preceding text."""
        return ""

    def processed_size(self, image: ImageFile) -> tuple[int, int]:
        """Return width and height of an image, or of the frames of a video, after the processor's own resize."""
        return self.resized_size(*self.given_sizes(image)[-1])

    def patches_of(self, image: ImageFile) -> int:
        """Return the number of patches that the vision tower computes for an image or a video."""
        return self.patches(*self.given_sizes(image)[-1])

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after the resize of the image processor, for display; for tiles, those of all tiles
        together."""
        return width, height

    def patches(self, width: int, height: int) -> int:
        """Return the number of patches that the vision tower computes for an image of this size."""
        return self.ids(width, height).count(self.placeholder_id)

    # --- the size that the image processor is given ------------------------------------------------------------------

    def given_sizes(self, image: ImageFile) -> list[tuple[int, int]]:
        """Return the sizes (width, height) before the image processor, beginning with the image's own.

        Without limits, the image is not resized. With limits, LLaMA-Factory's rule is used
        (src/llamafactory/data/mm_plugin.py): down to ``max_pixels``, up to ``min_pixels``. For Qwen and GLM, both sides
        are then raised to at least 28 pixels, and if the aspect ratio exceeds 200, the longer side is reduced to 180
        times the shorter one.
        """
        width, height = image.width, image.height
        sizes = [(width, height)]
        for limit, is_beyond in ((image.max_pixels, int.__gt__), (image.min_pixels, int.__lt__)):
            if limit is not None and is_beyond(width * height, limit):
                factor = sqrt(limit / (width * height))
                width, height = int(width * factor), int(height * factor)
                sizes.append((width, height))
        if self.squeezes and image.max_pixels is not None:
            if min(width, height) < 28:
                width, height = max(width, 28), max(height, 28)
                sizes.append((width, height))
            if width / height > MAX_ASPECT_RATIO:
                sizes.append((height * 180, height))
            elif height / width > MAX_ASPECT_RATIO:
                sizes.append((width, width * 180))
        return sizes

    def prepare(self, image: ImageFile) -> Any:
        """Return the input of ``ImageProcessor.tensors``. Raises UserError for an image that cannot be decoded."""
        return self.resize(image)

    def resize(self, image: ImageFile) -> Image:
        """Return the pixels that are passed to the image processor: RGB, resized by ``given_sizes`` (bicubic).

        Raises:
            UserError: for an image that cannot be decoded.
        """
        pixels, sizes = upright(image), self.given_sizes(image)[1:]
        limits = sum(limit is not None for limit in (image.max_pixels, image.min_pixels))
        for number, size in enumerate(sizes):
            if number == limits:
                pixels = pixels.convert("RGB")
            pixels = pixels.resize(size)
        return pixels.convert("RGB")

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the options of an image processor call, as the composed processor passes them."""
        return {}

    # --- what the processor says --------------------------------------------------------------------------------------

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting of ``processor_config.json``."""
        found = self.source.settings.get(name)
        return default if found is None else found

    def text_ids(self, text: str) -> Ids:
        return array("i", self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def identity(self) -> Any:
        """Return a hash that changes whenever the tokens or the pixels of an image would change."""
        settings = self.processor.to_dict()
        known = [type(self).__name__, type(self.processor).__name__, settings, dict(self.source.settings)]
        return [*known, self.source.shrinks, *self.options.items()]

    def check(self, image: ImageFile) -> None:
        """Raise BadImage for an image that the image processor refuses, and for a video that the model cannot take."""
        if image.frames and self.video_mark_id < 0:
            what = f"it contains a video ({image.place}), but {self.model_type} models can be trained on images only."
            raise UnsupportedMedia(f"{what} Use the frames of the video as images.")
        for width, height in self.given_sizes(image):
            if not width * height:
                what = f"the limits of pixels resize it to {width}x{height}. Crop the image, or raise the limits."
                raise BadImage(f"{image.path} is {image.width}x{image.height}; {what}")


FAMILIES: Registry[type[Family]] = Registry("image family")
"""Model type (``config.model_type``) -> family."""


def repeat_token(token: int, count: int) -> Ids:
    """Return a list of ``count`` times the same id."""
    return array("i", [token]) * count
