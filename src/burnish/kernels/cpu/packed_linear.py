"""A linear layer with packed weights, for forward passes of a few tokens on a CPU, as in generation.

In: weights that do not change. Out: a function that computes what ``torch.nn.functional.linear`` computes without
gradients, from a copy of the weights in the memory order of oneDNN's kernels. In bfloat16 results are bitwise equal.

For each product, a CPU first reorders the weights, which takes as long as a product with 8 to 16 rows. A packed copy is
reordered once (https://uxlfoundation.github.io/oneDNN/dev_guide_understanding_memory_formats.html); torch.compile does
the same with frozen weights. Measured on one core (AMD EPYC, AVX512-BF16), relative to the product with plain weights:
bfloat16 0.4 to 0.7 of the time for 1 to 32 rows and 0.9 for 128, float32 0.3 to 0.75 for 2 to 32 rows and 0.6 to 1.1
for one.
"""

# I size of the input, O size of the output

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 32
"""Number of rows for which oneDNN selects the memory order. It is used for any number of rows."""


def packed_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function of (..., I) that returns (..., O) in ``dtype``. It keeps a packed copy of the weights.

    The plain weights are used where gradients are needed, where a model switches autocast off, and for a single row in
    float32, whose time is that of reading the weights.

    Args:
        weight: (O, I) any float dtype.
        bias: (O,) any float dtype.
        dtype: dtype of the product; ``has_kernels`` must be true for it.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), _ROWS)
    narrow = None if bias is None else bias.detach().to(dtype)
    product = torch.ops.mkldnn._linear_pointwise.default
    is_cast = torch.is_autocast_enabled("cpu")

    def forward(input: Tensor) -> Tensor:
        is_one_row = dtype == torch.float32 and input.numel() == weight.shape[1]
        if is_one_row or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") != is_cast:
            return F.linear(input, weight, bias)
        result: Tensor = product(input.to(dtype), packed, narrow, "none", [], "")
        return result

    return forward


@cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether torch's operators for packed weights, which are not documented, compute a product on this processor."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    with torch.random.fork_rng(devices=()), torch.no_grad():
        x, weight = torch.randn(3, 8).to(dtype), torch.randn(16, 8).to(dtype)
        try:
            packed = packed_linear(weight, None, dtype)(x)
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            return False
        return torch.allclose(packed, F.linear(x, weight), atol=1e-2 if dtype.itemsize == 2 else 1e-5)
