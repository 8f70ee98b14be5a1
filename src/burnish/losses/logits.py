"""Target positions of a micro-batch, and the model's logits there.

Position t predicts token t + 1; the shift happens in ``target_positions`` and nowhere else.
"""

# B rows, T tokens in a row, N learned positions, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from burnish.loop.types import IGNORE_INDEX

NOT_FOR_THE_MODEL = frozenset(
    {
        "labels", "loss_weights", "target_positions", "num_tokens",
        "owner", "lengths", "factors", "items", "mean_row", "reference", "margin", "tag", "matches_chosen",
        "matches_rejected", "baseline", "pairs_per_token", "kl",
    }
)  # fmt: skip
"""Keys of a batch that belong to the loss and not to the model's input."""


def target_positions(labels: Tensor) -> Tensor:
    """(N,) the positions whose next token is learned, as indices into the flattened ``labels`` (B, T)."""
    is_learned = torch.zeros_like(labels, dtype=torch.bool)
    is_learned[:, :-1] = labels[:, 1:] != IGNORE_INDEX
    return is_learned.flatten().nonzero().squeeze(-1)


def logits_at(
    model: nn.Module, inputs: dict[str, Any], learned: Tensor, makes_some: bool, asks_router: bool = False
) -> tuple[Tensor, Any]:
    """(N, V) the logits at ``learned`` (N,), and the model's whole output.

    Args:
        makes_some: whether the model makes those of chosen positions alone; done where rows lie flat.
        asks_router: whether the output is to have the loss of a router.
    """
    makes_some = makes_some and len(inputs["input_ids"]) == 1
    more: dict[str, Any] = {"logits_to_keep": learned} if makes_some else {}
    if asks_router:
        more["output_router_logits"] = True
    output = model(**inputs, **more)
    # A learned prompt stands before the tokens of each row, and has logits too.
    logits = output.logits if makes_some else output.logits[:, -inputs["input_ids"].shape[1] :]
    of_learned = logits.flatten(0, 1) if makes_some else logits.flatten(0, 1).index_select(0, learned)
    return of_learned, output
