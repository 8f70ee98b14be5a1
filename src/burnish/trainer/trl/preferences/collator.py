"""``data_collator`` under the trainers of this room: TRL's padded batch, and rows of objectives made of it.

TRL's batch: ``input_ids``, ``attention_mask``, ``completion_mask``, the chosen answers before the rejected ones; of
verdicts ``label``, and the same under ``KL_``; of scores ``margin``. ``Padded`` makes one for who asks a trainer for
its collator; ``Unpadded`` takes the padding off what a script's own collator makes, so that no step depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from burnish.loop.types import IGNORE_INDEX, Row


@dataclass
class Padded:
    """Args: row_of: a row of a set -> that of an objective. kind: pairs, verdicts or scores. pad_id: of the batch."""

    row_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    kind: str
    pad_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """TRL's batch of these rows."""
        made = [self.row_of(row) for row in rows]
        if self.kind == "verdicts":
            others = self._padded(made, ["kl_"], "KL_") if all(row.get("kl_input_ids") for row in made) else {}
            return {**self._padded(made, [""]), **others, "label": torch.tensor([bool(row["tag"]) for row in made])}
        batch = self._padded(made, ["chosen_", "rejected_"])
        if self.kind == "pairs":
            return batch
        del batch["completion_mask"]
        return {**batch, "margin": torch.tensor([row["margin"] for row in made])}

    def _padded(self, rows: list[Mapping[str, Any]], sides: list[str], prefix: str = "") -> dict[str, Tensor]:
        """(sides x rows, longest) each."""
        ids = [torch.as_tensor(row[f"{side}input_ids"]) for side in sides for row in rows]
        labels = [torch.as_tensor(row[f"{side}labels"]) for side in sides for row in rows]
        values = {
            "input_ids": (ids, self.pad_id),
            "attention_mask": ([torch.ones_like(one) for one in ids], 0),
            "completion_mask": ([(one != IGNORE_INDEX).long() for one in labels], 0),
        }
        return {f"{prefix}{name}": pad_sequence(of, True, filler) for name, (of, filler) in values.items()}


@dataclass
class Unpadded:
    """Args: collator: the script's. kind: pairs, verdicts or scores."""

    collator: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]
    kind: str

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """The rows that objectives take, as many as the collator has made of these."""
        batch = self.collator(list(rows))
        wanted = ["input_ids", *([] if self.kind == "scores" else ["completion_mask"])]
        if missing := [name for name in wanted if name not in batch]:
            raise ValueError(
                f"`data_collator` must give {', '.join(wanted)}. Missing: {', '.join(missing)}. "
                f"Received: {', '.join(batch)}."
            )
        own = _sequences(batch, "")
        if self.kind == "verdicts":
            return _verdicts(own, batch)
        half, margins = len(own) // 2, batch.get("margin")
        return [
            {"chosen_input_ids": chosen[0], "chosen_labels": chosen[1], "rejected_input_ids": rejected[0],
             "rejected_labels": rejected[1], "margin": 0.0 if margins is None else float(margins[at])}
            for at, (chosen, rejected) in enumerate(zip(own[:half], own[half:], strict=True))
        ]  # fmt: skip


def _verdicts(own: list[tuple[list[int], list[int]]], batch: Mapping[str, Any]) -> list[Row]:
    others = _sequences(batch, "KL_") if "KL_input_ids" in batch else [([], [])] * len(own)
    return [
        {"input_ids": ids, "labels": labels, "tag": bool(batch["label"][at]), "kl_input_ids": kl_ids,
         "kl_labels": kl_labels}
        for at, ((ids, labels), (kl_ids, kl_labels)) in enumerate(zip(own, others, strict=True))
    ]  # fmt: skip


def _sequences(batch: Mapping[str, Any], prefix: str) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each sequence, without padding; without a mask of answers everything is learned."""
    ids: Tensor = batch[f"{prefix}input_ids"]
    real = batch.get(f"{prefix}attention_mask")
    learned = batch.get(f"{prefix}completion_mask")
    found = []
    for at, line in enumerate(ids):
        there = slice(None) if real is None else real[at].bool()
        labels = line if learned is None else line.masked_fill(learned[at] == 0, IGNORE_INDEX)
        found.append((line[there].tolist(), labels[there].tolist()))
    return found
