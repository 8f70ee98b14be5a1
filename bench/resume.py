"""The time that a resumed run takes to find its place in the data. Runs in the environment of the library it is given.

    python bench/resume.py burnish|transformers [--rows 1000000]

In: a set of many rows, made when they are asked for, dealt eight to a step in a random order. Each library begins the
epoch as its loop does behind a checkpoint: transformers skips the batches that were seen (accelerate's
``skip_first_batches``), burnish goes to the position. Out: the line of ``gauge.py``, with processor milliseconds to the
first batch behind each of ``STEPS``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from gauge import say

STEPS = (0, 1_000, 100_000)
ROWS_PER_STEP = 8


class Rows(Sequence[Any]):
    """Rows of 32 tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return {"input_ids": [index % 1000] * 32, "labels": [index % 1000] * 32}


def burnish(rows: Rows, step: int) -> Any:
    from burnish.data.batches.batching import collate_padding_free
    from burnish.data.batches.loader import RowLoader, StepPartition

    stream = RowLoader(rows, collate_padding_free, StepPartition(ROWS_PER_STEP, accumulation=1), seed=17)
    stream.load_state_dict({"epoch": 0, "position": step * ROWS_PER_STEP})
    return next(iter(stream.step_batches()))


def transformers(rows: Rows, step: int) -> Any:
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    loader = DataLoader(rows, ROWS_PER_STEP, shuffle=True, collate_fn=default_data_collator)
    return next(iter(skip_first_batches(loader, step) if step else loader))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "transformers"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args(words)
    begin_epoch, rows = globals()[arguments.library], Rows(arguments.rows)
    begin_epoch(rows, 0)  # imports, and whatever else is done once
    found = {}
    for step in STEPS:
        begin = time.process_time()
        begin_epoch(rows, step)
        found[f"after_{step}_ms"] = 1000 * (time.process_time() - begin)
    say(**found)


if __name__ == "__main__":
    main(sys.argv[1:])
