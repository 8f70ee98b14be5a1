"""Linear layers with packed weights while a model generates on a CPU (``kernels.cpu.packed_linear``).

In: a model whose weights do not change meanwhile. Out: the same model, whose linear layers use a packed copy of their
weights. Under autocast the copy takes the place of the one that autocast keeps in the narrower dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from burnish.kernels.cpu.packed_linear import has_kernels, packed_linear
from burnish.parallel.memory import total_memory
from burnish.utils.patching import Patch, PatchOptions, Reason, allows_patch, patch, restore

PACKED = Reason("packed linear layer", "its weights are prepacked for the CPU once instead of for each token")
_ALL = PatchOptions()
_SHARE = 1 / 8
"""Fraction of the machine's memory for copies of frozen weights that are kept in addition to them."""


def packing(
    model: nn.Module, is_compiled: bool, options: PatchOptions = _ALL
) -> Callable[[], AbstractContextManager[None]]:
    """Return ``packed_weights`` of a model, or a context without effect if the options forbid it.

    Args:
        is_compiled: whether the model was compiled, which packed weights would undo.
        options: options that disable patches.
    """
    return partial(packed_weights, model) if allows_patch(options, PACKED) and not is_compiled else nullcontext


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Context in which linear layers use packed weights, in autocast's dtype if enabled, else in their own."""
    made = pack(model)
    try:
        yield
    finally:
        restore(made)


def pack(model: nn.Module) -> list[Patch]:
    """Let the linear layers of a model use packed weights.

    Trained weights have no gradients while a model generates, so their copies do not increase the peak of the memory.
    Copies of frozen weights do, and are made only if there is memory for all of them.

    Returns:
        The patches; none on other devices, and on processors without kernels.
    """
    layers: list[Any] = [module for module in model.modules() if _is_plain(module)]
    extra = sum(layer.weight.nbytes for layer in layers if _is_extra(layer.weight))
    if extra > _SHARE * total_memory(torch.device("cpu")):
        layers = [layer for layer in layers if not _is_extra(layer.weight)]
    made = []
    for layer in layers:
        if has_kernels(dtype := _product_dtype(layer.weight)):
            made.append(patch(layer, "forward", packed_linear(layer.weight, layer.bias, dtype), PACKED))
    return made


def _is_plain(module: Any) -> bool:
    """Whether ``module`` is torch's linear layer on a CPU, with a plain tensor that is not sharded."""
    if type(module) is not nn.Linear or type(module.weight) not in (Tensor, nn.Parameter):
        return False
    return module.weight.device.type == "cpu" and module.weight.ndim == 2 and module.weight.numel() > 0


def _is_extra(weight: Tensor) -> bool:
    """Whether nothing else would take the memory of a copy: the weight is frozen, and in the dtype of the product."""
    return not weight.requires_grad and _product_dtype(weight) == weight.dtype


def _product_dtype(weight: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
