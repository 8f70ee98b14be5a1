"""Target positions of a micro-batch, and the model's logits at them.

Position t predicts token t + 1. The shift happens only in ``target_positions``.
"""

# B rows, T tokens in a row, N target positions, V vocabulary

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from burnish.loop.types import IGNORE_INDEX, Batch

_LOSS_COLUMNS = frozenset(
    {
        "labels", "loss_weights", "content_hashes", "target_positions", "num_tokens", "owner", "lengths", "items",
    }
)  # fmt: skip
"""Keys of a batch that are never model inputs. An objective adds its own in ``batch_keys``."""


def model_inputs(batch: Batch, batch_keys: Collection[str] = ()) -> dict[str, Any]:
    """The model inputs of a micro-batch, without its ``batch_keys``. The cache is disabled, because with a cache the
    sequences of a padding-free row would attend to each other.
    """
    found = {name: value for name, value in batch.items() if name not in _LOSS_COLUMNS and name not in batch_keys}
    return {**found, "use_cache": False}


def target_positions(labels: Tensor) -> Tensor:
    """(N,) positions whose next token is trained, as indices into the flattened ``labels`` (B, T)."""
    is_trained = torch.zeros_like(labels, dtype=torch.bool)
    is_trained[:, :-1] = labels[:, 1:] != IGNORE_INDEX
    return is_trained.flatten().nonzero().squeeze(-1)


def logits_at(
    model: nn.Module, inputs: dict[str, Any], trained: Tensor, makes_some: bool, needs_router: bool = False
) -> tuple[Tensor, Any]:
    """(N, V) the logits at the positions ``trained`` (N,), and the model's output.

    Args:
        model: a causal language model.
        trained: (N,) positions in the flattened batch.
        makes_some: whether the model can compute the logits of selected positions only; used for batches of one row.
        needs_router: whether the output must contain the router's loss.
    """
    makes_some = makes_some and len(inputs["input_ids"]) == 1
    more: dict[str, Any] = {"logits_to_keep": trained} if makes_some else {}
    if needs_router:
        more["output_router_logits"] = True
    output = model(**inputs, **more)
    # Virtual tokens of prompt tuning precede each row and have logits as well.
    logits = output.logits if makes_some else output.logits[:, -inputs["input_ids"].shape[1] :]
    of_trained = logits.flatten(0, 1) if makes_some else logits.flatten(0, 1).index_select(0, trained)
    return of_trained, output
