"""The tokens of a batch that are learned, and the sums over them, from hidden states or from logits: for the objectives
of the command line (``lm.py``) and for ``SFTTrainer`` (``trainer/trl/sft/loss.py``).
"""

# B rows, T tokens in a row, N learned positions, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from burnish.kernels.cross_entropy import TokenLoss, TokenSums, plain_cross_entropy
from burnish.kernels.head_kernels import head_loss
from burnish.kernels.probe import Head
from burnish.loop.types import IGNORE_INDEX, Batch, Row
from burnish.losses.logits import target_positions


def collate_learned(collate: Callable[[Sequence[Row]], Batch], rows: Sequence[Row]) -> Batch:
    """A micro-batch that says which positions are learned, found while it is still on the CPU: on a GPU to look for
    them would mean to wait for the device."""
    batch = collate(rows)
    return {**batch, "target_positions": target_positions(batch["labels"])}


class Targets(NamedTuple):
    """Target positions of a batch. (N,) each.

    Args:
        positions: counted through the rows.
        ids: the next tokens; ``IGNORE_INDEX`` in a blank batch, which has the positions of the batch that it was made
            of, and no labels.
        weights: what each counts; None is 1.
    """

    positions: Tensor
    ids: Tensor
    weights: Tensor | None = None

    @classmethod
    def of(cls, labels: Tensor, positions: Tensor | None = None, loss_weights: Tensor | None = None) -> Targets:
        """Args: labels, loss_weights: (B, T); positions: (N,), where the collator found them."""
        positions = target_positions(labels) if positions is None else positions
        weights = None if loss_weights is None else loss_weights.flatten()[positions + 1]
        return cls(positions, labels.flatten()[positions + 1], weights)

    @property
    def counts(self) -> Tensor:
        """(N,) what each counts, 0 in a blank batch."""
        counts = (self.ids != IGNORE_INDEX).float()
        return counts if self.weights is None else counts * self.weights


def sums_of_hidden(
    hidden: Tensor, head: Head, targets: Targets, rules: TokenLoss, way: str = "chunked", weight: Tensor | None = None
) -> TokenSums:
    """The sums from what the head is given at the learned positions (N, H), without the logits of all of them.

    Args:
        way: of ``ops.head_kernels``.
        weight: (V, H) in place of the head's own (``ops.tied``).
    """
    if head.scale != 1.0:
        hidden = hidden * head.scale
    weight = head.linear.weight if weight is None else weight
    return head_loss(way, hidden, weight, targets.ids, rules, head.linear.bias, targets.weights)


def sums_of_logits(logits: Tensor, targets: Targets, rules: TokenLoss) -> TokenSums:
    """The same from the logits of the learned positions (N, V)."""
    return plain_cross_entropy(logits, targets.ids.clamp(min=0), rules, targets.counts)
