"""The trained tokens of a batch, and loss sums over them, from hidden states or from logits.

Used by the objectives of the command line (``lm.py``) and by ``SFTTrainer`` (``trainer/trl/sft/loss.py``).
"""

# B rows, T tokens in a row, N target positions, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from burnish.kernels.cross_entropy import TokenLoss, TokenSums, linear_cross_entropy, plain_cross_entropy
from burnish.kernels.probe import Head
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.losses.logits import target_positions


def collate_trained(collate: Callable[[Sequence[Row]], Batch], rows: Sequence[Row]) -> Batch:
    """A micro-batch with ``target_positions``. They are found on the CPU, because finding them on a GPU would wait for
    the device.
    """
    batch = collate(rows)
    return {**batch, "target_positions": target_positions(batch["labels"])}


class Targets(NamedTuple):
    """Target positions of a batch, (N,) each.

    Args:
        positions: indices into the flattened batch.
        ids: the next tokens; ``IGNORE_INDEX`` in a padding batch, which has the positions of the batch that it was
            copied from, and no labels.
        weights: weight of each token; None: 1.
    """

    positions: Tensor
    ids: Tensor
    weights: Tensor | None = None

    @classmethod
    def of(cls, labels: Tensor, positions: Tensor | None = None, loss_weights: Tensor | None = None) -> Targets:
        """Create from ``labels`` and ``loss_weights`` (B, T). ``positions`` (N,) if the collator found them."""
        positions = target_positions(labels) if positions is None else positions
        weights = None if loss_weights is None else loss_weights.flatten()[positions + 1]
        return cls(positions, labels.flatten()[positions + 1], weights)

    @property
    def token_weights(self) -> Tensor:
        """(N,) weight of each token, 0 in a padding batch."""
        counts = (self.ids != IGNORE_INDEX).float()
        return counts if self.weights is None else counts * self.weights


def sums_of_hidden(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    rules: TokenLoss,
    weight: Tensor | None = None,
) -> TokenSums:
    """Loss sums from the head's inputs at the trained positions (N, H), without all of their logits at once.

    Args:
        hidden: (N, H) inputs of the head.
        head: the model's head.
        targets: the target positions.
        rules: what is computed for each token.
        weight: (V, H) used instead of the head's own (``kernels.tied``).
    """
    if head.scale != 1.0:
        hidden = hidden * head.scale
    weight = head.linear.weight if weight is None else weight
    counts: Tensor | None = targets.token_weights
    # Without weights the gradient is not multiplied. On a GPU, testing this would wait for the device.
    if targets.weights is None and hidden.device.type == "cpu" and bool((targets.ids != IGNORE_INDEX).all()):
        counts = None
    return linear_cross_entropy(hidden, weight, targets.ids.clamp(min=0), rules, head.linear.bias, counts)


def sums_of_logits(logits: Tensor, targets: Targets, rules: TokenLoss) -> TokenSums:
    """Loss sums from the logits of the trained positions (N, V)."""
    return plain_cross_entropy(logits, targets.ids.clamp(min=0), rules, targets.token_weights)
