"""Results that need not be kept for the backward pass, because their inputs are kept anyway.

In: a result, and how it was computed. Out: a recipe for the consumer of the result. For example, the gate and up
projections of a gated layer are kept for its own backward pass, so the next linear layer recomputes their product (a
few operations per element) instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Recipe(NamedTuple):
    """How to recompute a result exactly: ``function(*tensors)``."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int  # version counter of the result when it was computed


_recipes: MutableMapping[Tensor, Recipe] = WeakTensorKeyDictionary()
"""Result -> its recipe, as long as the result is referenced."""


def may_be_recomputed(result: Tensor, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Register the recipe of a result. ``tensors`` are kept for a backward pass and must not be changed."""
    _recipes[result] = Recipe(function, tuple(tensor.detach() for tensor in tensors), result._version)
    return result


def recipe_of(x: Tensor) -> Recipe | None:
    """The recipe of this tensor. None if there is none, or if the tensor was changed since then."""
    recipe: Recipe | None = _recipes.get(x)
    return recipe if recipe is not None and recipe.version == x._version else None
