"""Image features at the positions of placeholders; the vision tower runs once per distinct image of a micro-batch.

``patch_vision_model`` lets a vision model take two inputs besides the tensors of images: ``image_features``, for each
token 0 or 1 + the index of its feature among the features of all images, and ``images``, an ``ImageFeatures``.

The forward pass of transformers replaces the n-th placeholder of a batch by the n-th feature, so an image that occurs
in several rows (both responses of a pair, several turns) would be computed several times. Here, features are computed
once, and the selected ones are passed to the model as ``mm_encoder_outputs``. The output of a frozen tower is cached
with the batch, so that the reference model of a preference run can use it.

If all processes must run the tower together, because its weights are sharded or it is trained by several processes
(``run_in_every_pass``), a process without images in its micro-batch runs it on one small image whose features are not
used, and each forward pass runs the tower once.

On a CPU, a frozen tower computes each image separately. Its output then depends on that image only, so it is the same
in all epochs and after a resume, and is cached (``ahead``).
"""

# N images, F features of all images, H hidden size, B rows, T tokens

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.kernels.elementwise import rounding_as_trained
from burnish.kernels.model_parts import has_vision_tower, part_at, parts_of
from burnish.kernels.probe import unwrap_peft
from burnish.loop.modes import evaluating
from burnish.models.images.masks import masks_of
from burnish.utils.patching import Patch, Reason, hook, patches_of

ENCODED_ONCE = Reason("vision model", "each image of a micro-batch is encoded once")


class EncodedImage(dict[str, Tensor]):
    """The tensors of an image whose features are cached, without pixels.

    Args:
        tensors: the remaining tensors, such as grids.
        output: output of the tower of ``model``.
        model: id of a model.
    """

    def __init__(self, tensors: Mapping[str, Tensor], output: Any, model: int) -> None:
        super().__init__(tensors)
        self.output, self.model = output, model


class FeatureCache(Protocol):
    """Keeps the output of a frozen vision tower for each image."""

    def keep_output(self, image: Any, output: Any, model: int) -> None:
        """Keep the output of the tower of ``model``, an id, for an image."""

    def prepare_again(self, image: Any) -> Mapping[str, Tensor]:
        """Return the tensors of an image with its pixels, although its features are cached."""


@dataclass
class ImageFeatures:
    """The images of a micro-batch.

    Args:
        names: keys of the batch whose values are tensors of images.
        counts: number of features of each image, which equals its number of placeholders.
        identities: a value per image that is equal for equal images.
        outputs: cached output of a frozen vision tower, by the id of its model.
        video_placeholder: placeholder token of videos; -1 if there is none, or if images use the same.
        each: the tensors of each image, if the tower computes them one by one; ``names`` is empty then.
        cache: keeps the output of a frozen tower for each image; None: not kept.
        sources: the images, for the cache.
    """

    names: Sequence[str]
    counts: Sequence[int]
    identities: Sequence[object] = ()
    outputs: dict[int, Any] = field(default_factory=dict, repr=False)
    video_placeholder: int = -1
    each: Sequence[Mapping[str, Tensor]] = field(default=(), repr=False)
    cache: FeatureCache | None = field(default=None, repr=False)
    sources: Sequence[Any] = field(default=(), repr=False)

    def share_with(self, other: ImageFeatures) -> None:
        """Share the outputs of a frozen tower with another micro-batch of the same images."""
        if self.identities == other.identities:
            other.outputs = self.outputs


_MIN_TRANSFORMERS = "5.21.0"
"""The first version of transformers whose vision models all take ``mm_encoder_outputs``, also those of SmolVLM."""


def check_transformers() -> None:
    """Raise a UserError if the installed transformers is too old for images."""
    from packaging.version import Version
    from transformers import __version__

    if Version(__version__) < Version(_MIN_TRANSFORMERS):
        what = f"Images require transformers {_MIN_TRANSFORMERS} or later. Received: {__version__}."
        raise UserError(what, remedy=f'Run: pip install "transformers>={_MIN_TRANSFORMERS}".')


def patch_vision_model(model: nn.Module) -> list[Patch]:
    """Let ``model`` take the inputs above. Does nothing without a vision tower or if it was called before."""
    inner = unwrap_peft(model)
    is_patched = any(done.why is ENCODED_ONCE for done in patches_of(model))
    if is_patched or not has_vision_tower(model) or not hasattr(inner.base_model, "get_image_features"):
        return []
    check_transformers()
    image_hook = ImageFeaturesHook(inner)
    modules = dict.fromkeys((inner, inner.base_model))  # the loss may call either
    return [
        hook(module, "forward_pre", image_hook.prepare_inputs, ENCODED_ONCE, with_kwargs=True) for module in modules
    ]


class ImageFeaturesHook:
    """The hook of ``patch_vision_model``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.unused: Mapping[str, Tensor] | None = None  # the tensors of ``run_in_every_pass``
        parts = parts_of(model)
        self._towers = [m for path, m in model.named_modules() if parts.get(path) == "vision_tower"]
        self._weights = [p for name, p in model.named_parameters() if part_at(name, parts) != "language_model"]
        self._outside = [
            m for path, m in model.named_modules() if parts.get(path, "language_model") != "language_model"
        ]
        self._was_trained = any(weight.requires_grad for weight in self._weights)

    def prepare_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the image inputs by those of transformers."""
        images: ImageFeatures | None = kwargs.pop("images", None)
        if "attention_rows" in kwargs:
            rows, blocks = kwargs.pop("attention_rows"), kwargs.pop("attention_blocks")
            kwargs["attention_mask"] = masks_of(self._model, rows, blocks)
        if images is None:
            if self.unused is not None and "mm_encoder_outputs" not in kwargs:
                kwargs["mm_encoder_outputs"] = {"image": self._no_features(kwargs, self.unused)}
            return (args, kwargs)
        tensors = {name: kwargs.pop(name) for name in images.names}
        places = kwargs.pop("image_features").flatten()
        made = self._features(images, tensors, places.device)
        chosen = places[places > 0] - 1
        if images.video_placeholder < 0:
            kwargs["mm_encoder_outputs"] = {"image": select_features(made, chosen)}
        else:
            is_video = kwargs["input_ids"].flatten()[places > 0] == images.video_placeholder
            kwargs["mm_encoder_outputs"] = by_kind(made, chosen, is_video)
        return args, kwargs

    def _is_frozen(self) -> bool:
        """Return whether the output of the tower never changes. It was never trained, and it has no adapter: a
        reference is computed with disabled adapters, and BAdam trains one block at a time.
        """
        self._was_trained = self._was_trained or any(weight.requires_grad for weight in self._weights)
        return not (self._was_trained or self._has_adapter)

    @cached_property
    def _has_adapter(self) -> bool:
        layers = (layer for part in self._outside for layer in part.modules())
        return any(hasattr(layer, "base_layer") for layer in layers)  # a layer of peft

    def _features(self, images: ImageFeatures, tensors: dict[str, Tensor], device: torch.device) -> Any:
        """Return the output of ``get_image_features``, (N, n, H) or a list of (n, H)."""
        key = id(self._model)
        is_frozen = self._is_frozen()
        if key in images.outputs and is_frozen and self.unused is None:
            return images.outputs[key]
        with self._mode(is_frozen):
            if images.each:
                outputs = [self._output_of(images, number, is_frozen, device) for number in range(len(images.each))]
                made = joined_features(outputs)
            else:
                made = image_features(self._model, tensors)
        count = len(_flatten_features(_output(made)))
        if count != sum(images.counts):
            raise RuntimeError(
                f"The vision tower of {type(self._model).__name__} returned {count} features, but the batch has "
                f"{sum(images.counts)} placeholders for its {len(images.counts)} images."
            )
        if is_frozen:
            images.outputs[key] = made
        return made

    @contextmanager
    def _mode(self, is_frozen: bool) -> Iterator[None]:
        """Switch a frozen tower to evaluation mode, and let it round in the same way in every pass: its output is
        cached, and must not depend on which pass of a run is the first with an image."""
        with ExitStack() as modes:
            if is_frozen:
                modes.enter_context(rounding_as_trained())
            for tower in self._towers if is_frozen else ():
                modes.enter_context(evaluating(tower))
            yield

    def _no_features(self, kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Run the tower on an image and discard its features. The gradients of its weights are zeros."""
        given = kwargs.get("input_ids")
        device = (kwargs["inputs_embeds"] if given is None else given).device
        with self._mode(self._is_frozen()):
            made = image_features(self._model, {name: tensor.to(device) for name, tensor in tensors.items()})
        return select_features(made, torch.zeros(0, dtype=torch.long, device=device))

    def _output_of(self, images: ImageFeatures, number: int, is_frozen: bool, device: torch.device) -> Any:
        """Return the output of the tower for one image: the cached one of a frozen tower if there is one."""
        tensors, cache = images.each[number], images.cache
        if isinstance(tensors, EncodedImage):
            if is_frozen and tensors.model == id(self._model):
                return tensors.output
            assert cache is not None
            tensors = cache.prepare_again(images.sources[number])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen):
            output = image_features(self._model, {name: tensor.to(device) for name, tensor in tensors.items()})
        if is_frozen and cache is not None:
            output = features_only(output)
            cache.keep_output(images.sources[number], output, id(self._model))
        return output


def run_in_every_pass(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the tower of a patched model run once in each forward pass, also in those without images.

    Args:
        tensors: of a small image, for forward passes without images.
    """
    for done in patches_of(model):
        if done.why is ENCODED_ONCE:
            done.value.__self__.unused = tensors


def trains_tower(model: nn.Module) -> bool:
    """Return whether any weight of the vision tower or the projector is trained."""
    inner = unwrap_peft(model)
    parts = parts_of(inner)
    return any(p.requires_grad and part_at(name, parts) != "language_model" for name, p in inner.named_parameters())


def _flatten_features(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return features as (F, H), from (N, n, H) or a list of (n, H) or (tiles, n, H)."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([one.flatten(0, -2) for one in features])


def image_features(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the output of vision tower and projector; tensors are cast to their dtype."""
    parts = parts_of(model)
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.is_floating_point())
    dtype = next(weight.dtype for name, weight in weights if part_at(name, parts) != "language_model")
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    return model.base_model.get_image_features(**inputs, return_dict=True)


def num_features(model: nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of features of images, by running the tower."""
    inner = unwrap_peft(model)
    device = next(inner.parameters()).device
    with torch.no_grad():
        made = image_features(inner, {name: tensor.to(device) for name, tensor in tensors.items()})
    return len(_flatten_features(_output(made)))


def _output(made: Any) -> Any:
    """The features in an output of ``get_image_features``: Llama 4 projects them later, in its forward pass."""
    return made.last_hidden_state if made.pooler_output is None else made.pooler_output


def features_only(made: Any) -> Any:
    """Return an output of ``get_image_features`` without hidden states and attentions."""
    unused = ("hidden_states", "attentions", *(() if made.pooler_output is None else ("last_hidden_state",)))
    return replace(made, **{name: None for name in unused if hasattr(made, name)})


def bytes_of(made: Any) -> int:
    """Return the size of an output of ``get_image_features`` in bytes."""
    features = (_flatten_features(one) for one in (_output(made), *(getattr(made, "deepstack_features", None) or ())))
    return sum(one.numel() * one.element_size() for one in features)


def _with_output(made: Any, features: Any, **more: Any) -> Any:
    name = "last_hidden_state" if made.pooler_output is None else "pooler_output"
    return replace(made, **{name: features}, **more)


def joined_features(made: Sequence[Any]) -> Any:
    """Concatenate several outputs of the tower."""
    if len(made) == 1:
        return made[0]
    between = getattr(made[0], "deepstack_features", None)
    more = {}
    if between is not None:
        layers = range(len(between))
        more["deepstack_features"] = [
            _concatenated_outputs([one.deepstack_features[n] for one in made]) for n in layers
        ]
    return _with_output(made[0], _concatenated_outputs([_output(one) for one in made]), **more)


def _concatenated_outputs(features: Sequence[Tensor | Sequence[Tensor]]) -> Tensor | tuple[Tensor]:
    joined = torch.cat([_flatten_features(one) for one in features])
    return joined if isinstance(features[0], Tensor) else (joined,)


def select_features(made: Any, chosen: Tensor) -> Any:
    """Select the features ``chosen`` (M,) from the output of the tower, in their order; for Qwen3-VL also those of its
    intermediate layers (``deepstack_features``)."""
    between = getattr(made, "deepstack_features", None)
    more = {} if between is None else {"deepstack_features": [_select(one, chosen) for one in between]}
    return _with_output(made, _select(_output(made), chosen), **more)


def by_kind(made: Any, chosen: Tensor, is_video: Tensor) -> dict[str, Any]:
    """The features ``chosen`` (M,) as ``mm_encoder_outputs``: of images and of videos apart. Args: is_video: (M,)."""
    kinds = {"image": chosen[~is_video], "video": chosen[is_video]}
    return {kind: select_features(made, places) for kind, places in kinds.items() if len(places)}


def _select(features: Tensor | Sequence[Tensor], chosen: Tensor) -> Tensor | tuple[Tensor]:
    """Select features (M, H), as a tensor or a tuple of one, like the input."""
    found = _flatten_features(features)[chosen]
    return found if isinstance(features, Tensor) else (found,)
