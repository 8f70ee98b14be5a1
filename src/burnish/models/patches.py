"""Every change that burnish makes to code or data of someone else's, listed.

A patch is here because there was no other way: it says what it is for, since which version of which library it is
needed, and where the fault is described. ``explain`` prints the list of those that a run will apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Patch:
    """One change.

    Args:
        library: whose code or data is changed, and the versions for which this is known to be needed.
        reason: what goes wrong without it, and what is done; a sentence.
        link: where it is described.
        is_needed, apply: whether this model is concerned, and the change itself.
    """

    name: str
    library: str
    reason: str
    link: str
    is_needed: Callable[[nn.Module], bool]
    apply: Callable[[nn.Module], None]


# What generation reads only when it samples, and the value at which it does nothing.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}


def _samples_without_sampling(model: nn.Module) -> bool:
    generation = getattr(model, "generation_config", None)
    if generation is None or generation.do_sample:
        return False
    return any(getattr(generation, name, None) not in {None, neutral} for name, neutral in _SAMPLING.items())


def _let_it_sample(model: nn.Module) -> None:
    model.generation_config.do_sample = True  # type: ignore[union-attr]


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="sampling flags without do_sample",
        library="transformers 4.39 to 5.23",
        reason="the generation_config sets a temperature or top_p but not do_sample, and cannot be saved so once it is "
        "changed; do_sample is set.",
        link="https://github.com/huggingface/transformers/issues/29988",
        is_needed=_samples_without_sampling,
        apply=_let_it_sample,
    ),
)


def apply_patches(model: nn.Module) -> list[Patch]:
    """Apply what this model needs; the patches applied, in order."""
    needed = [patch for patch in PATCHES if patch.is_needed(model)]
    for patch in needed:
        patch.apply(model)
    return needed
