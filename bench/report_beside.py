"""The sections on everything around a training: start, rows, packs, checkpoints, evaluation, answers.

In: per round, what each setting's process said. Out: text.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from figures import GB, Cell, Figures, Round, Value, amount, beside, line, named, peak, ratios, speed, table
from measuring import environment
from pack import CAPACITIES
from resume import STEPS
from settings import OURS


def help_seconds(count: int = 9) -> float:
    """Median wall time of ``burnish --help``."""
    taken, command, told = [], [sys.executable, "-m", "burnish", "--help"], environment("burnish")
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=told)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def start(rounds: Sequence[Round]) -> str:
    """From the command until the first step."""
    ready = named("ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": amount(rounds, ready, ".1f"),
            "burnish's to it": lambda name: ratios(rounds, OURS, name, ready),
            "wall s": amount(rounds, "ready_wall_s", ".1f"),
            "memory of the second, GB": amount(rounds, "ready_bytes", unit=GB),
        },
        "setting",
    )
    return (
        "From the start of the process until the first step: "
        "imports, model, data (LLaMA-Factory and burnish tokenize it, TRL and transformers receive token "
        "ids)."
        f"\n\n{lines}\n\n"
        f"`burnish --help` answers in {help_seconds():.2f} s (wall, median of nine)."
    )


def rows(rounds: Sequence[Round]) -> str:
    """From the command until the first step of a set of many rows, and the same once more."""
    first, again = named("ready_cpu_s"), named("again_ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": amount(rounds, first, ".1f"),
            "wall s": amount(rounds, "ready_wall_s", ".1f"),
            "peak memory, GB": amount(rounds, "ready_peak_bytes", unit=GB),
            "second start, processor s": amount(rounds, again, ".1f"),
            "wall s of the second": amount(rounds, "again_ready_wall_s", ".1f"),
            "to the first": amount(rounds, lambda figures: again(figures) / first(figures)),
        },
        "burnish, bf16",
    )
    return (
        "From the start of the process until the first step, and the same command again, which reads the cached rows. "
        "Streamed rows are tokenized on demand and not cached.\n\n"
        f"{lines}"
    )


def packing(rounds: Sequence[Round]) -> str:
    """The filling of packs."""
    filled = {
        f"filled at {capacity:,} tokens, %": amount(rounds, f"filled_{capacity}", unit=0.01) for capacity in CAPACITIES
    }
    lines = table(rounds, {**filled, "processor s": amount(rounds, "pack_cpu_s")})
    return (
        "Best-fit packs of 10,000 rows with log-normal lengths, 200 tokens in the median and a pack at most: "
        "burnish packs the whole dataset, the others blocks of a thousand rows, their default. Time for all "
        "three capacities: TRL and burnish from rows to packs; for LLaMA-Factory, which packs during "
        "tokenization, only the assignment of rows."
        f"\n\n{lines}"
    )


def checkpoint(rounds: Sequence[Round]) -> str:
    """The time that the loop waits for a checkpoint."""

    def wait(figures: Figures) -> float:
        return statistics.median(figures["save_waits_s"])

    def wait_cpu(figures: Figures) -> float:
        return statistics.median(figures["save_waits_cpu_s"])

    shares = [ratios(rounds, "burnish", "transformers", figure) for figure in (wait, wait_cpu)]
    lines = table(
        rounds,
        {"wall s": amount(rounds, wait), "processor s of the training thread": amount(rounds, wait_cpu)},
    )
    return (
        "Time between the end of a step and `on_save`, for a checkpoint with weights, optimizer, schedule and random "
        "numbers every three steps of short rows, "
        "and the time that the next update waits for copies of the state; median of a run. burnish writes "
        "while training continues, and waits for the last checkpoint at the end of the run."
        "\n\n"
        f"{lines}\n{line(['burnish to transformers', *shares])}"
    )


def processes(rounds: Sequence[Round]) -> str:
    """One process and two: rate, memory, time in communication, and a checkpoint."""

    def beside_ours(value: Value) -> Cell:
        return lambda name: "-" if "burnish" in name else ratios(rounds, f"burnish, {_way(name)}", name, value)

    def of_two(name: str) -> str:
        alone = f"{name.split(', ')[0]}, one process"
        return "-" if name == alone else ratios(rounds, name, alone, speed)

    lines = table(
        rounds,
        {
            "labels / processor s": amount(rounds, speed, ".0f"),
            "relative to one process": of_two,
            "rate of burnish relative to it": beside_ours(speed),
            "peak memory of a process, GB": amount(rounds, "steps_peak_bytes", unit=GB),
            "burnish's to it": beside_ours(named("steps_peak_bytes")),
            "with the checkpoint, GB": amount(rounds, peak, unit=GB),
            "waiting for the other process, %": amount(rounds, "waited_share", ".1f", unit=0.01),
            "checkpoint blocks training, s": amount(rounds, lambda f: statistics.median(f["save_waits_s"])),
            "written to disk after, s": amount(rounds, "ends_s"),
            "its size, MB": amount(rounds, "checkpoint_bytes", ".0f", unit=1e6),
        },
    )
    return (
        "Seven steps of the same rows, eight to a step, by one process or four by each of two (gloo, one thread each), "
        "then a checkpoint; the first step is not counted. The rate is of the labels and processor seconds of both "
        "processes, the memory of the larger one. "
        "Waiting is the share of time that the training thread is blocked in collective operations. The "
        "checkpoint is on disk when the run can end: burnish hashes and flushes its files, the others leave "
        "that to the operating system; during a run, burnish writes in the background."
        f"\n\n{lines}"
    )


def _way(name: str) -> str:
    return name.split(", ", 1)[1]


def resume(rounds: Sequence[Round]) -> str:
    """The time to find the place in the data, behind few steps and many."""
    columns = {f"after {step:,} steps, ms": amount(rounds, f"after_{step}_ms", ".0f") for step in STEPS}
    return (
        "A million rows, eight to a step: processor milliseconds from the beginning of the resumed epoch to its next "
        "batch. "
        "transformers iterates over the indices of skipped batches, burnish starts at the position; both "
        "compute the order of the rows again."
        f"\n\n{table(rounds, columns)}"
    )


def evaluation(rounds: Sequence[Round]) -> str:
    """The rate of an evaluation, and its memory beside that of the training before it."""
    taken, highest = named("evaluation_cpu_s"), named("evaluation_peak_bytes")
    lines = table(
        rounds,
        {
            "peak of the training, GB": amount(rounds, peak, unit=GB),
            "peak of the evaluation, GB": amount(rounds, highest, unit=GB),
            "burnish's peak to it": beside(rounds, OURS, highest),
            "processor s": amount(rounds, taken, ".1f"),
            "rate of burnish relative to it": beside(rounds, OURS, lambda figures: 1 / taken(figures)),
        },
    )
    return (
        "Two steps of eight rows, then an evaluation of all rows, eight at a time: the mean loss. "
        "The peak of the evaluation includes memory that is still resident after training."
        f"\n\n{lines}"
    )


def generation(rounds: Sequence[Round]) -> str:
    """The rate of answers to prompts, and their memory beside that of the training before them."""

    def rate(figures: Figures) -> float:
        return float(figures["new_tokens"] / figures["prediction_cpu_s"])

    ours = next(name for name in rounds[0] if name.startswith("burnish"))
    lines = table(
        rounds,
        {
            "new tokens / processor s": amount(rounds, rate, ".0f"),
            "rate of burnish relative to it": beside(rounds, ours, rate),
            "peak of the training, GB": amount(rounds, peak, unit=GB),
            "peak during generation, GB": amount(rounds, "prediction_peak_bytes", unit=GB),
        },
    )
    return (
        "Two steps of eight rows, then 32 tokens for the prompts of all rows in bfloat16, eight at a time, with greedy "
        "decoding: transformers' `generate` on the prompts in order, and burnish's `do_predict`. With a static cache "
        "it uses `generate`, grouping prompts of similar length. On a CPU nothing is compiled for the static "
        f"cache.\n\n{lines}"
    )


def answers(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """The rate of answers that are made at once; a ratio is of one round."""
    alone = "transformers, generate one by one"
    found: list[Round] = []
    for answered in rounds:
        found.append({})
        for way, kinds in answered.items():
            found[-1][way] = {"failed": kinds["failed"]} if "failed" in kinds else {
                kind: sum(map(len, each["ids"])) / each["cpu_s"] for kind, each in kinds.items()
            }  # fmt: skip
            if "failed" in kinds:
                continue
            likeliest = [(kinds[kind]["ids"], answered[alone][kind]["ids"]) for kind in ("even", "uneven")]
            pairs = [pair for ours, theirs in likeliest for pair in zip(ours, theirs, strict=True)]
            found[-1][way]["same"] = 100 * sum(a == b for a, b in pairs) / len(pairs)
    columns: dict[str, Cell] = {}
    for kind in ("even", "uneven", "drawn"):
        columns[f"{kind}: tokens / s"] = amount(found, kind, ".0f")
        columns["rate of burnish relative to it" + " " * len(columns)] = beside(found, OURS_OVER_SLOTS, named(kind))
    lines = table(found, {**columns, "same ids, %": amount(found, "same", ".0f")})
    failed = {way: kinds["failed"] for way, kinds in rounds[0].items() if "failed" in kinds}
    said = "".join(f"\n{way} failed: {why}" for way, why in failed.items())
    return (
        "A random Llama of 31 million weights in float32, one thread, 8 at once. Even: 8 answers of 48 tokens, the "
        "likeliest. Uneven: 32 whose lengths vary tenfold. Drawn: 8 of 48, each with its own temperature, top_k and "
        "top_p, but in `generate`'s batch, which has one setting for all. Rates are of processor seconds; ids of the "
        "first two are held against each prompt alone. LLaMA-Factory's engine, in its own process, answers one request "
        f"at a time.\n\n{lines}{said}"
    )


OURS_OVER_SLOTS = "burnish"


def serve(rounds: Sequence[Round], alone: Figures) -> str:
    """The cost of a server, and what it adds to the engine's step."""
    lines = table(
        rounds,
        {
            "socket open, s": amount(rounds, "open_s", ".1f"),
            "first answer, s": amount(rounds, "ready_s", ".1f"),
            "memory of the second, GB": amount(rounds, "loaded_bytes", unit=GB),
            "tokens / s of 8 streams": amount(rounds, "tokens_per_s", ".0f"),
            "tokens / processor s": amount(rounds, "tokens_per_cpu_s", ".0f"),
            "first token while a prompt of 4,000 tokens is read, s": amount(rounds, "first_s"),
            "in chunks of 512": amount(rounds, "pieces", ".1f"),
            "small model: ms a step of 8 streams": amount(rounds, "small_token_s", ".1f", 1e-3),
            "processor ms": amount(rounds, "small_token_cpu_s", ".1f", 1e-3),
            "memory after 1,000 requests, MB more": amount(rounds, "grown_bytes", ".1f", 1e6),
        },
    )
    added = [
        statistics.median(found["burnish api"][name] for found in rounds) - alone[name]
        for name in ("small_token_s", "small_token_cpu_s")
    ]
    failed = {name: figures["failed"] for name, figures in rounds[0].items() if "failed" in figures}
    said = "".join(f"\n\n`{name}` failed: {why.strip().splitlines()[-1]}" for name, why in failed.items())
    return (
        "The same model behind `POST /v1/chat/completions`, one thread, greedy, by the clock. "
        "A step is one token of each of eight streams; with a very small model this is the overhead of the "
        "server. "
        f"burnish's engine alone takes {1e3 * alone['small_token_s']:.1f} ms for that step, so the server adds "
        f"{1e3 * added[0]:.1f} ms; of processors {1e3 * added[1]:.1f} ms. A seat takes "
        f"{alone['seat_bytes_per_token'] / 1024:.0f} KiB a token of this model.\n\n{lines}{said}"
    )


def encoding(rounds: Sequence[Round]) -> str:
    rate = named("rows_per_cpu_s")
    lines = table(
        rounds,
        {
            "conversations / processor s": amount(rounds, rate, ".0f"),
            "rate of burnish relative to it": lambda name: ratios(rounds, "burnish", name, rate),
            "peak memory, GB": amount(rounds, peak, unit=GB),
        },
    )
    return (
        "Conversations of a prompt and a response, with chat template and labels, in one process without a "
        "cache."
        f"\n\n{lines}"
    )
