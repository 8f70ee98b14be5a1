"""The parts of a vision model: tower, projector and language model.

They are found from the modules, without a table of models. The language model consists of the decoder and the head. A
submodel next to it is a tower. Everything else is the projector, even if a tower contains it as its "merger" (Qwen and
GLM families). Single parameters, such as LLaVA-NeXT's ``image_newline``, belong to the projector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch import nn

from burnish.kernels.probe import unwrap_peft

PartName: TypeAlias = Literal["vision_tower", "multi_modal_projector", "language_model"]
"""LLaMA-Factory's names of the parts."""


def has_vision_tower(model: nn.Module) -> bool:
    """Whether a model has a vision tower."""
    config = getattr(unwrap_peft(model), "config", None)
    return getattr(config, "vision_config", None) is not None and "vision_tower" in parts_of(model).values()


def parts_of(model: nn.Module) -> Mapping[str, PartName]:
    """The paths of the outermost modules, and of parameters outside of them -> the part that they belong to.

    A text-only model is a single part, "language_model", with the path "".
    """
    inner = unwrap_peft(model)
    base: Any = inner.base_model
    if getattr(getattr(inner, "config", None), "vision_config", None) is None:
        return {"": "language_model"}
    paths = {id(module): path for path, module in model.named_modules()}
    head, decoder = inner.get_output_embeddings(), inner.get_decoder()
    found: dict[str, PartName] = {paths[id(decoder)]: "language_model"}
    if head is not None:
        found[paths[id(head)]] = "language_model"
    for child in base.children():
        path = paths[id(child)]
        if path in found or any(path.startswith(f"{part}.") for part in found):
            continue
        if any(part.startswith(f"{path}.") for part in found):  # Llama 4: a language model with its head
            found[path] = "language_model"
            continue
        if not hasattr(child, "save_pretrained"):  # every model of transformers has this method
            found[path] = "multi_modal_projector"
            continue
        found[path] = "vision_tower"
        mergers = (inside for inside, _ in child.named_children() if "merger" in inside)
        found |= {f"{path}.{inside}": "multi_modal_projector" for inside in mergers}
    for name, _ in base.named_parameters(recurse=False):
        found[f"{paths[id(base)]}.{name}".removeprefix(".")] = "multi_modal_projector"
    return found


def part_at(path: str, parts: Mapping[str, PartName]) -> PartName:
    """The part of the module or parameter at ``path``, determined by the longest enclosing path in ``parts``."""
    around = [outer for outer in parts if _is_within(path, outer)]
    return parts[max(around, key=len)] if around else "language_model"


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
