"""Measures burnish beside its peers and writes docs/benchmarks.md.

    make bench                                          everything
    make bench WHAT="train start"                       parts by name: train, lora, large, large-lora, other,
                                                        checkpoint, evaluation, encoding, start
    make bench WHAT="train --family llama --longest 256 --only packing --only burnish"

In: nothing but this repository; what the peers need is installed under .bench, once. Out: a section of
docs/benchmarks.md per part; sections of parts that were not asked for stay as they are. With another model, other rows
or a choice of settings the section is printed, and the document is left alone.

Every measurement is a process of its own on one thread, as many at a time as there are cores; ``measuring.py`` says in
which order. What is compared is a ratio of two figures of one round; its spread is that over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from environments import interpreter
from material import Material, add_flags, asked_for, facts_of, make
from measuring import SCRATCH, Bench, environment
from report import (
    Figures,
    Round,
    encoding_section,
    evaluation_section,
    other_section,
    rate_of_products,
    save_section,
    start_section,
    train_section,
    write,
)
from settings import BASE, BEST, CHECKPOINT, ENCODING, EVALUATION, START, WIDE, Setting, trainings

# Parts and how often each is measured, if --rounds does not say.
PARTS = {"train": 2, "lora": 1, "large": 1, "large-lora": 1, "other": 1, "checkpoint": 1, "evaluation": 1,
         "encoding": 1, "start": 1}  # fmt: skip
TRAINS = {"train": "full", "lora": "lora", "large": "full", "large-lora": "lora"}
# Rows of the large shape: short ones, because a peer's logits of a long one need gigabytes.
LARGE = {"longest": 256, "rows": 16}
OTHERS = (
    *(Material(family=family, longest=256, rows=16) for family in ("llama", "gemma", "mistral", "qwen3", "gpt2")),
    Material(longest=32, rows=64), Material(longest=4096, median=1000, rows=4),
)  # fmt: skip


def help_seconds(count: int = 9) -> float:
    """Median wall time of ``burnish --help``."""
    taken, command, told = [], [interpreter("burnish"), "-m", "burnish", "--help"], environment("burnish")
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=told)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def chosen(settings: Sequence[Setting], only: Sequence[str]) -> list[Setting]:
    """Those whose name holds one of the words; what they are compared with stays."""
    return [setting for setting in settings if not only or setting.name == BASE or any(w in setting.name for w in only)]


def made(asked: Material) -> Path:
    folder = SCRATCH / "material" / asked.name
    make(asked, folder)
    return folder


def run_part(part: str, arguments: argparse.Namespace, bench: Bench) -> str:
    """One section of the document."""
    asked = asked_for(arguments)
    if part == "other":
        return other_section([one_shape(shape, arguments.only, bench) for shape in OTHERS])
    if part.startswith("large"):
        asked = replace(asked, size="large", **(LARGE if asked == Material() else {}))
    material = made(asked)

    def measured(settings: Sequence[Setting], at_once: int | None = None) -> list[Round]:
        count = arguments.rounds or PARTS[part]
        return bench.rounds(chosen(settings, arguments.only), material, count, at_once)

    if part in TRAINS:
        method, facts = arguments.method or TRAINS[part], facts_of(material)
        settings = chosen(trainings(method, facts), arguments.only or (() if part == "train" else WIDE))
        return train_section(measured(settings), settings, rate_of_products(), facts, method, part)
    if part == "start":
        return start_section(measured(START), help_seconds())
    if part == "checkpoint":
        return save_section(measured(CHECKPOINT, at_once=1))
    if part == "evaluation":
        return evaluation_section(measured(EVALUATION))
    return encoding_section(measured(ENCODING))


def one_shape(asked: Material, only: Sequence[str], bench: Bench) -> tuple[Round, Figures]:
    material = made(asked)
    best = [setting for setting in trainings("full", facts_of(material)) if setting.name in BEST]
    return bench.rounds(chosen(best, only), material, 1)[0], facts_of(material)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--rounds", type=int, help="how often; one or two if not given")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="settings whose name holds this; may be repeated")
    parser.add_argument("--method", choices=("full", "lora"), help="of the parts that train")
    add_flags(parser)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"Expected parts among {', '.join(PARTS)}. Received: {', '.join(sorted(unknown))}.")
    is_usual = asked_for(arguments) == Material() and not arguments.only and not arguments.method
    with Bench(arguments.at_once) as bench:
        for part in parts:
            begin = time.time()
            section = run_part(part, arguments, bench)
            print(section, flush=True)
            print(f"{part}: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
            if is_usual:
                write(part, section)


if __name__ == "__main__":
    main()
