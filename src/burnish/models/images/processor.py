"""The image processor of a checkpoint: converts images to the input tensors of the vision tower.

It reads ``preprocessor_config.json`` or ``processor_config.json`` of the model. The tensors of an image depend on that
image only; ``join`` concatenates those of several images. Models without these files are rejected, and so are image
processors that need torchvision, which burnish does not require.

The backend is transformers' "pil", which does not need torchvision.
"""

# N images, S side of an image or tile

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import UNUSABLE, MissingExtraError, Problem, UserError
from burnish.kernels.probe import unwrap_peft
from burnish.models.images.torchvision import raise_if_torchvision_is_broken
from burnish.models.load import message_of
from burnish.models.options import ModelOptions
from burnish.models.source import PROCESSOR_FILES, find_source, hub_arguments
from burnish.utils.json_files import read_object

*FILES, VIDEOS = PROCESSOR_FILES
"""Files with the settings of an image processor, the older one and that of transformers 5; those of videos."""

CROSSED = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
"""Tensors of Mllama, whose text uses cross-attention to images; each is (1, images, ...)."""

Tensors = Mapping[str, Tensor]


class ImageProcessor:
    """The image processor of a checkpoint.

    Args:
        processor: transformers' image processor.
        names: tensors that ``get_image_features`` of the model takes.
        options: options of an image processor call.
    """

    def __init__(self, processor: Any, names: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        self.processor, self.names, self.options = processor, frozenset(names), options or {}

    @classmethod
    def of(cls, model: nn.Module, processor: Any, options: Mapping[str, Any] | None = None) -> ImageProcessor:
        """Create the image processor for ``model``, which may be without weights. Args: options: ``Family.options``.

        Raises:
            UserError: if the model does not return image features.
        """
        base = unwrap_peft(model).base_model
        if getattr(base.config, "model_type", "") == "mllama":
            return cls(processor, CROSSED, options)
        if not hasattr(base, "get_image_features"):
            name = type(unwrap_peft(model)).__name__
            what = f"{name} cannot be trained on images: it does not replace placeholder tokens with image features."
            raise UserError(what, remedy="Use a different model, such as Qwen2-VL.", option="model_name_or_path")
        return cls(processor, list(inspect.signature(base.get_image_features).parameters), options)

    def tensors(self, image: Any) -> dict[str, Tensor]:
        """The tensors of one image, with a first axis of images, tiles or patches.

        Args:
            image: a Pillow image; for a video a pair of its patches (P, D) and their grids (frames, rows, columns).
        """
        if isinstance(image, tuple):
            patches, grids = image
            return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor(grids)}
        made = self.processor(images=[image], return_tensors="pt", **self.options)
        found = {name: made[name] for name in made if name in self.names}
        # Llama 4's makes bfloat16, which is cast to the type of the tower later.
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}

    def tensors_of(self, prepare: Callable[[Any], Any], image: Any) -> dict[str, Tensor]:
        """The tensors of an image of a record, which ``prepare`` (``Family.prepare``) converts to pixels."""
        return self.tensors(prepare(image))

    def join(self, each: Sequence[Tensors]) -> dict[str, Tensor]:
        """Concatenate the tensors of several images, in order.

        Tensors with tiles on the second axis (``pixel_attention_mask``, (1, tiles, S, S)) are concatenated on that
        axis, and so are the images of a row of Mllama. Images of smaller size or with fewer tiles are padded with
        zeros.
        """
        is_in_tiles = "pixel_attention_mask" in each[0] and each[0]["pixel_attention_mask"].ndim == 4
        axis = int(is_in_tiles or "aspect_ratio_ids" in each[0])
        return {name: _join_tensors([one[name] for one in each], axis) for name in each[0]}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return a hash of everything besides the image that its tensors depend on."""
        from PIL import __version__ as pillow

        settings = {name: value for name, value in self.processor.to_dict().items() if not name.startswith("_")}
        return {"class": type(self.processor).__name__, "pillow": pillow, **settings}


def _join_tensors(tensors: Sequence[Tensor], axis: int) -> Tensor:
    shapes = [[*tensor.shape[:axis], *tensor.shape[axis + 1 :]] for tensor in tensors]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    largest.insert(axis, -1)
    return torch.cat([_pad_to_shape(tensor, largest) for tensor in tensors], axis)


def _pad_to_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad ``tensor`` with zeros at the end of each axis that is shorter than ``shape``; -1 keeps an axis."""
    missing = [max(0, wanted - size) for wanted, size in zip(shape, tensor.shape, strict=True)]
    return nn.functional.pad(tensor, [n for one in reversed(missing) for n in (0, one)]) if any(missing) else tensor


def load_image_processor(options: ModelOptions, backend: str = "pil", **settings: Any) -> Any:
    """Load transformers' image processor of the model.

    Args:
        backend: "pil" or "torchvision".
        settings: override those of the checkpoint.

    Raises:
        UserError: if its files are missing or invalid.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise MissingExtraError("Pillow", "reading images", "images", "model_name_or_path") from None
    from transformers import AutoImageProcessor

    source = find_source(options.model_name_or_path, options)
    if source.folder is not None and not any((source.folder / name).is_file() for name in FILES):
        raise UserError(_no_files(source.folder))
    try:
        return AutoImageProcessor.from_pretrained(source.name, backend=backend, **settings, **hub_arguments(options))
    except (*UNUSABLE, ImportError) as error:
        raise_if_torchvision_is_broken(error)
        if "torchvision" in str(error).lower():
            what = "its image processor requires torchvision."
            remedy = "Install the torchvision version that matches the installed torch."
        else:
            what = f"its image processor cannot be loaded: {message_of(error)}"
            remedy = f"Download {' or '.join(FILES)} again."
        raise UserError(what, where=source.name, remedy=remedy) from error


def video_settings_in(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the video processor in a checkpoint's folder; empty if there are none.

    Args:
        settings: ``processor_config.json``, which may hold them.
    """
    own = settings.get("video_processor")
    path = folder / VIDEOS
    return dict(own) if isinstance(own, Mapping) else read_object(path) if path.is_file() else {}


def load_composed_processor(options: ModelOptions) -> Any:
    """Load transformers' composed processor of the model; None if it cannot be loaded."""
    from transformers import AutoProcessor

    source = find_source(options.model_name_or_path, options)
    try:
        found = AutoProcessor.from_pretrained(source.name, **hub_arguments(options))
    except (*UNUSABLE, ImportError):
        return None
    return found if hasattr(found, "image_processor") else None


def copy_companions(model: nn.Module, folder: Path) -> None:
    """Copy the processor files of a base model unchanged next to an adapter or a model that was trained from it.
    transformers would rewrite them, and without torchvision drop those of videos.

    Args:
        model: the trained model. Its config names its base; ``load_model`` also stored the folder of these files.
        folder: the destination.
    """
    from transformers.utils import cached_file

    inner: Any = unwrap_peft(model)
    base = getattr(inner, "processor_folder", None) or inner.config.name_or_path
    if getattr(inner.config, "vision_config", None) is None or not base:
        return
    for name in PROCESSOR_FILES:
        try:
            found = cached_file(
                base, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )  # fmt: skip
        except OSError:  # the folder of the base model was removed
            return
        if found is not None and not (folder / name).exists():
            shutil.copyfile(found, folder / name)


def _no_files(folder: Path) -> Problem:
    what = f"this folder has no {' or '.join(FILES)}, so images cannot be preprocessed."
    return Problem(what, where=str(folder), remedy="Copy them from the base model.", option="model_name_or_path")
