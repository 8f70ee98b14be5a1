"""The loss of supervised fine-tuning and its metrics, from one look at the logits of the learned positions.

In: a model, a batch with labels. Out: sums over the learned tokens: loss, tokens predicted right, entropy.

The model is called as it is, wrapped or adapted, but its head is handed no positions: the hidden states are taken on
their way to it, and the learned ones go through ``ops.cross_entropy`` in chunks. Where the head is not what
``ops.probe`` understands, or somebody wants the logits, they are made whole.
"""

# B rows, T tokens in a row, N learned positions, H hidden size, V vocabulary

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from burnish.core.types import IGNORE_INDEX, Batch
from burnish.objectives.lm import learned_positions
from burnish.ops.cross_entropy import TokenLoss, TokenSums, linear_cross_entropy, plain_cross_entropy
from burnish.ops.probe import Head


class Learned(NamedTuple):
    """What is learned of a batch: position in the flattened rows, next token, and 1, or 0 in a blank batch. (N,)"""

    positions: Tensor
    targets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, labels: Tensor, positions: Tensor | None) -> Learned:
        """Args: labels: (B, T); positions: (N,), which the collator found while the batch was on the CPU."""
        if positions is None:
            positions = learned_positions(labels)  # on a GPU a wait for the device
        targets = labels.flatten()[positions + 1]
        return cls(positions, targets.clamp(min=0), (targets != IGNORE_INDEX).float())


def sums_without_logits(
    model: nn.Module, inputs: Batch, learned: Learned, width: int, head: Head, rules: TokenLoss
) -> tuple[TokenSums, Any]:
    """The sums, and the model's output, whose logits are empty.

    Args:
        width: of the labels, which belong to the last so many positions: a learned prompt may stand before them.
    """
    hidden, outputs = _hidden_states(model, inputs, head)
    hidden = hidden[:, -width:].flatten(0, 1)[learned.positions] * head.scale
    weight, bias = head.linear.weight, head.linear.bias
    return linear_cross_entropy(hidden, weight, learned.targets, rules, bias, learned.weights), outputs


def sums_of_flat(model: nn.Module, batch: Batch, head: Head, rules: TokenLoss) -> TokenSums:
    """The same of a flat batch, as ``data.batching`` makes it."""
    inputs = {name: value for name, value in batch.items() if name not in {"labels", "learned", "num_tokens"}}
    learned = Learned.of(batch["labels"], batch["learned"])
    width = batch["labels"].shape[1]
    return sums_without_logits(model, {**inputs, "use_cache": False}, learned, width, head, rules)[0]


def sums_of_logits(logits: Tensor, learned: Learned, width: int, rules: TokenLoss) -> TokenSums:
    """The same from logits (B, T, V) that are there."""
    of_learned = logits[:, -width:].flatten(0, 1)[learned.positions]
    return plain_cross_entropy(of_learned, learned.targets, rules, learned.weights)


def _hidden_states(model: nn.Module, inputs: Batch, head: Head) -> tuple[Tensor, Any]:
    """(B, T, H) what the model hands to its head, and its output.

    By a hook rather than by a call of the backbone: the wrapper of an engine has to see the forward pass, and a
    learned prompt is put in by the peft model around it.
    """
    caught: list[Tensor] = []

    def catch(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        caught.append(given[0])
        return (given[0][:, :0], *given[1:])

    hook = head.linear.register_forward_pre_hook(catch)
    try:
        outputs = model(**inputs)
    finally:
        hook.remove()
    return caught[0], outputs
