"""Rotary positions of a vision tower on a CPU, with ``kernels.elementwise.apply_rotary``.

In: a loaded model. Out: the same model, in whose Python modules the function of transformers for these positions is
replaced. The function is recognized by its name and tested: for the same random input, the outputs must be equal.
"""

# L patches, D size of a head

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from burnish.kernels.elementwise import apply_rotary, is_faster
from burnish.kernels.probe import REFUSALS
from burnish.utils.patching import Patch, Reason, patch, python_modules

ROTATION = Reason("rotary function", "computed in one pass, a few rows at a time")
_NAME = "apply_rotary_pos_emb_vision"

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def patch_rotations(model: nn.Module) -> list[Patch]:
    """Replace the function in the Python modules of a model. An existing replacement is kept."""
    files = [file for file in python_modules(model) if _is_known(file)]
    return [patch(file, _NAME, _Rotation(vars(file)[_NAME]), ROTATION) for file in files]


def _is_known(file: ModuleType) -> bool:
    """Whether a Python module has the function, not yet replaced, with the same results."""
    function: Any = vars(file).get(_NAME)
    if not isinstance(function, FunctionType):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        x, cos, sin = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 8), torch.randn(3, 8)
        try:
            output = function(x, x + 1, cos, sin)
        except REFUSALS:
            return False
        expected = apply_rotary(x, cos, sin), apply_rotary(x + 1, cos, sin)
    return len(output) == 2 and all(map(torch.equal, output, expected))


class _Rotation:
    """The function of transformers, faster for many patches that need no gradient."""

    def __init__(self, plain: Rotate) -> None:
        self.plain = plain

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, cos, sin))
        if needs_gradient or not is_faster(q) or any(x.ndim != 3 or cos.shape != (len(x), x.shape[2]) for x in (q, k)):
            return self.plain(q, k, cos, sin)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
