"""Check before training that the rows of prepared datasets fit a model with learned positions.

A model with rotary positions accepts rows of any length. One with an embedding per position (GPT-2, OPT) does not, and
torch would only report an index that is out of range, without the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.compute  # type: ignore[import-untyped, unused-ignore]
from torch import nn

from burnish.trainer.data.loaders import is_datasets_set
from burnish.trainer.inspection import num_positions
from burnish.trainer.methods.loss import too_long

_RESPONSES = ("chosen_ids", "rejected_ids", "completion_ids")
_AT_ONCE = 10_000  # rows


def refuse_long_rows(model: nn.Module, datasets: Mapping[str, Any]) -> None:
    """Raise UserError if a row is longer than the model's positions. Streams are checked while they are read.

    Args:
        model: the model, with or without an adapter.
        datasets: prepared datasets by name.
    """
    positions = num_positions(model)
    if positions is None:
        return
    for name, dataset in datasets.items():
        if is_datasets_set(dataset) and (longest := longest_row(dataset)) > positions:
            remedy = f"Set max_length to {positions} or less, so that rows are truncated"
            raise too_long(f"the {name} dataset", longest, positions, remedy)


def longest_row(dataset: Any) -> int:
    """Number of tokens of the longest row of a prepared dataset, or of the longest sequence in its packs."""
    tables = dataset.with_format("arrow").iter(_AT_ONCE)
    return max((_longest(table) for table in tables), default=0)


def _longest(table: Any) -> int:
    names = table.column_names
    if "seq_lengths" in names:
        return _max(pyarrow.compute.list_flatten(table["seq_lengths"]))
    if "input_ids" in names:
        return _max(pyarrow.compute.list_value_length(table["input_ids"]))
    responses = [pyarrow.compute.list_value_length(table[name]) for name in _RESPONSES if name in names]
    prompt = pyarrow.compute.list_value_length(table["prompt_ids"]) if "prompt_ids" in names else 0
    return max((_max(pyarrow.compute.add(prompt, response)) for response in responses), default=0)


def _max(numbers: Any) -> int:
    return pyarrow.compute.max(numbers).as_py() or 0
