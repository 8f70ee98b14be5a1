"""Select the image family of a checkpoint."""

from __future__ import annotations

from burnish.config.errors import UserError
from burnish.data.images import grids, other_families, tiles  # noqa: F401 - their families register themselves
from burnish.data.images.family import FAMILIES, Checkpoint, Family
from burnish.data.images.other_families import any_family


def family_of(source: Checkpoint) -> Family:
    """Return the image family of a checkpoint.

    Raises:
        UserError: if no family is registered for the model type and the composed processor cannot be loaded.
    """
    name = family_name(source.config)
    if name not in FAMILIES:
        return any_family(source, sorted(FAMILIES.names()))
    return FAMILIES[name](source)


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
