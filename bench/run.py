"""Benchmark burnish against other libraries and write docs/benchmarks.md.

    make bench                                          the parts that are not marked as long
    make bench WHAT="train start"                       the named parts; WHAT=all for all parts
    make bench WHAT="train --family llama --longest 256 --only packing --only burnish"

Each part measures one topic and writes one section of docs/benchmarks.md, with the date and the versions. Other
sections are not changed. The other libraries are installed under .bench on the first run. With a different model,
different rows, a selection of settings or --print-only, the section is printed and the document is not changed. The
wall time and the processor time of each part are printed.

Each measurement runs in a separate process with one thread, and as many processes run at a time as there are cores.
``measuring.py`` determines the order. Ratios compare two measurements of the same round; their spread is that over the
rounds.
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
import report_images
import report_other
import report_rollouts
import report_training
from document import provenance, write_section
from environments import torchvision
from figures import Figures, Round
from gauge import PREFERENCES
from generation_material import model_folder
from image_material import Photos
from material import Material, add_arguments, make, make_large_dataset, material_from, read_facts
from measuring import SCRATCH, TIMEOUT_S, Bench, environment
from settings import (
    BASE,
    BATCHING,
    BEST_NAMES,
    CHECKPOINT,
    DEFAULT_NAMES,
    ENCODING,
    EVALUATION,
    GENERATION,
    LONG_GRPO_NAMES,
    PACKING,
    RESUME,
    SCRIPTS,
    SERVERS,
    START,
    WIDE_NAMES,
    Setting,
    grpo_settings,
    image_settings,
    in_float32,
    optimization_settings,
    preference_settings,
    process_settings,
    restart_settings,
    trainings,
)

# With fewer rows, the partly filled last pack would be too large a share of all packs.
DEFAULT_ROWS, FEWER_ROWS, SHORT_ROWS = Material(), Material(longest=512, rows=16), Material(longest=256, rows=16)
# Short rows for the wide model: the logits of a long row need gigabytes in other libraries.
LARGE = replace(SHORT_ROWS, size="large")
RECORDS = 50_000
OTHER_SHAPES = (
    *(replace(SHORT_ROWS, family=family) for family in ("llama", "gemma", "mistral", "qwen3", "gpt2")),
    Material(longest=32, rows=64), Material(longest=4096, median=1000, rows=4),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A section of the document.

    Args:
        section: runs the measurements and returns the text of the section.
        material: the default model and rows; command-line flags override its fields.
        rounds: number of rounds without --rounds.
        at_once: number of processes at a time; None for one per core.
        is_long: whether the part must be requested by name.
    """

    section: Callable[[PartRun], str]
    material: Material = DEFAULT_ROWS
    rounds: int = 1
    at_once: int | None = None
    is_long: bool = False


class PartRun:
    """A part together with the command-line arguments of this run.

    Args:
        arguments: parsed command-line arguments.
    """

    def __init__(self, part: Part, arguments: argparse.Namespace, bench: Bench) -> None:
        self.part, self.arguments, self.bench = part, arguments, bench
        given = asdict(material_from(arguments))
        self.material = replace(
            part.material, **{name: value for name, value in given.items() if value != getattr(DEFAULT_ROWS, name)}
        )
        self.count = arguments.rounds or part.rounds
        self.results: list[Round] = []

    def run_settings(self, settings: Sequence[Setting], material: Material | None = None) -> list[Round]:
        """Run the settings that --only selects and return the rounds."""
        chosen = only(settings, self.arguments.only)
        rounds = self.bench.rounds(chosen, material_folder(material or self.material), self.count, self.part.at_once)
        self.results += rounds
        return rounds


def only(settings: Sequence[Setting], patterns: Sequence[str]) -> list[Setting]:
    """Return the settings whose name contains one of the patterns, and always the baseline."""
    return [s for s in settings if not patterns or s.name == BASE or any(pattern in s.name for pattern in patterns)]


def material_folder(material: Material) -> Path:
    """Create the material unless it exists, and return its folder."""
    folder = SCRATCH / "material" / material.name
    make(material, folder)
    return folder


# --- parts ------------------------------------------------------------------------------------------------------------


def training(default_method: str, names: Sequence[str], part_run: PartRun) -> str:
    """Benchmark training.

    Args:
        default_method: full or lora, if --method is not given.
        names: settings that are measured by default, those needed for ratios.
    """
    method, facts = part_run.arguments.method or default_method, read_facts(material_folder(part_run.material))
    uses_all = part_run.arguments.all_settings or part_run.arguments.only
    settings = [setting for setting in trainings(method, facts) if uses_all or setting.name in names]
    return report_training.training(part_run.run_settings(settings), settings, facts, method)


def training_float32(method: str, part_run: PartRun) -> str:
    """Benchmark ``training`` in float32 and limited to AVX2, as on a processor without bfloat16 products."""
    facts = read_facts(material_folder(part_run.material))
    settings = in_float32(setting for setting in trainings(method, facts) if setting.name in DEFAULT_NAMES)
    return report_training.training(part_run.run_settings(settings), settings, facts, method)


def preference_training(stage: str, part_run: PartRun, is_float32: bool = False) -> str:
    """Benchmark preference training: full training and LoRA, or the one that --method selects."""
    facts, results = read_facts(material_folder(part_run.material)), list[str]()
    for method in (part_run.arguments.method,) if part_run.arguments.method else ("full", "lora"):
        settings = preference_settings(stage, method)
        settings = in_float32(settings) if is_float32 else settings
        results.append(report_training.preferences(part_run.run_settings(settings), settings, facts, stage, method))
    return "\n\n".join(results)


def other_shapes(part_run: PartRun) -> str:
    """Benchmark full training with other model families and row lengths."""
    part_run.count, results = 1, list[tuple[Round, Figures]]()
    for shape in OTHER_SHAPES:
        facts = read_facts(material_folder(shape))
        best = [setting for setting in trainings("full", facts) if setting.name in BEST_NAMES]
        results.append((part_run.run_settings(best, shape)[0], facts))
    return report_training.other_shapes(results)


def rollouts(part_run: PartRun, is_float32: bool = False) -> str:
    """Benchmark GRPO with completions of a fixed length and of random lengths."""
    cases = (
        ("completions of 64 tokens", 64, None, None),
        ("completions of 256 tokens, TRL's default", 256, None, LONG_GRPO_NAMES),
        ("completions that end at random, at most 128 tokens", 128, 70, None),
    )
    results = []
    for name, longest, ends, names in cases:
        material = replace(part_run.material, ends=ends)
        settings = [each for each in grpo_settings(longest, is_float32) if names is None or each.name in names]
        results.append((name, part_run.run_settings(settings, material), read_facts(material_folder(material))))
    return report_rollouts.rollouts(results, grpo_settings(0, is_float32))


def optimizations(part_run: PartRun) -> str:
    """Benchmark burnish without its optimizations, then with one added after the other."""
    return report_training.optimizations(
        part_run.run_settings(optimization_settings()), read_facts(material_folder(part_run.material))
    )


def images(part_run: PartRun) -> str:
    """Benchmark training steps on a few photos of several sizes, and the start with many photos."""
    torchvision()
    few, many_photos = Photos(), Photos(part_run.arguments.photos, ((1280, 960),))
    folders = {photos: SCRATCH / "material" / photos.name for photos in (few, many_photos)}
    facts = [image_material.make(photos, folder) for photos, folder in folders.items()]
    results = []
    for is_start, folder in zip((False, True), folders.values(), strict=True):
        chosen = only(image_settings(is_start), part_run.arguments.only)
        results.append(part_run.bench.rounds(chosen, folder, part_run.count, part_run.part.at_once))
        part_run.results += results[-1]
    return report_images.images(results[0], results[1], facts[0], part_run.arguments.photos)


def image_planning(part_run: PartRun) -> str:
    """Benchmark the planning of many records with an image each."""
    parent, count = SCRATCH / "material", part_run.arguments.image_records
    image_material.make(Photos(), model := parent / Photos().name)
    return report_images.planning(
        run_script(part_run, "burnish", "plan_images.py", str(model / "model"), str(parent / "records"), str(count)),
        count,
    )


def rows(part_run: PartRun) -> str:
    """Benchmark the start with a large dataset, tokenized in advance and streamed."""
    count = part_run.arguments.records
    return report_other.rows(
        part_run.run_settings(restart_settings(make_large_dataset(count, SCRATCH / "material"), count))
    )


def simple_part(report: Callable[[Sequence[Round]], str], settings: Sequence[Setting]) -> Callable[[PartRun], str]:
    """Return a function that measures fixed settings and formats them with ``report``."""
    return lambda part_run: report(part_run.run_settings(settings))


def responses(part_run: PartRun) -> str:
    """Benchmark generation: burnish and transformers in one process, LLaMA-Factory's engine in another."""
    folder, results = model_folder(SCRATCH / "material"), []
    for _ in range(part_run.count):
        results.append(run_script(part_run, "burnish", "generation.py"))
        results[-1]["LLaMA-Factory, ChatModel"] = run_script(
            part_run, "llamafactory", "generation_llamafactory.py", str(folder), "even", "uneven", "sampled"
        )
    return report_other.responses(results)


def servers(part_run: PartRun) -> str:
    """Benchmark the API servers."""
    parent = SCRATCH / "material"
    folders = [str(model_folder(parent, is_small)) for is_small in (False, True)]
    rounds = [
        {
            name: run_script(
                part_run, "burnish", "measure_server.py", *folders, *command(part_run.bench.python(library) or "")
            )
            for name, (library, command) in SERVERS.items()
        }
        for _ in range(part_run.count)
    ]
    return report_other.servers(rounds, run_script(part_run, "burnish", "generation.py", "engine"))


def run_script(part_run: PartRun, library: str, script: str, *arguments: str) -> Any:
    """Return the last line that a script prints, parsed as JSON, or a dictionary with the key ``failed``."""
    python = part_run.bench.python(library)
    if python is None:
        return {"failed": f"{library} could not be installed."}
    finished = subprocess.run(
        [str(python), str(Path(__file__).parent / script), *arguments],
        capture_output=True, text=True, check=False, env=environment(library), timeout=TIMEOUT_S,
    )  # fmt: skip
    if finished.returncode:
        return {"failed": finished.stderr[-2000:]}
    part_run.results.append({script: {"versions": part_run.bench.versions(library)}})
    return json.loads(finished.stdout.splitlines()[-1])


PARTS = {
    "train": Part(partial(training, "full", DEFAULT_NAMES), rounds=2),
    "lora": Part(partial(training, "lora", DEFAULT_NAMES)),
    "large": Part(partial(training, "full", WIDE_NAMES), LARGE),
    "large-lora": Part(partial(training, "lora", DEFAULT_NAMES), LARGE, is_long=True),
    "other": Part(other_shapes, is_long=True),
    "ways": Part(optimizations, FEWER_ROWS),
    "batching": Part(simple_part(report_training.batching, BATCHING), FEWER_ROWS),
    "scripts": Part(simple_part(report_training.scripts, SCRIPTS), SHORT_ROWS),
    **{stage: Part(partial(preference_training, stage), FEWER_ROWS) for stage in PREFERENCES},
    "float32": Part(partial(training_float32, "full"), is_long=True),
    "float32-lora": Part(partial(training_float32, "lora"), is_long=True),
    "float32-dpo": Part(partial(preference_training, "dpo", is_float32=True), FEWER_ROWS, is_long=True),
    "rollouts": Part(rollouts, Material(longest=512), is_long=True),
    "float32-rollouts": Part(partial(rollouts, is_float32=True), Material(longest=512), is_long=True),
    "start": Part(simple_part(report_other.start, START)),
    "rows": Part(rows),
    "encoding": Part(simple_part(report_other.encoding, ENCODING)),
    "packing": Part(simple_part(report_other.packing, PACKING)),
    "checkpoint": Part(simple_part(report_other.checkpoint, CHECKPOINT), SHORT_ROWS, at_once=1),
    "processes": Part(simple_part(report_other.processes, process_settings()), at_once=1, is_long=True),
    "resume": Part(simple_part(report_other.resume, RESUME)),
    "evaluation": Part(simple_part(report_other.evaluation, EVALUATION), FEWER_ROWS),
    "images": Part(images, is_long=True),
    "image-planning": Part(image_planning, is_long=True),
    "answers": Part(responses, rounds=3),
    "serve": Part(servers),
    # A run takes one or two seconds, so there are three rounds.
    "generation": Part(simple_part(report_other.generation, GENERATION), SHORT_ROWS, rounds=3),
}


def parts_of(names: Sequence[str]) -> list[str]:
    """Return the requested parts: the named ones, all, or by default those that are not long."""
    if "all" in names:
        return list(PARTS)
    return list(names) or [name for name, part in PARTS.items() if not part.is_long]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    long = ", ".join(name for name, part in PARTS.items() if part.is_long)
    parser.add_argument("parts", nargs="*", default=[],
                        help=f"parts: {', '.join(PARTS)}, or all; default: all but {long}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="number of rounds; default: that of each part")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="number of processes at a time")
    parser.add_argument(
        "--only", action="append", default=[], help="only settings whose name contains this; may be repeated"
    )
    parser.add_argument("--method", choices=("full", "lora"), help="method for the parts that train")
    parser.add_argument(
        "--all-settings", action="store_true", help="also run the training settings that are not needed for ratios"
    )
    parser.add_argument("--records", type=int, default=RECORDS, help="number of records of the part rows")
    parser.add_argument(
        "--image-records", type=int, default=100_000, help="number of records of the part image-planning"
    )
    parser.add_argument("--photos", type=int, default=2000, help="number of photos for the start in the part images")
    parser.add_argument(
        "--print-only", action="store_true", help="print the sections and do not write docs/benchmarks.md"
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {*PARTS, "all"}:
        parser.error(f"Expected parts among {', '.join(PARTS)}, or all. Received: {', '.join(sorted(unknown))}.")
    measure(parts_of(arguments.parts), arguments)


def measure(parts: Sequence[str], arguments: argparse.Namespace) -> None:
    """Measure parts, print each section, and write it if the settings are the defaults."""
    is_default = replace(material_from(arguments), pairs=None) == DEFAULT_ROWS and arguments.records == RECORDS
    is_default = is_default and not (arguments.only or arguments.method or arguments.print_only)
    durations: dict[str, tuple[float, float]] = {}
    with Bench(arguments.at_once) as bench:
        for name in parts:
            begin, before = time.time(), bench.process_cpu_s
            part_run = PartRun(PARTS[name], arguments, bench)
            text, flags = (
                part_run.part.section(part_run),
                (flag for flag in sys.argv[1:] if flag not in arguments.parts),
            )
            section = f"{text}\n\n{provenance(part_run.results, [name, *flags], part_run.count)}"
            print(section, flush=True)
            if is_default:
                write_section(name, section)
            durations[name] = time.time() - begin, bench.process_cpu_s - before
            print(
                f"{name}: {durations[name][0]:.0f} s, {durations[name][1]:.0f} s of processors",
                file=sys.stderr,
                flush=True,
            )
    print(times(durations), file=sys.stderr)
    if is_default and set(parts_of([])) <= set(durations):
        write_section("times", times(durations))


def times(durations: Mapping[str, tuple[float, float]]) -> str:
    """Return the sentence on the duration of each part.

    Args:
        durations: name -> wall time in seconds, and processor time of all processes in seconds.
    """
    seconds = sum(wall for wall, _ in durations.values())
    each = ", ".join(f"{name} {wall:.0f} s ({cpu:.0f})" for name, (wall, cpu) in durations.items())
    minutes = f"{seconds // 60:.0f}:{seconds % 60:02.0f} minutes"
    return f"It took {minutes}; with processor seconds in parentheses: {each}."


if __name__ == "__main__":
    main()
