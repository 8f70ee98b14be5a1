"""Results that need not be kept for the backward pass, because what they were computed from is kept anyway.

In: a result, and how it was computed. Out: the recipe, for who would save the result: the gate and the up projection
of a gated layer are kept for its own backward pass, so the linear layer behind it computes their product again (a few
operations per number) in place of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Recipe(NamedTuple):
    """The way to compute a result again: ``function(*tensors)``, to the bit."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int  # of the result, when it was computed


_recipes: MutableMapping[Tensor, Recipe] = WeakTensorKeyDictionary()
"""Result -> its recipe, as long as somebody holds the result."""


def may_be_recomputed(result: Tensor, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Give a result the recipe of it. Args: tensors: that are kept for a backward pass, and stay as they are."""
    _recipes[result] = Recipe(function, tuple(tensor.detach() for tensor in tensors), result._version)
    return result


def recipe_of(x: Tensor) -> Recipe | None:
    """The recipe of just this tensor; None where there is none, or it was changed since."""
    recipe: Recipe | None = _recipes.get(x)
    return recipe if recipe is not None and recipe.version == x._version else None
