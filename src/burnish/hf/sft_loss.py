"""The loss of supervised fine-tuning and its metrics, from one look at the logits of the learned positions.

In: a model, a batch with labels. Out: sums over the learned tokens: loss, tokens predicted right, entropy.

The model is called as it is, wrapped or adapted, but its head is handed no positions: the hidden states are taken on
their way to it, and the learned ones go through ``ops.cross_entropy`` in chunks. Where the head is not what
``ops.probe`` understands, or somebody wants the logits, they are made whole.

``dft`` is each token's loss times its probability, without a gradient through the latter (Wu et al. 2025, eq. 9,
https://arxiv.org/abs/2508.05629): a rare target pulls no harder than its probability.
"""

# B rows, T tokens in a row, N learned positions, H hidden size, V vocabulary

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burnish.core.types import IGNORE_INDEX, Batch
from burnish.objectives.lm import learned_positions
from burnish.ops.cross_entropy import TokenLoss, TokenSums, chunk_length, linear_cross_entropy, plain_cross_entropy
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
    model: nn.Module, inputs: Batch, learned: Learned, width: int, head: Head, rules: TokenLoss, loss_type: str
) -> tuple[TokenSums, Any]:
    """The sums, and the model's output, whose logits are empty.

    Args:
        width: of the labels, which belong to the last so many positions: a learned prompt may stand before them.
    """
    hidden, outputs = _hidden_states(model, inputs, head)
    hidden = hidden[:, -width:].flatten(0, 1)[learned.positions] * head.scale
    weight, bias = head.linear.weight, head.linear.bias
    if loss_type == "dft":
        return _dft(hidden, weight, bias, learned, rules), outputs
    return linear_cross_entropy(hidden, weight, learned.targets, rules, bias, learned.weights), outputs


def sums_of_logits(logits: Tensor, learned: Learned, width: int, rules: TokenLoss, loss_type: str) -> TokenSums:
    """The same from logits (B, T, V) that are there."""
    of_learned = logits[:, -width:].flatten(0, 1)[learned.positions]
    if loss_type == "dft":
        return _dft_sums(of_learned, learned.targets, learned.weights)
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


def _dft(hidden: Tensor, weight: Tensor, bias: Tensor | None, learned: Learned, rules: TokenLoss) -> TokenSums:
    """In chunks whose logits are made again in the backward pass."""
    size = chunk_length(weight)
    whole = (hidden, learned.targets, learned.weights)
    parts = zip(*(torch.split(tensor, size) for tensor in whole), strict=True)
    sums = [
        TokenSums(*checkpoint(_dft_of_hidden, h, weight, bias, targets, weights, rules.softcap, use_reentrant=False))
        for h, targets, weights in parts
    ]
    return TokenSums(*(torch.stack(values).sum() for values in zip(*sums, strict=True)))


def _dft_of_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor, softcap: float | None
) -> TokenSums:
    logits = F.linear(hidden, weight, bias)
    return _dft_sums(softcap * torch.tanh(logits / softcap) if softcap else logits, targets, weights)


def _dft_sums(logits: Tensor, targets: Tensor, weights: Tensor) -> TokenSums:
    """Args: logits: (n, V), capped already; targets, weights: (n,)."""
    logps = torch.log_softmax(logits.float(), -1)
    of_target = logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    measured = logps.detach()
    return TokenSums(
        -(of_target.detach().exp() * of_target) @ weights,
        (measured.argmax(-1) == targets).float() @ weights,
        -(measured.exp() * measured).sum(-1) @ weights,
    )
