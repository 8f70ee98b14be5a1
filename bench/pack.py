"""The filling of packs, and what packing takes. Runs in the environment of the library it is given.

    python bench/pack.py burnish|trl|llamafactory [--rows 10000] [--median 200]

In: rows whose lengths are log-normal, drawn from a seed, as long as the longest capacity at most; each library packs
them as it does before a training: burnish the whole set, TRL and LLaMA-Factory each thousand rows by themselves, which
is how they map a set. LLaMA-Factory packs while it encodes, so of it the choice of rows alone is measured. Out: the
line of ``gauge.py``; per capacity, the share of the packs that is filled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from math import exp
from random import Random
from typing import Any

from gauge import say

CAPACITIES = (512, 1024, 2048)
SEED = 17
TOGETHER = 1000  # rows that TRL and LLaMA-Factory map at a time, if nothing else is asked

Packs = Callable[[list[dict[str, Any]], int], Callable[[], int]]
"""Rows and a capacity -> the work that is measured: it gives the number of packs."""


def lengths(count: int, median: int, longest: int) -> list[int]:
    random = Random(SEED)
    return [min(longest, max(8, round(median * exp(0.8 * random.gauss())))) for _ in range(count)]


def burnish(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    from burnish.data.batches.batching import pack

    return lambda: len(pack(rows, capacity))  # type: ignore[arg-type]


def trl(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_caching()
    disable_progress_bars()
    dataset = Dataset.from_list(rows)
    return lambda: len(pack_dataset(dataset, capacity, "bfd"))


def llamafactory(rows: list[dict[str, Any]], capacity: int) -> Callable[[], int]:
    import without_media  # noqa: F401 - first, because LLaMA-Factory imports torchaudio where it needs none
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    each = [len(row["input_ids"]) for row in rows]
    some = [each[start : start + TOGETHER] for start in range(0, len(each), TOGETHER)]
    return lambda: sum(len(greedy_knapsack(batch, capacity)) for batch in some)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=("burnish", "trl", "llamafactory"))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--median", type=int, default=200)
    arguments = parser.parse_args(words)
    packs: Packs = globals()[arguments.library]
    found: dict[str, float] = {}
    taken = 0.0
    for capacity in CAPACITIES:
        each = lengths(arguments.rows, arguments.median, capacity)
        work = packs([{"input_ids": [7] * length, "labels": [7] * length} for length in each], capacity)
        begin = time.process_time()
        count = work()
        taken += time.process_time() - begin
        found[f"filled_{capacity}"] = sum(each) / (count * capacity)
    say(pack_cpu_s=taken, **found)


if __name__ == "__main__":
    main(sys.argv[1:])
