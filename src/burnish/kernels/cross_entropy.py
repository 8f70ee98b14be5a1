"""The language model head and its cross entropy, at target positions only.

In:  hidden states, the head's weight, the token that each position should predict. Out: sums over the tokens: loss and,
if requested, the number of correct predictions and the entropy.

``linear_cross_entropy`` never stores the logits of all tokens. It computes them in chunks. The gradient of a token's
loss depends on its own logits only, so the gradients are computed in the same pass. This takes three matrix products;
recomputing the chunks in the backward pass would take four. The backward pass multiplies the gradients by the upstream
factor once. ``plain_cross_entropy`` computes the same from given logits by the definition.

    loss of a token = (1 - s) * -log p(target) + s / V * sum over v of -log p(v)

with label smoothing s, as in transformers' ``LabelSmoother`` (Szegedy et al. 2016, section 7,
https://arxiv.org/abs/1512.00567). The loss of each token may be multiplied by a factor computed from the model's own
probabilities (``loss_factors``), which is treated as a constant without gradient.
"""

# N trained tokens, H hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.kernels.cpu import buffer_pool

CHUNK_BYTES = 2**26
_CHUNK_BYTES_OF_GPU = 2**29
"""Size of a chunk of logits in float32. On a CPU, chunks of 64 and of 512 MiB take the same time. On a GPU each chunk
reads and writes the whole gradient of the head. Time and memory of the loss and its gradients on an H200 in bfloat16,
16,384 tokens, a vocabulary of 152,000 and a width of 896: 102 ms and 1.2 GB in chunks of 128 MiB, 75 and 1.6 of 256, 62
and 2.2 of 512, 56 and 3.4 of 1,024, 52 and 5.9 of 2,048."""

_MIN_CHUNK_TOKENS = 256
"""Minimum number of tokens of a chunk on a CPU, for any vocabulary, because a product first reorders the whole head in
memory. Time of both products per token, for a vocabulary of 152,000 and a width of 896, bfloat16 on one AVX512-BF16
core: 4.2 ms in chunks of 46 tokens, 3.3 ms of 110, 3.2 ms of 133, 3.0 ms of 178 to 320."""

_ROWS_BYTES = 2**20
"""Size, in float32, of the rows of a chunk that are processed together on a CPU, so that they stay in the processor's
cache. For 1,120 tokens and a vocabulary of 32,000 on one AVX512-BF16 core, bfloat16: 236 ms for whole chunks, 124 ms
for 1 MiB, 152 ms for 4 MiB."""

_TILE_BYTES = 2**22
"""Size of a tile of the weight's gradient, which is summed while it is in the processor's cache."""


@dataclass(frozen=True)
class TokenLoss:
    """Definition of the loss, and the further sums that are computed.

    Args:
        label_smoothing: s above, in [0, 1).
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2, https://arxiv.org/abs/2408.00118).
        accuracy: count correct predictions; takes one more pass over the logits.
        entropy: sum the entropy of the predictions; takes two more.
        factor: "dft" or "eaft": factor of each token's loss (``loss_factors``).
        eaft_alpha: exponent in the factor of "eaft".
    """

    label_smoothing: float = 0.0
    softcap: float | None = None
    accuracy: bool = False
    entropy: bool = False
    factor: Literal["dft", "eaft"] | None = None
    eaft_alpha: float = 1.0


class TokenSums(NamedTuple):
    """Sums over tokens, each multiplied by its weight. All () float32; zero if not requested."""

    total: Tensor  # in nats; the only one with a gradient
    correct: Tensor  # tokens
    entropy: Tensor  # in nats


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rules: TokenLoss | None = None,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> TokenSums:
    """Compute the sums from hidden states, without the logits of all tokens.

    Args:
        hidden: (N, H); with N = 0 the sums and gradients are zero.
        weight: (V, H) the head. Products use autocast's dtype if enabled, else the weight's.
        targets: (N,) token ids.
        rules: definition of the loss.
        bias: (V,) of the head.
        token_weights: (N,) weight of each token; None: 1.
    """
    dtype = product_dtype(hidden.device, weight)
    # Gradients are disabled inside forward(), so it gets the information which of them are needed.
    needs = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    sums = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, token_weights, rules or TokenLoss(), dtype, needs
    )
    return TokenSums(*sums)


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, rules: TokenLoss | None = None, token_weights: Tensor | None = None
) -> TokenSums:
    """Compute the sums from given logits (N, V), to which a cap has been applied; in float32."""
    rules = rules or TokenLoss()
    weights = torch.ones_like(targets, dtype=torch.float32) if token_weights is None else token_weights
    logps = torch.log_softmax(logits.float(), -1)
    losses = F.nll_loss(logps, targets, reduction="none") * (1 - rules.label_smoothing)
    if rules.label_smoothing:
        losses = losses - rules.label_smoothing * logps.mean(-1)
    measured = logps.detach()
    if rules.factor:
        losses = losses * loss_factors(measured.exp(), targets, rules)
    return TokenSums(
        (losses * weights).sum(),
        ((measured.argmax(-1) == targets) * weights).sum() if rules.accuracy else weights.new_zeros(()),
        (-(measured.exp() * measured).sum(-1) * weights).sum() if rules.entropy else weights.new_zeros(()),
    )


_EAFT_CANDIDATES = 20
_EAFT_SCALE = 3.0
"""Approximate maximum of the entropy of 20 candidates, ln 20 (Diao et al. 2026, section 3)."""


def loss_factors(probabilities: Tensor, targets: Tensor, rules: TokenLoss) -> Tensor:
    """Factors of the loss of each token, in addition to its weight.

    dft: the probability of the target, so that an unlikely target has no larger gradient than a likely one (Wu et al.
    2025, eq. 9, https://arxiv.org/abs/2508.05629).
    eaft: (entropy of the 20 most likely candidates / 3) ^ alpha, which reduces the loss where the model is confident of
    another token (Diao et al. 2026, https://arxiv.org/abs/2601.02151).

    Args:
        probabilities: (n, V) float32, without gradient.
        targets: (n,) token ids.
        rules: definition of the loss.

    Returns:
        (n,) float32, at least 0.
    """
    if rules.factor == "dft":
        return probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    top_probabilities = probabilities.topk(min(_EAFT_CANDIDATES, probabilities.shape[-1]), -1).values
    entropy: Tensor = torch.special.entr(top_probabilities / top_probabilities.sum(-1, keepdim=True)).sum(-1)
    return (entropy / _EAFT_SCALE).pow(rules.eaft_alpha)


def chunk_length(vocabulary: int, device: torch.device) -> int:
    """Maximum number of tokens whose logits are in memory at a time."""
    if device.type == "cpu":
        return max(_MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * vocabulary))
    return max(1, _CHUNK_BYTES_OF_GPU // (4 * vocabulary))


def logits_bytes(tokens: int, vocabulary: int, device: torch.device) -> int:
    """Maximum number of bytes of logits in memory, in float32, for ``tokens`` trained tokens."""
    return 4 * vocabulary * min(tokens, chunk_length(vocabulary, device))


def even_length(count: int, most: int) -> int:
    """Number of tokens of each chunk except the last: as few chunks as possible, of similar length, as short ones
    are slow."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def product_dtype(device: torch.device, weight: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's if enabled, else the weight's."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else weight.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_weights: Tensor | None,
        rules: TokenLoss, dtype: torch.dtype, needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            weights = None if token_weights is None else token_weights.float()
            sums = [hidden.new_zeros((), dtype=torch.float32) for _ in range(3)]
            gradients = Gradients.zero(hidden, weight, bias, needs)
            size = even_length(len(h), chunk_length(len(w), h.device))
            whole = buffer_pool.empty((min(size, len(h)), len(w)), dtype, h.device)
            for begin in range(0, len(h), size):
                part = slice(begin, begin + size)
                logits = logits_into(h[part], w, None if bias is None else bias.to(dtype), whole)
                chunk_sums, grad_logits = _chunk(
                    logits, targets[part], None if weights is None else weights[part], rules, any(needs)
                )
                sums = [so_far + value for so_far, value in zip(sums, chunk_sums, strict=True)]
                if grad_logits is not None:
                    gradients.add(part, grad_logits, h[part], w, is_first=begin == 0)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums[1], sums[2])
        return tuple(sums)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def logits_into(hidden: Tensor, weight: Tensor, bias: Tensor | None, whole: Tensor) -> Tensor:
    """(n, V) the logits, written into the first rows of ``whole``."""
    into = whole[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=into)
    return torch.addmm(bias, hidden, weight.t(), out=into)


def _empty_like(like: Tensor) -> Tensor:
    """An uninitialized tensor from the buffer pool."""
    return buffer_pool.empty(tuple(like.shape), like.dtype, like.device)


def _chunk(
    logits: Tensor, targets: Tensor, weights: Tensor | None, rules: TokenLoss, needs_logits_grad: bool
) -> tuple[TokenSums, Tensor | None]:
    """The sums of some tokens, and (n, V) the gradient of their total with respect to the logits, which it
    overwrites."""
    of_tokens = token_values(logits, targets, weights, rules, needs_logits_grad)
    sums = TokenSums(*(values.sum() if weights is None else values @ weights for values in of_tokens))
    return sums, logits if needs_logits_grad else None


def token_values(
    logits: Tensor, targets: Tensor, weights: Tensor | None, rules: TokenLoss, needs_logits_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) each: losses, correct predictions, entropies.

    With ``needs_logits_grad`` the logits (n, V) are overwritten with the gradient of the weighted losses. On a CPU a
    few rows are processed at a time, which does not change results.
    """
    height = max(1, _ROWS_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else max(1, len(logits))
    parts = list(zip(torch.split(logits, height), torch.split(targets, height), strict=True))
    counts = [None] * len(parts) if weights is None else torch.split(weights, height)
    each = [_rows(some, ids, count, rules, needs_logits_grad) for (some, ids), count in zip(parts, counts, strict=True)]
    losses, correct, entropy = (torch.cat(of_rows) for of_rows in zip(*each, strict=True))
    return losses, correct, entropy


def _rows(
    logits: Tensor, targets: Tensor, weights: Tensor | None, rules: TokenLoss, needs_logits_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) each: losses, correct predictions, entropies; zero if not requested.

    With ``needs_logits_grad`` the logits (n, V) are overwritten with the gradient of the weighted losses:

    (p - (1 - s) * one_hot(target) - s / V) * weight * factor with p = softmax(logits), multiplied by ``1 - (logit /
    softcap)²`` if logits are capped.
    """
    smoothing, at_target = rules.label_smoothing, targets.unsqueeze(-1)
    capped = rules.softcap * torch.tanh(logits.float() / rules.softcap) if rules.softcap else logits
    grad_logits = torch.softmax(capped, -1, dtype=torch.float32)  # p; the only exponential per logit
    log_p, log_sum = _logarithms(capped, grad_logits, at_target)
    losses = -log_p * (1 - smoothing)
    if smoothing:
        losses += smoothing * (log_sum - capped.mean(-1, dtype=torch.float32))
    none = torch.zeros_like(losses)
    correct = (capped.max(-1).indices == targets).float() if rules.accuracy else none  # a quarter of argmax's time
    entropy = log_sum - (grad_logits * capped).sum(-1) if rules.entropy else none
    if rules.factor:
        factors = loss_factors(grad_logits, targets, rules)
        losses, weights = losses * factors, factors if weights is None else weights * factors
    if needs_logits_grad:
        if smoothing:
            grad_logits -= smoothing / grad_logits.shape[-1]
        grad_logits.scatter_add_(-1, at_target, grad_logits.new_full(at_target.shape, smoothing - 1))
        if rules.softcap:
            grad_logits *= 1 - (capped / rules.softcap).square()
        logits.copy_(grad_logits if weights is None else grad_logits.mul_(weights.unsqueeze(-1)))
    return losses, correct, entropy


def _logarithms(logits: Tensor, p: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) log p(target), and (n,) the logarithm of the sum of exponentials, from p = softmax(logits) (n, V).

    On a CPU both are computed from the target's own logit and probability. If the probability is too small for a
    logarithm, and always on a GPU, where testing this would wait for the device, they are computed from the largest
    probability, which is at least 1 / V.
    """
    logit, of_target = (x.gather(-1, at_target).squeeze(-1).float() for x in (logits, p))
    if p.device.type == "cpu" and of_target.min() > _MIN_PROBABILITY:
        log_p = of_target.log()
        return log_p, logit - log_p
    log_sum = logits.amax(-1).float() - p.amax(-1).log()
    return logit - log_sum, log_sum


_MIN_PROBABILITY = 1e-30
"""Far above the smallest normal float32, 1e-38."""


class Gradients(NamedTuple):
    """Gradients of hidden states (N, H), weight (V, H) and bias (V,), each in the dtype of its tensor, or None."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zero(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]) -> Gradients:
        # The first chunk writes the weight's gradient, so it is only initialized with zeros if there is no chunk.
        create = _empty_like if len(hidden) else torch.zeros_like
        return cls(
            torch.empty_like(hidden) if needs[0] else None,
            create(weight) if needs[1] else None,
            torch.zeros_like(bias) if needs[2] and bias is not None else None,
        )

    def add(self, part: slice, grad_logits: Tensor, hidden: Tensor, weight: Tensor, is_first: bool) -> None:
        """Add a chunk: ``grad_logits`` (n, V), ``hidden`` (n, H), ``weight`` (V, H), in the dtype of the products."""
        if self.bias is not None:
            self.bias.add_(grad_logits.sum(0, dtype=torch.float32))
        if self.hidden is not None:
            self.hidden[part] = grad_logits @ weight
        if self.weight is not None:
            self._add_to_weight(grad_logits, hidden, is_first)

    def _add_to_weight(self, grad_logits: Tensor, hidden: Tensor, is_first: bool) -> None:
        assert self.weight is not None
        # Tiles are for a CPU's cache. A GPU computes one product rather than a hundred small ones.
        row_bytes, is_cpu = hidden.shape[1] * hidden.element_size(), hidden.device.type == "cpu"
        height = max(1, _TILE_BYTES // row_bytes) if is_cpu else len(self.weight)
        for tile, grad_tiles in zip(
            torch.split(self.weight, height), torch.split(grad_logits, height, dim=1), strict=True
        ):
            if tile.dtype != grad_tiles.dtype:
                product = grad_tiles.t() @ hidden
                tile.copy_(product) if is_first else tile.add_(product)
            elif is_first:
                torch.mm(grad_tiles.t(), hidden, out=tile)
            else:  # the product adds to the tile, in a tenth less time than with a tensor between them
                tile.addmm_(grad_tiles.t(), hidden)
