"""Measures burnish beside its peers and writes docs/benchmarks.md.

    make bench                                          everything
    make bench WHAT="train start"                       parts by name: train, lora, large, checkpoint, evaluation,
                                                        encoding, start
    make bench WHAT="train --family llama --longest 256 --only packing --only burnish"

In: nothing but this repository; what the peers need is installed under .bench, once. Out: a section of
docs/benchmarks.md per part; sections of parts that were not asked for stay as they are. With another model, other rows
or a choice of settings the section is printed, and the document is left alone.

Every measurement is a process of its own on one thread, as many at a time as there are cores. They are interleaved:
each round runs all settings in another order, so that a neighbour on the machine or a warm processor favours none. What
is compared is a ratio of two figures of one round; its spread is that over the rounds. A setting that fails is named,
with its last words, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import rmtree

from environments import interpreter
from gauge import MARK
from material import SEED, Material, add_flags, asked_for, facts_of, make
from report import (
    Figures,
    Round,
    encoding_section,
    evaluation_section,
    rate_of_products,
    save_section,
    start_section,
    train_section,
    write,
)
from settings import BASE, CHECKPOINT, ENCODING, EVALUATION, START, Setting, trainings

HERE = Path(__file__).parent
ROOT = HERE.parent
SCRATCH = ROOT / ".bench"
PARTS = ("train", "lora", "large", "checkpoint", "evaluation", "encoding", "start")
TIMEOUT_S = 1800
# Rows of the part "large": short ones, because a peer's logits of a long one need gigabytes.
LARGE = {"longest": 256, "rows": 24}


def measure(setting: Setting, material: Path, absent: str | None = None) -> Figures:
    """Run one setting in a process of its own: what its ``GAUGE`` line says, or ``failed`` and why."""
    if absent:
        return said({"failed": absent}, setting)
    output = SCRATCH / "out" / f"{time.time_ns()}"
    places = {"MATERIAL": str(material), "OUTPUT": str(output)}
    words = [places.get(word, word.replace("EVALUATION", str(material / "conversations.json")))
             for word in setting.words]  # fmt: skip
    told = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "BENCH_STARTED_S": str(time.time()), "PYTHONPATH": str(ROOT / "src") if setting.library == "burnish" else "",
        "BURNISH_CACHE": str(output / "cache"),
    }  # fmt: skip
    print(f"  {setting.name}", file=sys.stderr, flush=True)
    try:
        command = [interpreter(setting.library), HERE / words[0], *words[1:]]
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        return said({"failed": str(error)}, setting)
    finally:
        rmtree(output, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return said({"failed": done.stderr.strip()[-2000:] or f"exit status {done.returncode}"}, setting)
    found: Figures = json.loads(lines[0].removeprefix(MARK))
    return found


def said(figures: Figures, setting: Setting) -> Figures:
    print(f"{setting.name} did not come to its end:\n{figures['failed']}", file=sys.stderr, flush=True)
    return figures


def why_absent(library: str) -> str | None:
    """Install ``library``; what went wrong, if something did."""
    try:
        interpreter(library)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"{library} cannot be installed: {error}"
    return None


def rounds(settings: Sequence[Setting], material: Path, count: int, at_once: int) -> list[Round]:
    """``count`` times all settings, each time in another order; figures by the name of the setting."""
    absent = {library: reason for library in {s.library for s in settings} if (reason := why_absent(library))}
    found = []
    for number in range(count):
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
        order = list(settings)
        Random(SEED + number).shuffle(order)
        with ThreadPoolExecutor(at_once) as pool:
            done = list(pool.map(lambda setting: measure(setting, material, absent.get(setting.library)), order))
        figures = {setting.name: figures for setting, figures in zip(order, done, strict=True)}
        found.append({setting.name: figures[setting.name] for setting in settings})
    return found


def help_seconds(count: int = 9) -> float:
    """Median wall time of ``burnish --help``."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(
            [interpreter("burnish"), "-m", "burnish", "--help"], check=True, capture_output=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def chosen(settings: Sequence[Setting], only: Sequence[str]) -> list[Setting]:
    """Those whose name holds one of the words; what they are compared with stays."""
    return [setting for setting in settings if not only or setting.name == BASE or any(w in setting.name for w in only)]


def made(asked: Material) -> Path:
    folder = SCRATCH / "material" / asked.name
    make(asked, folder)
    return folder


def run_part(part: str, arguments: argparse.Namespace) -> str:
    """One section of the document."""
    asked = asked_for(arguments)
    if part == "large":
        asked = replace(asked, size="large", **(LARGE if asked == Material() else {}))
    material = made(asked)

    def measured(settings: Sequence[Setting], at_once: int = arguments.at_once) -> list[Round]:
        return rounds(chosen(settings, arguments.only), material, arguments.rounds, at_once)

    if part in {"train", "lora", "large"}:
        method = arguments.method or ("full" if part == "train" else "lora")
        settings = chosen(trainings(method, facts_of(material)), arguments.only)
        return train_section(measured(settings), settings, rate_of_products(), facts_of(material), method, part)
    if part == "start":
        return start_section(measured(START), help_seconds())
    if part == "checkpoint":
        return save_section(measured(CHECKPOINT, at_once=1))
    if part == "evaluation":
        return evaluation_section(measured(EVALUATION))
    return encoding_section(measured(ENCODING))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="settings whose name holds this; may be repeated")
    parser.add_argument("--method", choices=("full", "lora"), help="of the parts that train")
    add_flags(parser)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"Expected parts among {', '.join(PARTS)}. Received: {', '.join(sorted(unknown))}.")
    is_usual = asked_for(arguments) == Material() and not arguments.only and not arguments.method
    for part in parts:
        section = run_part(part, arguments)
        print(section, flush=True)
        if is_usual:
            write(part, section)


if __name__ == "__main__":
    main()
