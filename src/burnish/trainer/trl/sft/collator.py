"""Collate rows like TRL's ``DataCollatorForLanguageModeling``: padded or padding-free.

In: rows with ``input_ids``, ``labels`` if some tokens have no loss, and ``seq_lengths`` if a row is a pack. Out: a
batch on the CPU. Based on ``data/batches/batching.py``, with the names and extra keys of the original.
"""

# T tokens, S sequences in a padding-free row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.data.batches.batching import collate_padded, collate_padding_free, lengths_of
from burnish.loop.types import IGNORE_INDEX, Batch, Row


@dataclass
class DataCollatorForLanguageModeling:
    """Converts rows of token ids to tensors.

    Args:
        pad_token_id: id of the padding token.
        padding_free: concatenate all sequences to one row; positions restart at each.
        return_position_ids: whether padded batches also have ``position_ids``.
        pad_to_multiple_of: round the width up to a multiple.
        return_tensors: only "pt" is supported.
        takes_packs_apart: pad each sequence of a pack separately, for models that cannot separate sequences.
    """

    pad_token_id: int
    padding_free: bool = False
    return_position_ids: bool = False
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    takes_packs_apart: bool = False

    def __call__(self, examples: Sequence[Any]) -> Batch:
        rows = [_row(example) for example in examples]
        if self.padding_free:
            return self._padding_free_inputs(rows)
        if not self.takes_packs_apart:
            lengths = [lengths_of(row) for row in rows]
            rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
        batch = collate_padded(rows, self.pad_token_id, self.pad_to_multiple_of)
        if self.return_position_ids:
            width = batch["input_ids"].shape[1]
            places = self.get_position_ids_from_packed_seq_lengths(lengths)
            batch["position_ids"] = torch.stack([F.pad(row, (0, width - len(row))) for row in places])
        return batch

    torch_call = __call__

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: list[list[int]]) -> list[Tensor]:
        """(T,) for each pack; positions start from 0 in each sequence."""
        return [torch.cat([torch.arange(length) for length in lengths]) for lengths in batch_seq_lengths]

    def _padding_free_inputs(self, rows: list[Row]) -> Batch:
        """Create one row (1, T), with ``seq_idx`` (1, T) int32, the index of each token's sequence.

        When padding to a multiple, each padding token at the end is a sequence of its own, which only attends to
        itself.
        """
        batch = collate_padding_free(rows)
        padding = -batch["input_ids"].shape[1] % (self.pad_to_multiple_of or 1)
        if padding:
            for name, filler in (("input_ids", self.pad_token_id), ("labels", IGNORE_INDEX), ("position_ids", 0)):
                batch[name] = F.pad(batch[name], (0, padding), value=filler)
            begins: Tensor = batch["cu_seq_lens_q"]
            more = begins[-1] + torch.arange(1, padding + 1, dtype=torch.int32)
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.cat([begins, more])
        lengths = batch["cu_seq_lens_q"].diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        return {**batch, "seq_idx": torch.repeat_interleave(numbers, lengths).unsqueeze(0)}


def _row(example: Any) -> Row:
    """Convert to plain lists. Without labels all tokens are trained."""
    ids = _plain(example["input_ids"])
    row: Row = {"input_ids": ids, "labels": _plain(example["labels"]) if "labels" in example else list(ids)}
    if example.get("seq_lengths") is not None:
        row["seq_lengths"] = _plain(example["seq_lengths"])
    return row


def _plain(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
