"""Measures burnish beside its peers and writes docs/benchmarks.md.

    make bench                                          the parts that are not marked as long
    make bench WHAT="train start"                       parts by name, or all of them: WHAT=all
    make bench WHAT="train --family llama --longest 256 --only packing --only burnish"

In: nothing but this repository; what the peers need is installed under .bench, once. Out: a section of
docs/benchmarks.md per part; sections of parts that were not asked for stay as they are, with their own date and
versions. With another model, other rows or a choice of settings, and with --print-only, the section is printed, and the
document is left alone. Each part says how long it took, by the clock and in the processor time of its processes.

Every measurement is a process of its own on one thread, as many at a time as there are cores; ``measuring.py`` says in
which order. What is compared is a ratio of two figures of one round; its spread is that over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import image_material
import report_beside
import report_images
import report_rollouts
import report_training
from answer_material import folder_in
from document import where, write
from environments import torchvision
from figures import Figures, Round
from gauge import PREFERENCES
from image_material import Photos
from material import Material, add_flags, asked_for, facts_of, make, many
from measuring import SCRATCH, TIMEOUT_S, Bench, environment
from settings import (
    BASE,
    BATCHING,
    BEST,
    CHECKPOINT,
    ENCODING,
    EVALUATION,
    GENERATION,
    PACKING,
    RESUME,
    SCRIPTS,
    SERVERS,
    START,
    USUAL,
    WIDE,
    Setting,
    by_processes,
    in_float32,
    of_images,
    preferences,
    rewarded,
    starts_again,
    trainings,
    ways,
)

# Fewer rows are no fair look at packs: the last one, filled up, is a third of them.
USUAL_ROWS, FEWER, SHORT = Material(), Material(longest=512, rows=16), Material(longest=256, rows=16)
# Short rows for the wide model too, because a peer's logits of a long one need gigabytes.
LARGE = replace(SHORT, size="large")
RECORDS = 50_000
OTHERS = (
    *(replace(SHORT, family=family) for family in ("llama", "gemma", "mistral", "qwen3", "gpt2")),
    Material(longest=32, rows=64), Material(longest=4096, median=1000, rows=4),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A section of the document.

    Args:
        section: measures, and says what was found.
        material: what is measured on, where no flag asks for something else.
        rounds: how often, if --rounds does not say.
        at_once: processes at a time, where not as many as there are cores.
        is_long: left out unless it is asked for.
    """

    section: Callable[[Asked], str]
    material: Material = USUAL_ROWS
    rounds: int = 1
    at_once: int | None = None
    is_long: bool = False


class Asked:
    """A part as it was asked for.

    Args:
        arguments: the command's.
    """

    def __init__(self, part: Part, arguments: argparse.Namespace, bench: Bench) -> None:
        self.part, self.arguments, self.bench = part, arguments, bench
        given = asdict(asked_for(arguments))
        self.material = replace(
            part.material, **{name: v for name, v in given.items() if v != getattr(USUAL_ROWS, name)}
        )
        self.count = arguments.rounds or part.rounds
        self.found: list[Round] = []

    def measured(self, settings: Sequence[Setting], material: Material | None = None) -> list[Round]:
        """Rounds of the settings, of which --only may leave some."""
        chosen = only(settings, self.arguments.only)
        rounds = self.bench.rounds(chosen, made(material or self.material), self.count, self.part.at_once)
        self.found += rounds
        return rounds


def only(settings: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    """Those whose name holds one of the words; what they are compared with stays."""
    return [s for s in settings if not words or s.name == BASE or any(word in s.name for word in words)]


def made(asked: Material) -> Path:
    folder = SCRATCH / "material" / asked.name
    make(asked, folder)
    return folder


# --- parts ------------------------------------------------------------------------------------------------------------


def training(usual_method: str, names: Sequence[str], asked: Asked) -> str:
    """Args: names: of the settings that ratios are made of."""
    method, facts = asked.arguments.method or usual_method, facts_of(made(asked.material))
    takes_all = asked.arguments.all_settings or asked.arguments.only
    settings = [setting for setting in trainings(method, facts) if takes_all or setting.name in names]
    return report_training.training(asked.measured(settings), settings, facts, method)


def training_float32(method: str, asked: Asked) -> str:
    """The settings of ``training`` in float32 and with AVX2 alone, as on a processor without bfloat16 products."""
    facts = facts_of(made(asked.material))
    settings = in_float32(setting for setting in trainings(method, facts) if setting.name in USUAL)
    return report_training.training(asked.measured(settings), settings, facts, method)


def preferred(stage: str, asked: Asked, is_float32: bool = False) -> str:
    """Full training, and an adapter, unless --method says which."""
    facts, found = facts_of(made(asked.material)), list[str]()
    for method in (asked.arguments.method,) if asked.arguments.method else ("full", "lora"):
        settings = preferences(stage, method)
        settings = in_float32(settings) if is_float32 else settings
        found.append(report_training.preferences(asked.measured(settings), settings, facts, stage, method))
    return "\n\n".join(found)


def other(asked: Asked) -> str:
    asked.count, found = 1, list[tuple[Round, Figures]]()
    for shape in OTHERS:
        facts = facts_of(made(shape))
        best = [setting for setting in trainings("full", facts) if setting.name in BEST]
        found.append((asked.measured(best, shape)[0], facts))
    return report_training.other(found)


def rollouts(asked: Asked) -> str:
    found = []
    for name, longest, ends in (("completions of 64 tokens", 64, None),
                                ("completions that end at random, at most 128 tokens", 128, 70)):  # fmt: skip
        material, settings = replace(asked.material, ends=ends), rewarded(longest)
        found.append((name, asked.measured(settings, material), facts_of(made(material))))
    return report_rollouts.rollouts(found, rewarded(0))


def own_ways(asked: Asked) -> str:
    return report_training.ways(asked.measured(ways()), facts_of(made(asked.material)))


def images(asked: Asked) -> str:
    """Steps on a few photos of several sizes, and the start with many."""
    torchvision()
    few, many_photos = Photos(), Photos(asked.arguments.photos, ((1280, 960),))
    folders = {photos: SCRATCH / "material" / photos.name for photos in (few, many_photos)}
    facts = [image_material.make(photos, folder) for photos, folder in folders.items()]
    found = []
    for is_start, folder in zip((False, True), folders.values(), strict=True):
        chosen = only(of_images(is_start), asked.arguments.only)
        found.append(asked.bench.rounds(chosen, folder, asked.count, asked.part.at_once))
        asked.found += found[-1]
    return report_images.images(found[0], found[1], facts[0], asked.arguments.photos)


def rows(asked: Asked) -> str:
    count = asked.arguments.records
    return report_beside.rows(asked.measured(starts_again(many(count, SCRATCH / "material"), count)))


def beside(report: Callable[[Sequence[Round]], str], settings: Sequence[Setting]) -> Callable[[Asked], str]:
    return lambda asked: report(asked.measured(settings))


def answers(asked: Asked) -> str:
    """burnish's and transformers' ways by turns in one process, LLaMA-Factory's engine in one of its own."""
    folder, found = folder_in(SCRATCH / "material"), []
    for _ in range(asked.count):
        found.append(said(asked, "burnish", "answer.py"))
        found[-1]["LLaMA-Factory, ChatModel"] = said(
            asked, "llamafactory", "answer_llamafactory.py", str(folder), "even", "uneven", "drawn"
        )
    return report_beside.answers(found)


def serve(asked: Asked) -> str:
    places = SCRATCH / "material"
    folders = [str(folder_in(places, is_small)) for is_small in (False, True)]
    rounds = [
        {
            name: said(asked, "burnish", "ask_server.py", *folders, *words(asked.bench.python(library)))
            for name, (library, words) in SERVERS.items()
        }
        for _ in range(asked.count)
    ]
    return report_beside.serve(rounds, said(asked, "burnish", "answer.py", "engine"))


def said(asked: Asked, library: str, script: str, *words: str) -> Any:
    """The last line that a script prints, or how it failed."""
    python = asked.bench.python(library)
    if python is None:
        return {"failed": f"{library} is not to be had."}
    done = subprocess.run(
        [str(python), str(Path(__file__).parent / script), *words],
        capture_output=True, text=True, check=False, env=environment(library), timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    asked.found.append({script: {"versions": asked.bench.versions(library)}})
    return json.loads(done.stdout.splitlines()[-1])


PARTS = {
    "train": Part(partial(training, "full", USUAL), rounds=2),
    "lora": Part(partial(training, "lora", USUAL)),
    "large": Part(partial(training, "full", WIDE), LARGE),
    "large-lora": Part(partial(training, "lora", USUAL), LARGE, is_long=True),
    "other": Part(other, is_long=True),
    "ways": Part(own_ways, FEWER),
    "batching": Part(beside(report_training.batching, BATCHING), FEWER),
    "scripts": Part(beside(report_training.scripts, SCRIPTS), SHORT),
    **{stage: Part(partial(preferred, stage), FEWER) for stage in PREFERENCES},
    "float32": Part(partial(training_float32, "full"), is_long=True),
    "float32-lora": Part(partial(training_float32, "lora"), is_long=True),
    "float32-dpo": Part(partial(preferred, "dpo", is_float32=True), FEWER, is_long=True),
    "rollouts": Part(rollouts, Material(longest=512), is_long=True),
    "start": Part(beside(report_beside.start, START)),
    "rows": Part(rows),
    "encoding": Part(beside(report_beside.encoding, ENCODING)),
    "packing": Part(beside(report_beside.packing, PACKING)),
    "checkpoint": Part(beside(report_beside.checkpoint, CHECKPOINT), SHORT, at_once=1),
    "processes": Part(beside(report_beside.processes, by_processes()), at_once=1, is_long=True),
    "resume": Part(beside(report_beside.resume, RESUME)),
    "evaluation": Part(beside(report_beside.evaluation, EVALUATION), FEWER),
    "images": Part(images, is_long=True),
    "answers": Part(answers, rounds=3),
    "serve": Part(serve),
    "generation": Part(beside(report_beside.generation, GENERATION), SHORT, rounds=3),  # a second or two each
}


def parts_of(words: Sequence[str]) -> list[str]:
    """The parts that are meant: those named, all, or where nothing is said those that are not long."""
    if "all" in words:
        return list(PARTS)
    return list(words) or [name for name, part in PARTS.items() if not part.is_long]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    long = ", ".join(name for name, part in PARTS.items() if part.is_long)
    parser.add_argument("parts", nargs="*", default=[],
                        help=f"of {', '.join(PARTS)}; all; where none is named, all but {long}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="how often; one or two if not given")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="settings whose name holds this; may be repeated")
    parser.add_argument("--method", choices=("full", "lora"), help="of the parts that train")
    parser.add_argument(
        "--all-settings", action="store_true", help="in the parts that train, those that no ratio needs"
    )
    parser.add_argument("--records", type=int, default=RECORDS, help="of the part rows")
    parser.add_argument("--photos", type=int, default=2000, help="of the start of the part images")
    parser.add_argument("--print-only", action="store_true", help="leave the document alone")
    add_flags(parser)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {*PARTS, "all"}:
        parser.error(f"Expected parts among {', '.join(PARTS)}, or all. Received: {', '.join(sorted(unknown))}.")
    measure(parts_of(arguments.parts), arguments)


def measure(parts: Sequence[str], arguments: argparse.Namespace) -> None:
    """The sections, each printed when it is there, and written where everything was as usual."""
    is_usual = replace(asked_for(arguments), pairs=None) == USUAL_ROWS and arguments.records == RECORDS
    is_usual = is_usual and not (arguments.only or arguments.method or arguments.print_only)
    told: dict[str, tuple[float, float]] = {}
    with Bench(arguments.at_once) as bench:
        for name in parts:
            begin, before = time.time(), bench.process_cpu_s
            asked = Asked(PARTS[name], arguments, bench)
            text, flags = asked.part.section(asked), (word for word in sys.argv[1:] if word not in arguments.parts)
            section = f"{text}\n\n{where(asked.found, [name, *flags], asked.count)}"
            print(section, flush=True)
            if is_usual:
                write(name, section)
            told[name] = time.time() - begin, bench.process_cpu_s - before
            print(f"{name}: {told[name][0]:.0f} s, {told[name][1]:.0f} s of processors", file=sys.stderr, flush=True)
    print(times(told), file=sys.stderr)
    if is_usual and set(parts_of([])) <= set(told):
        write("times", times(told))


def times(told: Mapping[str, tuple[float, float]]) -> str:
    """The sentence on how long each part took.

    Args:
        told: name -> seconds by the clock, and of all its processes.
    """
    seconds = sum(wall for wall, _ in told.values())
    each = ", ".join(f"{name} {wall:.0f} s ({cpu:.0f})" for name, (wall, cpu) in told.items())
    minutes = f"{seconds // 60:.0f}:{seconds % 60:02.0f} minutes"
    return f"It took {minutes}; with processor seconds in parentheses: {each}."


if __name__ == "__main__":
    main()
