"""Liger's kernels in the place of a model's norms, rotary positions and gated layers, on a GPU.

In:  a loaded model of transformers, adapted or not. Out: the same model, whose weights and their names stay; what it
answers is compared before and after. Refused: a device that is no GPU, a missing library, a model that Liger does not
know, a part that it does not have. Liger's losses are never taken: the way of the head is ``fused_loss``.

Liger sets its rotary positions for a whole family of models in the process, not for one model: it replaces a function
of the family's module. https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from burnish.core.errors import Problem, UserError, did_you_mean
from burnish.core.options import option
from burnish.engine.options import device_of
from burnish.ops.probe import causal_lm, keeps_answers

_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass
class LigerOptions:
    """Whether layers go through the kernels of liger-kernel."""

    enable_liger_kernel: bool | None = option(
        None, "Liger's kernels for norms, rotary positions and gated layers; by default on a GPU where the library "
        "liger-kernel is installed and knows the model.",
        aliases=("use_liger_kernel",),
    )  # fmt: skip
    liger_kernel_config: dict[str, bool] | None = option(
        None, "Which parts Liger replaces, by its names: {rope: true, rms_norm: true, swiglu: true}; all by default."
    )


def check_liger(options: Any) -> list[Problem]:
    return liger_problems(device_of(options)) if options.enable_liger_kernel else []


def liger_notes(options: Any) -> list[str]:
    if options.liger_kernel_config and not takes_liger(options, device_of(options)):
        return ['"liger_kernel_config" has no effect: Liger\'s kernels are not used.']
    return []


def liger_problems(device: torch.device) -> list[Problem]:
    """Why the kernels cannot run here."""
    reasons = []
    if device.type != "cuda":
        reasons.append("its kernels run on a GPU only, and this run is on a CPU")
    if find_spec("liger_kernel") is None:
        reasons.append("it needs the library liger-kernel, which is not installed")
    remedy = "Leave it out: burnish's own layers compute the same."
    return [Problem(f'"enable_liger_kernel" is true, and {reason}.', remedy=remedy) for reason in reasons]


def takes_liger(options: Any, device: torch.device) -> bool:
    """As asked; where nothing is asked, wherever the kernels can run."""
    if options.enable_liger_kernel is None:
        return not liger_problems(device)
    return bool(options.enable_liger_kernel)


def apply_liger(model: nn.Module, config: Mapping[str, bool] | None, is_asked: bool = True) -> list[str]:
    """Let the model compute through Liger's kernels, as Liger does it for its family.

    Args:
        config: ``liger_kernel_config``: parts by Liger's names (rope, rms_norm, swiglu, geglu), and whether they are
            replaced; those that are not named are.
        is_asked: whether a person asked for Liger; a model that it does not know is then refused, else left alone.
    Returns:
        Sentences for a person.
    Raises:
        UserError: where Liger does not know the model or a part, or its kernels change what the model says.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    inner, given = causal_lm(model), dict(config or {})
    family = getattr(getattr(inner, "config", None), "model_type", type(inner).__name__)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        if not is_asked:
            return []
        raise UserError(
            Problem(f'Liger has no kernels for a model of type "{family}".', remedy="Leave enable_liger_kernel out.")
        )
    parts = [*inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters]
    _check_parts(given, [name for name in parts if name != "model"], family)
    switches = given | {name: value for name, value in _LOSSES.items() if name in parts}

    if not keeps_answers(inner, lambda: _apply_liger_kernel_to_instance(model=inner, **switches)):
        raise UserError(
            Problem(
                f"Liger's kernels change what this {type(inner).__name__} computes.",
                why="The installed versions of liger-kernel and transformers do not go together for it.",
                remedy="Set enable_liger_kernel: false.",
            )
        )
    unused = [name for name in _LOSSES if given.get(name)]
    return [f'"liger_kernel_config": {name} has no effect: see fused_loss.' for name in unused]


def _check_parts(given: Mapping[str, bool], parts: list[str], family: str) -> None:
    known = f"Known: {', '.join(name for name in parts if name not in _LOSSES)}."
    problems = [
        Problem(f'"liger_kernel_config": {family} models have no "{name}".{did_you_mean(name, parts)}', remedy=known)
        for name in given
        if name not in parts
    ]
    if problems:
        raise UserError(problems)
