"""Rows, tokens and ranks of preference pairs, over all micro-batches and processes of a step."""

# P pairs in a micro-batch, S = 2P sequences

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Metric, Row, Sum
from burnish.losses.preference_losses import Pairs, Side, at_same_rank
from burnish.losses.sequence_logps import SequenceValues, with_images

PAIR_COLUMNS = {
    "chosen_input_ids": (0, 0), "chosen_labels": (IGNORE_INDEX, 0),
    "rejected_input_ids": (0, 0), "rejected_labels": (IGNORE_INDEX, 0),
}  # fmt: skip
"""Columns of a pair, and their values in the row of a padding batch."""


class RunningMean:
    """The mean of all added values, each with equal weight (BCO's baseline δ)."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(()), torch.zeros(())

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add ``count`` () values with the sum ``total`` ().

        A sum that is NaN or infinite, as in a step that is skipped (``on_non_finite``), adds nothing.
        """
        total, count = total.detach().float().cpu(), count.detach().float().cpu()
        if not total.isfinite():
            return
        self.count = self.count + count
        self.value = self.value + (total - self.value * count) / self.count.clamp(min=1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.count = state["value"].cpu(), state["count"].cpu()


def two_answers(row: Row) -> list[Row]:
    """The two sequences of a pair, chosen first, each with the images of the prompt."""
    return [
        {"input_ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"], **with_images(row)}
        for side in ("chosen", "rejected")
    ]


def detach_pairs(pairs: Pairs) -> Pairs:
    chosen, rejected = (Side(*(values.detach() for values in side)) for side in (pairs.chosen, pairs.rejected))
    return pairs._replace(chosen=chosen, rejected=rejected)


def token_share(batches: Iterable[Batch], parallel: Parallel) -> Tensor:
    """() number of pairs divided by the number of trained tokens of their chosen responses, over all ranks."""
    counts = [torch.stack([batch["items"].sum(), (batch["lengths"][0::2] * batch["items"]).sum()]) for batch in batches]
    pairs, tokens = parallel.sum(torch.stack(counts).sum(0)).unbind()
    share: Tensor = pairs / tokens.clamp(min=1)
    return share


def with_matches(pairs: Sequence[Pairs], batches: Sequence[Batch], parallel: Parallel, name: str) -> list[Batch]:
    """Add (P,) ``matches_chosen`` and ``matches_rejected``: the values of the same rank among all pairs of the step."""
    items = torch.cat([batch["items"] for batch in batches])
    if name == "aot":
        values = torch.cat([pair.chosen.logps - pair.rejected.logps for pair in pairs])
        others = torch.cat([pair.chosen.reference - pair.rejected.reference for pair in pairs])
    else:
        values, others = (
            torch.cat([side.ratio for side in sides]) for sides in zip(*(p[:2] for p in pairs), strict=True)
        )
    gathered = parallel.gather(torch.stack([values, others, items]))  # (3 for each rank, most pairs of a rank)
    every = gathered.view(-1, 3, gathered.shape[1]).transpose(0, 1).flatten(1)
    counts = every[2] > 0
    one, other = (torch.zeros_like(every[0]) for _ in range(2))
    one[counts] = at_same_rank(every[0][counts], every[1][counts])
    other[counts] = one[counts] if name == "aot" else at_same_rank(every[1][counts], every[0][counts])
    own = slice(parallel.rank * (len(one) // parallel.world_size), None)
    sizes = [len(batch["items"]) for batch in batches]
    ours = [torch.split(matches[own][: sum(sizes)], sizes) for matches in (one, other)]
    return [{**batch, "matches_chosen": a, "matches_rejected": b} for batch, a, b in zip(batches, *ours, strict=True)]


def token_metrics(values: SequenceValues, batch: Batch) -> dict[str, Metric]:
    """Means over the trained tokens of pairs, each with its own count."""
    counted = batch["items"].repeat_interleave(2)  # (S,)
    sides = {"chosen": slice(0, None, 2), "rejected": slice(1, None, 2)}
    found: dict[str, Metric] = {}
    if "mean_row" in batch:
        for name, side in sides.items():
            count = (batch["lengths"] * counted)[side].sum()
            found[f"logits/{name}"] = Sum((values.mean_logits * counted)[side].sum(), count)
    lengths, chosen = batch["lengths"] * counted, sides["chosen"]
    found["entropy"] = Sum((values.entropy * counted).sum(), lengths.sum())
    found["mean_token_accuracy"] = Sum((values.correct * counted)[chosen].sum(), lengths[chosen].sum())
    return found
