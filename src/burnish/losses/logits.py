"""Target positions of a micro-batch, and the model's logits there.

Position t predicts token t + 1; the shift happens in ``target_positions`` and nowhere else.
"""

# B rows, T tokens in a row, N learned positions, V vocabulary

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from burnish.loop.types import IGNORE_INDEX, Batch

_OF_EVERY_LOSS = frozenset(
    {
        "labels", "loss_weights", "content_hashes", "target_positions", "num_tokens", "owner", "lengths", "items",
    }
)  # fmt: skip
"""Keys of a batch that no model takes, whatever the objective; an objective's own are its ``batch_keys``."""


def model_inputs(batch: Batch, batch_keys: Collection[str] = ()) -> dict[str, Any]:
    """The inputs of the model in a micro-batch, without a cache: in one, the sequences of a padding-free row would
    attend to each other. Args: batch_keys: those of the objective."""
    found = {name: value for name, value in batch.items() if name not in _OF_EVERY_LOSS and name not in batch_keys}
    return {**found, "use_cache": False}


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
