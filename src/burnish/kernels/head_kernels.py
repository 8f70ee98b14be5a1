"""Backends of the head and its loss: burnish's own chunks, or a kernel of another library that was selected by name.

In:  hidden states of target positions, the head, targets, and the name of a backend. Out: the sums of
``kernels.cross_entropy``. ``head_obstacle`` explains why a backend cannot be used.

``chunked`` is burnish's own and the default on every device. It supports everything, and reads nothing from the device.
``liger`` (https://arxiv.org/abs/2410.10989) computes V / H chunks, and waits for the device to count the targets.
``cut_cross_entropy`` (https://arxiv.org/abs/2411.09009) stores no logits, computes them twice, and waits for the device
if some targets are ignored. By default it skips small gradients; this is disabled here, so that results do not change.
"""

# N trained tokens, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from burnish.kernels.cross_entropy import TokenLoss, TokenSums, chunk_length, linear_cross_entropy
from burnish.loop.types import IGNORE_INDEX

LIBRARIES = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
"""Backend -> the module that it requires. The packages have the same name, with a hyphen."""

BACKENDS = ("chunked", *LIBRARIES)


def head_obstacle(backend: str, device: torch.device, rules: TokenLoss, has_bias: bool = False) -> str:
    """The reason why ``backend`` cannot be used, as a sentence; "" if it can."""
    library = LIBRARIES.get(backend)
    if library is None:
        return ""
    if find_spec(library) is None:
        return f"It needs the library {library.replace('_', '-')}, which is not installed."
    if device.type != "cuda":
        return "Its kernels run on a GPU only."
    if rules.accuracy or rules.entropy:
        return "It computes only the loss, without accuracy and entropy."
    if rules.factor:
        return "It does not support weighting the loss of a token by the model's probabilities."
    if backend == "cut_cross_entropy" and rules.label_smoothing:
        return "It does not support label smoothing."
    if backend == "cut_cross_entropy" and has_bias:
        return "It does not support the bias of this model's head."
    return ""


def head_loss(
    backend: str, hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> TokenSums:  # fmt: skip
    """Compute the loss sums of the trained tokens.

    Args:
        backend: one of ``BACKENDS`` without ``head_obstacle``.
        hidden: (N, H).
        weight: (V, H).
        targets: (N,) token ids; ``IGNORE_INDEX`` has no weight.
        rules: definition of the loss.
        bias: (V,).
        token_weights: (N,) weight of each token; None: 1.
    """
    kernel = _KERNELS.get(backend)
    if kernel is None or not len(hidden):
        counts = _counts(targets, token_weights)
        return linear_cross_entropy(hidden, weight, targets.clamp(min=0), rules, bias, counts)
    total = kernel(hidden, weight, targets, rules, bias, token_weights)
    none = total.detach().new_zeros(())
    return TokenSums(total, none, none)


def logits_bytes(backend: str, tokens: int, hidden: int, vocabulary: int, device: torch.device) -> int:
    """Maximum number of bytes of logits in memory, for ``tokens`` trained tokens; with ``liger`` about N x H."""
    if backend == "cut_cross_entropy":
        return 0
    if backend == "liger":
        return 4 * tokens * min(hidden, vocabulary)
    return 4 * vocabulary * min(tokens, chunk_length(vocabulary, device))


def _counts(targets: Tensor, token_weights: Tensor | None) -> Tensor | None:
    """(N,) weight of each token, 0 for ``IGNORE_INDEX``. None if all are 1, which is only checked on a CPU."""
    is_counted = targets != IGNORE_INDEX
    if token_weights is not None:
        return is_counted * token_weights
    return None if targets.device.type == "cpu" and bool(is_counted.all()) else is_counted.float()


Kernel = Callable[[Tensor, Tensor, Tensor, TokenLoss, Tensor | None, Tensor | None], Tensor]


def _liger(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None, token_weights: Tensor | None
) -> Tensor:
    """() float32, with liger. The kernel sums tokens of equal weight, and can then compute gradients in the same
    pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    rule = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        label_smoothing=rules.label_smoothing,
        reduction="sum" if token_weights is None else "none",
        softcap=rules.softcap,
        accum_dtype=torch.float32,  # the head's gradient is a sum over chunks, which 16 bits would round each time
    )
    losses: Tensor = rule(weight, hidden, targets, bias)
    return losses.float() if token_weights is None else losses.float() @ token_weights


def _cut_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None, token_weights: Tensor | None
) -> Tensor:
    """() float32, with cut_cross_entropy."""
    from cut_cross_entropy import linear_cross_entropy as cut  # type: ignore[import-not-found]

    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # its kernels require the same dtype for both, and ignore autocast
        hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
    losses: Tensor = cut(
        hidden, weight, targets, ignore_index=IGNORE_INDEX, softcap=rules.softcap, reduction="none", filter_eps=None
    )
    return losses.float().sum() if token_weights is None else losses.float() @ token_weights


_KERNELS: dict[str, Kernel] = {"liger": _liger, "cut_cross_entropy": _cut_cross_entropy}
