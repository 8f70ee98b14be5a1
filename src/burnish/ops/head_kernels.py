"""Which way the head and its loss go: burnish's own chunks, or a kernel of another library that was asked for by name.

In:  hidden states of learned positions, the head, targets, and the name of a way. Out: the sums of
``ops.cross_entropy``, whichever way they were made. Refused by ``obstacle``, in a sentence: what a kernel cannot do.

``chunked`` is burnish's own and the default on every device: it does everything, and reads nothing from the device.
``liger`` (https://arxiv.org/abs/2410.10989) goes through chunks too, as many as V / H, and waits for the device to
count the targets. ``cut_cross_entropy`` (https://arxiv.org/abs/2411.09009) holds no logits at all, makes them twice,
and waits for the device where some targets are blank. It is told to leave out no small gradient, which it otherwise
does, so that the step stays the same.
"""

# N tokens that are learned, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from burnish.core.types import IGNORE_INDEX
from burnish.ops.cross_entropy import TokenLoss, TokenSums, chunk_length, linear_cross_entropy

LIBRARIES = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
"""Way -> the module it needs. The packages are called the same, with a hyphen."""

WAYS = ("chunked", *LIBRARIES)


def obstacle(way: str, device: torch.device, rules: TokenLoss, has_bias: bool = False) -> str:
    """Why ``way`` cannot be gone, as a sentence; "" where it can."""
    library = LIBRARIES.get(way)
    if library is None:
        return ""
    if find_spec(library) is None:
        return f"It needs the library {library.replace('_', '-')}, which is not installed."
    if device.type != "cuda":
        return "Its kernels run on a GPU only."
    if rules.accuracy or rules.entropy:
        return "It sums losses alone, no accuracy and no entropy."
    if rules.factor:
        return "It does not weigh the loss of a token by the model's own probabilities."
    if way == "cut_cross_entropy" and rules.label_smoothing:
        return "It knows no label smoothing."
    if way == "cut_cross_entropy" and has_bias:
        return "It knows no bias, which the head of this model has."
    return ""


def head_loss(
    way: str, hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> TokenSums:  # fmt: skip
    """The sums of the learned tokens.

    Args:
        way: one of ``WAYS``, to which there is no ``obstacle``.
        hidden: (N, H). weight: (V, H). bias: (V,).
        targets: (N,) token ids; ``IGNORE_INDEX`` counts nothing.
        token_weights: (N,) what each token counts; None is 1.
    """
    kernel = _KERNELS.get(way)
    if kernel is None or not len(hidden):
        counts = _counts(targets, token_weights)
        return linear_cross_entropy(hidden, weight, targets.clamp(min=0), rules, bias, counts)
    total = kernel(hidden, weight, targets, rules, bias, token_weights)
    none = total.detach().new_zeros(())
    return TokenSums(total, none, none)


def logits_bytes(way: str, tokens: int, hidden: int, vocabulary: int, device: torch.device) -> int:
    """Bytes of the logits that exist at a time, for ``tokens`` learned tokens; ``liger`` holds about N x H of them.

    On a GPU whichever is more, in 16 bits with a kernel for their slope, or without one in float32.
    """
    if way == "cut_cross_entropy":
        return 0
    if way == "liger":
        return 4 * tokens * min(hidden, vocabulary)
    if device.type == "cpu":
        return 4 * vocabulary * min(tokens, chunk_length(vocabulary, device))
    ways = ((2, chunk_length(vocabulary, device, in_place=True)), (4, chunk_length(vocabulary, device)))
    return max(size * vocabulary * min(tokens, most) for size, most in ways)


def _counts(targets: Tensor, token_weights: Tensor | None) -> Tensor | None:
    """(N,) what each token counts, nothing for ``IGNORE_INDEX``; None where all count 1, which a CPU can look up."""
    is_counted = targets != IGNORE_INDEX
    if token_weights is not None:
        return is_counted * token_weights
    return None if targets.device.type == "cpu" and bool(is_counted.all()) else is_counted.float()


Kernel = Callable[[Tensor, Tensor, Tensor, TokenLoss, Tensor | None, Tensor | None], Tensor]


def _liger(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None, token_weights: Tensor | None
) -> Tensor:
    """() float32. Tokens that count alike are summed by the kernel, which then makes their gradients in one pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    rule = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        label_smoothing=rules.label_smoothing,
        reduction="sum" if token_weights is None else "none",
        softcap=rules.softcap,
        accum_dtype=torch.float32,  # the gradient of the head is a sum over chunks: in 16 bits each addition rounds
    )
    losses: Tensor = rule(weight, hidden, targets, bias)
    return losses.float() if token_weights is None else losses.float() @ token_weights


def _cut_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: TokenLoss, bias: Tensor | None, token_weights: Tensor | None
) -> Tensor:
    """() float32."""
    from cut_cross_entropy import linear_cross_entropy as cut  # type: ignore[import-not-found]

    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # its kernels take both in one format, and do not look at autocast
        hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
    losses: Tensor = cut(
        hidden, weight, targets, ignore_index=IGNORE_INDEX, softcap=rules.softcap, reduction="none", filter_eps=None
    )
    return losses.float().sum() if token_weights is None else losses.float() @ token_weights


_KERNELS: dict[str, Kernel] = {"liger": _liger, "cut_cross_entropy": _cut_cross_entropy}
