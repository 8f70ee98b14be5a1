"""Measure how full packs are and the time of packing. Runs in the environment of the library.

    python bench/pack.py burnish|trl|llamafactory [--rows 10000] [--median 200]

Rows have log-normal lengths, at most the largest capacity. Each library packs them as before a training: burnish the
entire dataset, TRL and LLaMA-Factory blocks of a thousand rows, as they map a dataset. LLaMA-Factory packs during
tokenization, so only its assignment of rows is measured. Prints the line of ``gauge.py`` with the filled share of the
packs for each capacity.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from math import exp
from random import Random
from typing import Any

from gauge import print_measurements

CAPACITIES = (512, 1024, 2048)
SEED = 17
BLOCK_ROWS = 1000  # default number of rows that TRL and LLaMA-Factory map at a time

Packs = Callable[[list[dict[str, Any]], int], Callable[[], int]]
"""Takes rows and a capacity and returns the function that is measured, which returns the number of packs."""


def lengths(count: int, median: int, longest: int) -> list[int]:
    """Return ``count`` log-normal lengths, at most ``longest``."""
    random = Random(SEED)
    return [min(longest, max(8, round(median * exp(0.8 * random.gauss())))) for _ in range(count)]


def burnish(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    from burnish.data.batches.batching import pack

    return lambda: len(pack(rows, capacity))


def trl(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_caching()
    disable_progress_bars()
    dataset = Dataset.from_list(rows)
    return lambda: len(pack_dataset(dataset, capacity, "bfd"))


def llamafactory(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    import without_torchaudio  # noqa: F401 - first, because LLaMA-Factory imports torchaudio without need
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    each = [len(row["input_ids"]) for row in rows]
    blocks = [each[start : start + BLOCK_ROWS] for start in range(0, len(each), BLOCK_ROWS)]
    return lambda: sum(len(greedy_knapsack(block, capacity)) for block in blocks)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "trl", "llamafactory"))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--median", type=int, default=200)
    arguments = parser.parse_args(argv)
    packs: Packs = globals()[arguments.library]
    filled: dict[str, float] = {}
    cpu_s = 0.0
    for capacity in CAPACITIES:
        each = lengths(arguments.rows, arguments.median, capacity)
        run_packing = packs([{"input_ids": [7] * length, "labels": [7] * length} for length in each], capacity)
        begin = time.process_time()
        count = run_packing()
        cpu_s += time.process_time() - begin
        filled[f"filled_{capacity}"] = sum(each) / (count * capacity)
    print_measurements(pack_cpu_s=cpu_s, **filled)


if __name__ == "__main__":
    main(sys.argv[1:])
