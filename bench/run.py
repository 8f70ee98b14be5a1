"""Measures burnish beside its peers and writes docs/benchmarks.md.

    make bench                      everything
    make bench WHAT="train start"   parts by name: train, checkpoint, encoding, start

In: nothing but this repository; what the peers need is installed under .bench, once. Out: a section of
docs/benchmarks.md per part; sections of parts that were not asked for stay as they are.

Every measurement is a process of its own on one thread, as many at a time as there are cores. They are interleaved:
each round runs all settings in another order, so that a neighbour on the machine or a warm processor favours none. What
is compared is a ratio of two figures of one round; its spread is that over the rounds.
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
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from environments import interpreter
from gauge import MARK
from material import SEED
from report import Round, encoding_section, rate_of_products, save_section, start_section, train_section, write

HERE = Path(__file__).parent
ROOT = HERE.parent
SCRATCH = ROOT / ".bench"
PARTS = ("train", "checkpoint", "encoding", "start")


@dataclass(frozen=True)
class Setting:
    """One way to run one library.

    Args:
        library: whose environment it runs in.
        words: the script under bench/ and its arguments; MATERIAL and OUTPUT stand for folders.
    """

    name: str
    library: str
    words: tuple[str, ...]


def training(name: str, library: str, *words: str) -> Setting:
    script = {"burnish": ("train_burnish.py",), "llamafactory": ("train_llamafactory.py",)}.get(
        library, ("train_peer.py", library)
    )
    return Setting(name, library, (*script, "MATERIAL", "OUTPUT", *words))


# A pack holds 1,024 tokens, about as many as five and a half rows; two of them are a step a little above eight rows.
TRAIN = (
    training("TRL, default", "trl"),
    training("TRL, packing, no checkpointing", "trl", "packing=True", "gradient_checkpointing=False",
             "per_device_train_batch_size=2"),
    training("transformers, bf16", "transformers", "bf16=True"),
    training("transformers, bf16, grouped by length", "transformers", "bf16=True",
             "train_sampling_strategy='group_by_length'"),
    training("LLaMA-Factory, bf16", "llamafactory", "bf16=True"),
    training("LLaMA-Factory, bf16, neat packing", "llamafactory", "bf16=True", "neat_packing=True",
             "per_device_train_batch_size=2"),
    training("burnish, bf16", "burnish", "bf16=true"),
    training("burnish, float32", "burnish"),
)  # fmt: skip
_SAVES = ("max_steps=4", "save_strategy='steps'", "save_steps=1", "per_device_train_batch_size=1")
CHECKPOINT = (
    training("transformers", "transformers", "bf16=True", *_SAVES),
    training("burnish", "burnish", "bf16=true", *(word.replace("'", "") for word in _SAVES)),
)
ENCODING = tuple(
    Setting(name, library, ("encode.py", library, "MATERIAL"))
    for name, library in (("TRL", "trl"), ("LLaMA-Factory", "llamafactory"), ("burnish", "burnish"))
)


def measure(setting: Setting) -> dict[str, Any]:
    """Run one setting in a process of its own; what its ``GAUGE`` line says."""
    output = SCRATCH / "out" / f"{time.time_ns()}"
    words = [{"MATERIAL": str(SCRATCH / "material"), "OUTPUT": str(output)}.get(word, word) for word in setting.words]
    told = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "BENCH_STARTED_S": str(time.time()), "PYTHONPATH": str(ROOT / "src") if setting.library == "burnish" else "",
    }  # fmt: skip
    done = subprocess.run(
        [interpreter(setting.library), HERE / words[0], *words[1:]], env=told, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{setting.name} did not come to its end:\n{done.stderr[-3000:]}")
    print(f"  {setting.name}", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return found


def rounds(settings: Sequence[Setting], count: int, at_once: int) -> list[Round]:
    """``count`` times all settings, each time in another order; figures by the name of the setting."""
    for setting in settings:
        interpreter(setting.library)
    found = []
    for number in range(count):
        print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
        order = list(settings)
        Random(SEED + number).shuffle(order)
        with ThreadPoolExecutor(at_once) as pool:
            figures = dict(zip((setting.name for setting in order), pool.map(measure, order), strict=True))
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


def make_material(rows: int) -> None:
    subprocess.run([interpreter("burnish"), HERE / "material.py", SCRATCH / "material", f"--rows={rows}"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"Expected parts among {', '.join(PARTS)}. Received: {', '.join(sorted(unknown))}.")
    make_material(arguments.rows)
    if "train" in parts or "start" in parts:
        rate = rate_of_products()
        found = rounds(TRAIN, arguments.rounds, arguments.at_once)
        if "train" in parts:
            write("train", train_section(found, rate, arguments.rows, SCRATCH / "material"))
        if "start" in parts:
            write("start", start_section(found, help_seconds()))
    if "checkpoint" in parts:
        write("checkpoint", save_section(rounds(CHECKPOINT, arguments.rounds, 1)))
    if "encoding" in parts:
        write("encoding", encoding_section(rounds(ENCODING, arguments.rounds, arguments.at_once)))


if __name__ == "__main__":
    main()
