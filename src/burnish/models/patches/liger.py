"""Liger kernels for a model's norms, rotary positions and gated layers, on a GPU.

In:  a loaded model of transformers, with or without adapter. Out: the same model with the same weights and names. Its
logits are compared before and after. Refuses: a device other than a GPU, a missing library, a model or part that Liger
does not support. Liger's losses are not used here: ``fused_loss`` selects the loss.

Liger also replaces functions and classes in the Python modules of the model family, which would affect all other models
of the family in this process, also on a CPU. Classes are restored, because the modules of this model are already
replaced. Functions, such as that of rotary positions, call the kernel for tensors on a GPU only.
https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.options import option, raise_if
from burnish.kernels.probe import preserves_logits, unwrap_peft
from burnish.parallel.options import ParallelOptions
from burnish.parallel.selection import device_of
from burnish.utils.patching import Patch, Reason, patch, record, restore

LIGER = Reason("Liger layer", "computed by a GPU kernel of Liger")
Function = Callable[..., Any]
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass
class LigerOptions:
    """Liger kernels."""

    enable_liger_kernel: bool | None = option(
        None,
        "Use Liger kernels for normalization, rotary embeddings and gated MLPs. Default: on for GPUs if "
        "liger-kernel is installed and supports the model.",
        aliases=("use_liger_kernel",),
    )  # fmt: skip
    liger_kernel_config: dict[str, bool] | None = option(
        None, "Parts that Liger replaces: {rope: true, rms_norm: true, swiglu: true}. Default: all."
    )


class LigerChoices(LigerOptions, ParallelOptions):
    """Options of the Liger kernels."""


@check
def check_liger(options: LigerChoices) -> list[Problem]:
    return liger_problems(device_of(options)) if options.enable_liger_kernel else []


@notes
def liger_notes(options: LigerChoices) -> Iterator[str]:
    if options.liger_kernel_config and not takes_liger(options, device_of(options)):
        yield '"liger_kernel_config" has no effect: Liger\'s kernels are not used.'


def liger_problems(device: torch.device) -> list[Problem]:
    """Reasons why the kernels cannot run here."""
    reasons = []
    if device.type != "cuda":
        reasons.append("its kernels run on a GPU only, and this run is on a CPU")
    if find_spec("liger_kernel") is None:
        reasons.append("it requires the library liger-kernel, which is not installed")
    remedy = "Remove the option: burnish's own layers give the same result."
    what = f'"enable_liger_kernel" is true, but {"; ".join(reasons)}.'
    return [Problem(what, remedy=remedy, option="enable_liger_kernel")] if reasons else []


def takes_liger(options: LigerOptions, device: torch.device) -> bool:
    """Whether Liger is used: as set by the options. Default: if the kernels can run."""
    if options.enable_liger_kernel is None:
        return not liger_problems(device)
    return bool(options.enable_liger_kernel)


def apply_liger(model: nn.Module, config: Mapping[str, bool] | None, is_asked: bool = True) -> list[str]:
    """Replace parts of the model with Liger kernels, using Liger's function for the model family.

    Args:
        model: a model of transformers.
        config: ``liger_kernel_config``: Liger's names of parts (rope, rms_norm, swiglu, geglu) -> whether to replace
            them. Default: all are replaced.
        is_asked: whether the options request Liger. If so, an unsupported model is an error; otherwise it is not
            changed.

    Returns:
        Notes for the user.

    Raises:
        UserError: if Liger does not support the model or a part, or if its kernels change the model's logits.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    inner, chosen = unwrap_peft(model), dict(config or {})
    family = getattr(getattr(inner, "config", None), "model_type", type(inner).__name__)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        if not is_asked:
            return []
        raise UserError(f'Liger has no kernels for a model of type "{family}".', remedy="Remove enable_liger_kernel.")
    parts = [*inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters]
    known = [name for name in parts if name != "model"]
    remedy = f"Available: {', '.join(name for name in known if name not in _LOSSES)}."
    raise_if(
        Problem(
            f'"liger_kernel_config": {family} models have no "{name}".{did_you_mean(name, known)}',
            remedy=remedy,
            option="liger_kernel_config",
        )
        for name in chosen
        if name not in known
    )
    switches = chosen | {name: value for name, value in _LOSSES.items() if name in parts}

    # Liger warns of back ends for other devices and of parts, such as a vision tower, for which it has no kernels.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    change = partial(_apply_liger_kernel_to_instance, model=inner, **switches)
    made: list[Patch] = []
    if not preserves_logits(inner, lambda: made.extend(_limit_to_model(record(inner, change, LIGER)))):
        restore(made)
        raise UserError(
            f"Liger's kernels change the output of this {type(inner).__name__}.",
            why="The installed versions of liger-kernel and transformers are not compatible for this model.",
            remedy="Set enable_liger_kernel: false.",
        )
    unused = [name for name in _LOSSES if chosen.get(name)]
    return [f'"liger_kernel_config": {name} has no effect: see fused_loss.' for name in unused]


def _limit_to_model(made: list[Patch]) -> list[Patch]:
    """Undo changes to Python modules that would affect models on a CPU, and return the remaining patches."""
    shared = [done for done in made if isinstance(done.owner, ModuleType)]
    restore(shared)
    limited = [
        patch(done.owner, done.name, _on_gpu_only(done.value, done.before), done.why)
        for done in shared
        if not isinstance(done.value, type)
    ]
    return [done for done in made if done not in shared] + limited


def _on_gpu_only(kernel: Function, plain: Function) -> Function:
    """Return a function that calls ``kernel`` for tensors on a GPU and ``plain`` for others."""
    if isinstance(plain, partial) and plain.func is _choose:  # of an earlier model
        plain = plain.args[1]
    return partial(_choose, kernel, plain)


def _choose(kernel: Function, plain: Function, first: torch.Tensor, *others: Any, **named: Any) -> Any:
    return (kernel if first.is_cuda else plain)(first, *others, **named)
