"""Measure the time that a resumed run takes to find its position in the data. Runs in the environment of the library.

    python bench/resume.py burnish|transformers [--rows 1000000]

The dataset has many rows, generated on access, eight per step in random order. Each library starts the epoch as its
loop does after a checkpoint: transformers skips batches (accelerate's ``skip_first_batches``), burnish starts at the
position. Prints the line of ``gauge.py`` with the processor milliseconds to the first batch after each number of steps
in ``STEPS``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from gauge import print_measurements

STEPS = (0, 1_000, 100_000)
ROWS_PER_STEP = 8


class Rows(Sequence[Any]):
    """A dataset of rows with 32 tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return {"input_ids": [index % 1000] * 32, "labels": [index % 1000] * 32}


def burnish(rows: Rows, step: int) -> Any:
    """Return the first batch after ``step`` steps."""
    from burnish.data.batches.batching import collate_padding_free
    from burnish.data.batches.loader import RowLoader, StepPartition

    stream = RowLoader(rows, collate_padding_free, StepPartition(ROWS_PER_STEP, accumulation=1), seed=17)
    stream.load_state_dict({"epoch": 0, "position": step * ROWS_PER_STEP})
    return next(iter(stream.step_batches()))


def transformers(rows: Rows, step: int) -> Any:
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    dataset: Any = rows
    loader: Any = DataLoader(dataset, ROWS_PER_STEP, shuffle=True, collate_fn=default_data_collator)
    return next(iter(skip_first_batches(loader, step) if step else loader))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "transformers"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args(argv)
    begin_epoch, rows = globals()[arguments.library], Rows(arguments.rows)
    begin_epoch(rows, 0)  # imports and other work that is done once
    results = {}
    for step in STEPS:
        begin = time.process_time()
        begin_epoch(rows, step)
        results[f"after_{step}_ms"] = 1000 * (time.process_time() - begin)
    print_measurements(**results)


if __name__ == "__main__":
    main(sys.argv[1:])
