"""``data_collator`` of the preference trainers: TRL's padded batch, and its conversion to rows of objectives.

TRL's batch: ``input_ids``, ``attention_mask``, ``completion_mask``, with the chosen responses before the rejected ones;
for KTO ``label``, and the same with the prefix ``KL_``; for reward models ``margin``. ``Padded`` creates it for scripts
that use a trainer's collator, and for overridden methods. ``rows_of_padded`` removes the padding, so that no step
depends on it. A batch with images keeps it: its tensors of images belong to the sequences in their order
(``collate_by_script``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from burnish.loop.types import IGNORE_INDEX, Batch, Row

_SIDES = ("chosen", "rejected")
REFERENCE = {"chosen": "ref_chosen_logps", "rejected": "ref_rejected_logps", "": "ref_logps", "kl": "ref_KL_logps"}
"""Side -> key of its reference log-probabilities in TRL's padded batches."""


def column_of(side: str) -> str:
    """Return the column of a row that contains the reference log-probabilities of a side."""
    return f"reference_{side}_logps" if side else "reference_logps"


def reference_logps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """(P,) the reference's log-probabilities of rows by their keys in TRL's batches. Empty if they are not computed."""
    known = {REFERENCE[side]: column_of(side) for side in REFERENCE if column_of(side) in rows[0]}
    return {key: torch.tensor([row[name] for row in rows]) for key, name in known.items()}


@dataclass
class Padded:
    """Creates TRL's batch. ``row_of`` converts a dataset row to one of an objective; ``kind``: pairs, unpaired or
    scores; ``pad_to_multiple_of``: round the width up to a multiple."""

    row_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    kind: str
    pad_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """TRL's batch of these rows."""
        encoded, numbers = [self.row_of(row) for row in rows], reference_logps(rows)
        if self.kind == "unpaired":
            batch = self._pad(encoded, [""])
            if all(row.get("kl_input_ids") for row in encoded):
                batch |= self._pad(encoded, ["kl_"], "KL_")
            return {**batch, "label": torch.tensor([bool(row["tag"]) for row in encoded]), **numbers}
        batch = self._pad(encoded, ["chosen_", "rejected_"])
        if self.kind == "pairs":
            return batch | numbers
        del batch["completion_mask"]
        return {**batch, "margin": torch.tensor([row["margin"] for row in encoded])}

    def _pad(self, rows: list[Mapping[str, Any]], sides: list[str], prefix: str = "") -> dict[str, Tensor]:
        """(sides x rows, longest) each."""
        ids = [torch.as_tensor(row[f"{side}input_ids"]) for side in sides for row in rows]
        labels = [torch.as_tensor(row[f"{side}labels"]) for side in sides for row in rows]
        values = {
            "input_ids": (ids, self.pad_id),
            "attention_mask": ([torch.ones_like(one) for one in ids], 0),
            "completion_mask": ([(one != IGNORE_INDEX).long() for one in labels], 0),
        }
        more = -max(map(len, ids)) % (self.pad_to_multiple_of or 1)
        return {
            f"{prefix}{name}": F.pad(pad_sequence(of, True, filler), (0, more), value=filler)
            for name, (of, filler) in values.items()
        }


@dataclass
class PaddedBySide(Padded):
    """The batch of TRL's ORPO and CPO: ``chosen_input_ids``, ``chosen_attention_mask``, ``chosen_labels``, the same for
    ``rejected_``, and ``prompt_`` without labels, left-padded."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for side in _SIDES:
            padded = self._pad([self.row_of(row) for row in rows], [f"{side}_"])
            labels = padded["input_ids"].masked_fill(padded.pop("completion_mask") == 0, IGNORE_INDEX)
            batch |= {f"{side}_{name}": value for name, value in padded.items()} | {f"{side}_labels": labels}
        begins = [int((labels == IGNORE_INDEX).int().argmin()) for labels in batch["chosen_labels"]]
        prompts = [ids[:begin] for ids, begin in zip(batch["chosen_input_ids"], begins, strict=True)]
        masks = [torch.ones_like(ids) for ids in prompts]
        batch["prompt_input_ids"] = pad_sequence(prompts, True, self.pad_id, padding_side="left")
        batch["prompt_attention_mask"] = pad_sequence(masks, True, 0, padding_side="left")
        return batch


def rows_of_padded(batch: Mapping[str, Any], kind: str, may_have_images: bool = False) -> list[Row]:
    """The rows of objectives in a padded batch, without its padding.

    Args:
        batch: TRL's padded batch. Other values, such as weights of pairs, are left to the script that added them.
        kind: pairs, unpaired or scores.
        may_have_images: whether other tensors are those of images.

    Raises:
        ValueError: if a key is missing.
    """
    if "chosen_input_ids" in batch:
        rows = _pairs(batch, *(_sequences(batch, f"{side}_", batch[f"{side}_labels"]) for side in _SIDES))
    else:
        required = ["input_ids", *([] if kind == "scores" else ["completion_mask"])]
        if missing := [name for name in required if name not in batch]:
            raise ValueError(
                f"`data_collator` must return {', '.join(required)}. Missing: {', '.join(missing)}. "
                f"Received: {', '.join(batch)}."
            )
        sequences = _sequences(batch)
        half = len(sequences) // 2  # in pairs, the chosen responses come first
        rows = _unpaired(batch, sequences) if kind == "unpaired" else _pairs(batch, sequences[:half], sequences[half:])
    if may_have_images and _has_images(batch):
        for at, row in enumerate(rows):
            numbers = (at, len(rows) + at) if "chosen_input_ids" in row else (at,)
            row["images"] = InPaddedBatch(batch, numbers)
            if "kl_input_ids" in row:
                row["kl_images"] = InPaddedBatch(batch, numbers, "KL_")
    return rows


def _sequences(batch: Mapping[str, Any], prefix: str = "", labels: Tensor | None = None) -> list[Row]:
    """Return ids and labels of each sequence without padding. If ``labels`` is None, the tokens of the completion
    mask are trained, or all tokens if there is no mask."""
    ids: Tensor = batch[f"{prefix}input_ids"]
    if labels is None:
        learned = batch.get(f"{prefix}completion_mask")
        labels = ids if learned is None else ids.masked_fill(learned == 0, IGNORE_INDEX)
    real = batch.get(f"{prefix}attention_mask", torch.ones_like(ids)).bool()
    return [
        {"input_ids": line[there].tolist(), "labels": trained[there].tolist()}
        for line, trained, there in zip(ids, labels, real, strict=True)
    ]


def _pairs(batch: Mapping[str, Any], chosen: Sequence[Row], rejected: Sequence[Row]) -> list[Row]:
    margins = batch.get("margin")
    return [
        {"chosen_input_ids": one["input_ids"], "chosen_labels": one["labels"],
         "rejected_input_ids": other["input_ids"], "rejected_labels": other["labels"],
         "margin": 0.0 if margins is None else float(margins[at]), **_numbers(batch, at, _SIDES)}
        for at, (one, other) in enumerate(zip(chosen, rejected, strict=True))
    ]  # fmt: skip


def _unpaired(batch: Mapping[str, Any], sequences: Sequence[Row]) -> list[Row]:
    others = _sequences(batch, "KL_") if "KL_input_ids" in batch else [Row(input_ids=[], labels=[])] * len(sequences)
    return [
        {**one, "tag": bool(batch["label"][at]), "kl_input_ids": kl["input_ids"], "kl_labels": kl["labels"],
         **_numbers(batch, at, ("", "kl"))}
        for at, (one, kl) in enumerate(zip(sequences, others, strict=True))
    ]  # fmt: skip


def _numbers(batch: Mapping[str, Any], at: int, sides: Sequence[str]) -> dict[str, float]:
    return {column_of(side): float(batch[REFERENCE[side]][at]) for side in sides if REFERENCE[side] in batch}


@dataclass(frozen=True)
class InPaddedBatch:
    """Reference to a row of a padded batch with images.

    Args:
        batch: the padded batch.
        numbers: indices of its sequences: of a pair, those of the chosen and the rejected response.
        prefix: ``KL_`` for a mismatched response.
    """

    batch: Mapping[str, Any]
    numbers: tuple[int, ...]
    prefix: str = ""


_NOT_INPUTS = frozenset({"completion_mask", "label", "labels", "margin", *REFERENCE.values()})
"""Keys of padded batches that are not model inputs, besides those with the prefix ``KL_``."""


def _has_images(batch: Mapping[str, Any]) -> bool:
    """Whether the batch has tensors besides those of tokens. A batch without ``input_ids`` has no images."""
    text = _NOT_INPUTS | {"input_ids", "attention_mask"}
    return "input_ids" in batch and any(
        isinstance(batch[key], Tensor) and key not in text and key[:3] != "KL_" for key in batch
    )


def collate_by_script(
    text: Callable[[Sequence[Row]], Batch], placeholders: frozenset[int], rows: Sequence[Row]
) -> Batch:
    """Collate sequences of a padded batch that a script's collator has created from records with images.

    Args:
        text: collates them if the batch has no tensors of images.
        placeholders: ids of the tokens that stand for images.

    Raises:
        ValueError: if there are placeholders without tensors of images.
    """
    if "images" in rows[0]:
        return _collate_padded_images(rows)
    if any(not placeholders.isdisjoint(row["input_ids"]) for row in rows):
        raise ValueError(
            "`data_collator` must return tensors of the images (`pixel_values`, ...) with the image placeholders in "
            "`input_ids`. Received: placeholders without tensors of images."
        )
    return text(rows)


def _collate_padded_images(rows: Sequence[Row]) -> Batch:
    """Return the padded batch with images of a script's collator as model inputs, with the token columns of ``rows``.

    Args:
        rows: sequences of one batch, each with an ``InPaddedBatch`` as ``images``. Responses of pairs alternate.
    """
    places: list[InPaddedBatch] = [row["images"] for row in rows]
    batch, prefix = places[0].batch, places[0].prefix
    numbers = [place.numbers[at % len(place.numbers)] for at, place in enumerate(places)]
    inputs: Batch = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name[:3] != "KL_"}
    inputs |= {name.removeprefix(prefix): batch[name] for name in batch if prefix and name.startswith(prefix)}
    inputs = {name: value for name, value in inputs.items() if name not in _NOT_INPUTS}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    for name in rows[0].keys() - {"input_ids", "images"}:
        inputs[name] = torch.full_like(ids, IGNORE_INDEX if name == "labels" else 0)
        for row, number in zip(rows, numbers, strict=True):
            real = slice(None) if mask is None else mask[number].bool()
            inputs[name][number, real] = torch.as_tensor(row[name], device=ids.device)
    return inputs
