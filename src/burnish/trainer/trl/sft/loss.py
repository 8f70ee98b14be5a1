"""Compute the sums of ``losses.targets`` while calling the model itself, wrapped or adapted. The inputs of the head are
captured, and the head gets an empty input, so no logits are computed.
"""

# B rows, T tokens in a row, N target positions, H hidden size, V vocabulary

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from burnish.kernels.cross_entropy import TokenLoss, TokenSums
from burnish.kernels.probe import Head
from burnish.loop.types import IGNORE_INDEX, Batch
from burnish.losses.targets import Targets, sums_of_hidden
from burnish.utils.patching import Reason, temporary_hook

_LOSS_WITHOUT_LOGITS = Reason("head", "the loss is computed from hidden states, without logits")


def sums_without_logits(
    model: nn.Module, inputs: Batch, targets: Targets, width: int, head: Head, rules: TokenLoss
) -> tuple[TokenSums, Any]:
    """The sums, and the model's output with empty logits.

    The hidden states are captured by a hook of the head rather than by calling the backbone, because a backend's
    wrapper must run the forward pass, and a peft wrapper inserts virtual tokens.

    Args:
        targets: the target positions.
        width: width of the labels, which belong to the last positions; virtual tokens may precede them.
        head: the model's head.
        rules: what is computed for each token.
    """
    caught: list[Tensor] = []  # (B, T, H) input of the head

    def catch(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        caught.append(args[0])
        return (args[0][:, :0], *args[1:])

    with head.only(targets.positions), temporary_hook(head.linear, "forward_pre", catch, _LOSS_WITHOUT_LOGITS):
        outputs = model(**inputs)
    hidden = caught[0][:, -width:].flatten(0, 1)[targets.positions]
    return sums_of_hidden(hidden, head.of_linear_inputs(), targets, rules), outputs


def flat_inputs(batch: Batch) -> tuple[Batch, Targets, int]:
    """Inputs, targets and width for ``sums_without_logits``, from a padding-free batch (``data.batches.batching``)."""
    inputs = {name: value for name, value in batch.items() if name not in {"labels", "target_positions", "num_tokens"}}
    targets = Targets.of(batch["labels"], batch["target_positions"])
    return {**inputs, "use_cache": False}, targets, batch["labels"].shape[1]


def sum_of_padding_free(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """() the sum of the plain loss of a padding-free batch over its trained tokens."""
    sums, _ = sums_without_logits(model, *flat_inputs(batch), head, TokenLoss(softcap=head.softcap))
    return sums.total


def mean_of_padding_free(model: nn.Module, batch: Batch, head: Head, num_items: Any = None) -> Tensor:
    """() the plain loss of a padding-free batch divided by ``num_items`` (); default: its number of trained tokens."""
    items = batch["labels"][:, 1:].ne(IGNORE_INDEX).sum() if num_items is None else num_items
    mean: Tensor = sum_of_padding_free(model, batch, head) / items
    return mean
