"""Select the image family of a checkpoint; the fallback for models without one calls their composed processor."""

from __future__ import annotations

from array import array
from functools import cached_property

from burnish.config.errors import UserError
from burnish.data.images import grids, tiles  # noqa: F401 - their families register themselves
from burnish.data.images.family import FAMILIES, Checkpoint, Family
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.loop.types import Ids

_PROBE_SIZE = (64, 64)


def family_of(source: Checkpoint) -> Family:
    """Return the image family of a checkpoint.

    Raises:
        UserError: if no family is registered for the model type, and it has no image token or its composed processor
            cannot be loaded.
    """
    name = family_name(source.config)
    if name not in FAMILIES:
        if source.composed is None:
            kind, known = source.config.model_type, ", ".join(sorted(FAMILIES.names()))
            what = f"models of type {kind} cannot be trained on images: their processor cannot be loaded."
            raise UserError(what, remedy=f"Model types that do not require a processor: {known}.")
        return AnyFamily(source)
    return FAMILIES[name](source)


class AnyFamily(Family):
    """A model without a registered family: the composed processor is called with a blank image, once per image size.

    Args:
        source: checkpoint with ``composed``.
    """

    def __init__(self, source: Checkpoint) -> None:
        config, tokenizer = source.config, source.tokenizer
        names = ("image_token_id", "image_token_index")
        found = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if found is None:
            what = f"the config of {config.model_type} has no image_token_id (the image placeholder)."
            raise UserError(
                what, remedy="Use a model whose config defines image_token_id.", option="model_name_or_path"
            )
        self.placeholder = str(tokenizer.convert_ids_to_tokens(int(found)))
        self.mark = str(getattr(source.composed, "image_token", None) or self.placeholder)
        super().__init__(source)

    def of(self, image: ImageFile, num_images: int = 1) -> Ids:
        if num_images > 1 and not self._writes_images_alike:
            processor = type(self.source.composed).__name__
            raise BadImage(f"records with several images are not supported, because {processor} numbers the images")
        return super().of(image, num_images)

    def _ids_of_size(self, width: int, height: int) -> Ids:
        return self._processed(width, height)

    def _processed(self, width: int, height: int, count: int = 1) -> Ids:
        """Return the ids for ``count`` blank images of this size, with a letter between them."""
        from PIL import Image

        blank, composed = Image.new("RGB", (width, height), "white"), self.source.composed
        try:
            # Some processors require tensors.
            made = composed(images=[[blank] * count], text=["a".join([self.mark] * count)], add_special_tokens=False,
                            return_tensors="pt")  # fmt: skip
        except Exception as error:  # any exception of a processor that burnish does not know
            what = f"{type(composed).__name__} cannot process an image of {width}x{height} pixels"
            raise BadImage(f"{what} ({type(error).__name__}: {error})") from error
        return array("i", made["input_ids"][0].tolist())

    @cached_property
    def _writes_images_alike(self) -> bool:
        """Whether the tokens of an image do not depend on the images before it. MiniCPM-V numbers them."""
        single = self._processed(*_PROBE_SIZE)
        both = self._processed(*_PROBE_SIZE, count=2)
        return both[: len(single)] == single == both[-len(single) :]

    @property
    def note(self) -> str:
        """Return a note for the user on how images are written."""
        return (
            f"Images of model type {self.model_type} are processed by transformers' "
            f"{type(self.source.composed).__name__}. "
            "Batches are padding-free only if a check shows that the model supports them."
        )


def family_name(config: object) -> str:
    """Return the name of the family of a model: its model type, except for a LLaVA with Pixtral's vision tower."""
    name = str(getattr(config, "model_type", ""))
    tower = str(getattr(getattr(config, "vision_config", None), "model_type", ""))
    return "pixtral" if (name, tower) == ("llava", "pixtral") else name


_WRITTEN = {
    "qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5 qwen3_5_nothink qwen3_6 mimo_vl keye_vl dots_ocr": "<|image_pad|>",
    "gemma3 gemma3n": "<image_soft_token>",
    "gemma4 gemma4n glm4v glm4_5v glm_ocr mllama": "<|image|>",
    "llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_yi granite3_vision yi_vl lfm2_vl "
    "paligemma paligemma_chat": "<image>",
    "intern_vl intern_s1": "<IMG_CONTEXT>",
    "pixtral mistral_small ministral3": "[IMG]",
    "llama4": "<|patch|>",
}
"""Named template with image support in LLaMA-Factory -> its placeholder token."""
PLACEHOLDERS = {template: word for templates, word in _WRITTEN.items() for template in templates.split()}


def check_family(template: str, family: Family) -> None:
    """Raise UserError if a named template was made for models of another family."""
    expected = PLACEHOLDERS.get(template)
    if expected is not None and expected != family.placeholder:
        raise UserError(
            f"template {template} uses the placeholder {expected}, but {family.model_type} uses {family.placeholder}.",
            remedy="Set the template of this model, or remove the option to use the tokenizer's chat template.",
            option="template",
        )
