"""Format the sections on start, tokenization, packing, checkpoints, processes, evaluation, generation and servers.

Each function takes the rounds of measurements and returns the text of a section.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from figures import (
    GB,
    Cell,
    Figures,
    Round,
    Value,
    measurement,
    median_cell,
    peak,
    ratio_cell,
    ratios,
    speed,
    table,
    table_line,
)
from measuring import environment
from pack import CAPACITIES
from resume import STEPS
from settings import OURS


def help_seconds(count: int = 9) -> float:
    """Return the median wall time of ``burnish --help``."""
    seconds, command, variables = [], [sys.executable, "-m", "burnish", "--help"], environment("burnish")
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=variables)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def start(rounds: Sequence[Round]) -> str:
    """Format the time from the command to the first step."""
    ready = measurement("ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": median_cell(rounds, ready, ".1f"),
            "burnish relative to it": lambda name: ratios(rounds, OURS, name, ready),
            "wall s": median_cell(rounds, "ready_wall_s", ".1f"),
            "memory at that point, GB": median_cell(rounds, "ready_bytes", unit=GB),
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
    """Format the time to the first step with a large dataset, and that of a second start."""
    first, again = measurement("ready_cpu_s"), measurement("again_ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": median_cell(rounds, first, ".1f"),
            "wall s": median_cell(rounds, "ready_wall_s", ".1f"),
            "peak memory, GB": median_cell(rounds, "ready_peak_bytes", unit=GB),
            "second start, processor s": median_cell(rounds, again, ".1f"),
            "second start, wall s": median_cell(rounds, "again_ready_wall_s", ".1f"),
            "relative to the first": median_cell(rounds, lambda figures: again(figures) / first(figures)),
        },
        "burnish, bf16",
    )
    return (
        "From the start of the process until the first step, and the same command again, which reads the cached rows. "
        "Streamed rows are tokenized on demand and not cached.\n\n"
        f"{lines}"
    )


def packing(rounds: Sequence[Round]) -> str:
    """Format how full packs are."""
    filled = {
        f"filled at {capacity:,} tokens, %": median_cell(rounds, f"filled_{capacity}", unit=0.01)
        for capacity in CAPACITIES
    }
    lines = table(rounds, {**filled, "processor s": median_cell(rounds, "pack_cpu_s")})
    return (
        "Best-fit packs of 10,000 rows with log-normal lengths, 200 tokens in the median and a pack at most: "
        "burnish packs the whole dataset, the others blocks of a thousand rows, their default. Time for all "
        "three capacities: TRL and burnish from rows to packs; for LLaMA-Factory, which packs during "
        "tokenization, only the assignment of rows."
        f"\n\n{lines}"
    )


def checkpoint(rounds: Sequence[Round]) -> str:
    """Format the time that a checkpoint blocks training."""

    def wait(figures: Figures) -> float:
        return float(statistics.median(figures["save_waits_s"]))

    def wait_cpu(figures: Figures) -> float:
        return float(statistics.median(figures["save_waits_cpu_s"]))

    shares = [ratios(rounds, "burnish", "transformers", figure) for figure in (wait, wait_cpu)]
    lines = table(
        rounds,
        {"wall s": median_cell(rounds, wait), "processor s of the training thread": median_cell(rounds, wait_cpu)},
    )
    return (
        "Time between the end of a step and `on_save`, for a checkpoint with weights, optimizer, schedule and random "
        "numbers every three steps of short rows, "
        "and the time that the next update waits for copies of the state; median of a run. burnish writes "
        "while training continues, and waits for the last checkpoint at the end of the run."
        "\n\n"
        f"{lines}\n{table_line(['burnish to transformers', *shares])}"
    )


def processes(rounds: Sequence[Round]) -> str:
    """Format rate, memory, communication and checkpoint with one process and with two."""

    def burnish_ratio(value: Value) -> Cell:
        return lambda name: "-" if "burnish" in name else ratios(rounds, f"burnish, {_variant(name)}", name, value)

    def relative_to_one(name: str) -> str:
        alone = f"{name.split(', ')[0]}, one process"
        return "-" if name == alone else ratios(rounds, name, alone, speed)

    lines = table(
        rounds,
        {
            "labels / processor s": median_cell(rounds, speed, ".0f"),
            "relative to one process": relative_to_one,
            "rate of burnish relative to it": burnish_ratio(speed),
            "peak memory of a process, GB": median_cell(rounds, "steps_peak_bytes", unit=GB),
            "burnish relative to it": burnish_ratio(measurement("steps_peak_bytes")),
            "with the checkpoint, GB": median_cell(rounds, peak, unit=GB),
            "waiting for the other process, %": median_cell(rounds, "waited_share", ".1f", unit=0.01),
            "checkpoint blocks training, s": median_cell(rounds, lambda f: statistics.median(f["save_waits_s"])),
            "written to disk after, s": median_cell(rounds, "ends_s"),
            "its size, MB": median_cell(rounds, "checkpoint_bytes", ".0f", unit=1e6),
        },
    )
    return (
        "Seven steps of the same rows, eight per step, by one process or four by each of two (gloo, one thread each), "
        "then a checkpoint; the first step is not counted. The rate is of the labels and processor seconds of both "
        "processes, the memory of the larger one. "
        "Waiting is the fraction of time that the training thread is blocked in collective operations. The "
        "checkpoint is on disk when the run can end: burnish hashes and flushes its files, the others leave "
        "that to the operating system; during a run, burnish writes in the background."
        f"\n\n{lines}"
    )


def _variant(name: str) -> str:
    """Return the part of a setting's name after the library."""
    return name.split(", ", 1)[1]


def resume(rounds: Sequence[Round]) -> str:
    """Format the time to find the position in the data after few steps and after many."""
    columns = {f"after {step:,} steps, ms": median_cell(rounds, f"after_{step}_ms", ".0f") for step in STEPS}
    return (
        "A million rows, eight per step: processor milliseconds from the beginning of the resumed epoch to its next "
        "batch. "
        "transformers iterates over the indices of skipped batches, burnish starts at the position; both "
        "compute the order of the rows again."
        f"\n\n{table(rounds, columns)}"
    )


def evaluation(rounds: Sequence[Round]) -> str:
    """Format the rate of an evaluation, and its memory compared with the training before it."""
    seconds, highest = measurement("evaluation_cpu_s"), measurement("evaluation_peak_bytes")
    lines = table(
        rounds,
        {
            "peak of the training, GB": median_cell(rounds, peak, unit=GB),
            "peak of the evaluation, GB": median_cell(rounds, highest, unit=GB),
            "peak of burnish relative to it": ratio_cell(rounds, OURS, highest),
            "processor s": median_cell(rounds, seconds, ".1f"),
            "rate of burnish relative to it": ratio_cell(rounds, OURS, lambda figures: 1 / seconds(figures)),
        },
    )
    return (
        "Two steps of eight rows, then an evaluation of all rows, eight at a time: the mean loss. "
        "The peak of the evaluation includes memory that is still resident after training."
        f"\n\n{lines}"
    )


def generation(rounds: Sequence[Round]) -> str:
    """Format the rate of generation, and its memory compared with the training before it."""

    def rate(figures: Figures) -> float:
        return float(figures["new_tokens"] / figures["prediction_cpu_s"])

    ours = next(name for name in rounds[0] if name.startswith("burnish"))
    lines = table(
        rounds,
        {
            "new tokens / processor s": median_cell(rounds, rate, ".0f"),
            "rate of burnish relative to it": ratio_cell(rounds, ours, rate),
            "peak of the training, GB": median_cell(rounds, peak, unit=GB),
            "peak during generation, GB": median_cell(rounds, "prediction_peak_bytes", unit=GB),
        },
    )
    return (
        "Two steps of eight rows, then 32 tokens for the prompts of all rows in bfloat16, eight at a time, with greedy "
        "decoding: transformers' `generate` on the prompts in order, and burnish's `do_predict`. With a static cache "
        "it uses `generate`, grouping prompts of similar length. On a CPU nothing is compiled for the static "
        f"cache.\n\n{lines}"
    )


def responses(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Format the rate of concurrent generation; a ratio is of one round."""
    alone = "transformers, generate one by one"
    rates: list[Round] = []
    for results in rounds:
        rates.append({})
        for backend, kinds in results.items():
            rates[-1][backend] = {"failed": kinds["failed"]} if "failed" in kinds else {
                kind: sum(map(len, each["ids"])) / each["cpu_s"] for kind, each in kinds.items()
            }  # fmt: skip
            if "failed" in kinds:
                continue
            greedy = [(kinds[kind]["ids"], results[alone][kind]["ids"]) for kind in ("even", "uneven")]
            pairs = [pair for ours, theirs in greedy for pair in zip(ours, theirs, strict=True)]
            rates[-1][backend]["same"] = 100 * sum(a == b for a, b in pairs) / len(pairs)
    columns: dict[str, Cell] = {}
    for kind in ("even", "uneven", "sampled"):
        columns[f"{kind}: tokens / s"] = median_cell(rates, kind, ".0f")
        columns["rate of burnish relative to it" + " " * len(columns)] = ratio_cell(
            rates, BURNISH_ENGINE, measurement(kind)
        )
    lines = table(rates, {**columns, "same ids, %": median_cell(rates, "same", ".0f")})
    failed = {backend: kinds["failed"] for backend, kinds in rounds[0].items() if "failed" in kinds}
    failures = "".join(f"\n{backend} failed: {why}" for backend, why in failed.items())
    return (
        "A random Llama of 31 million weights in float32, one thread, 8 requests at a time. Even: 8 responses of 48 "
        "tokens, greedy. Uneven: 32 responses whose lengths vary tenfold, greedy. Sampled: 8 of 48 tokens, each with "
        "its own temperature, top_k and top_p, except in `generate`'s batch, which has the same settings for all. "
        "Rates are per processor second; ids of the first two are compared with generation of one prompt at a time. "
        f"LLaMA-Factory's engine runs in its own process and generates one response at a time.\n\n{lines}{failures}"
    )


BURNISH_ENGINE = "burnish"


def servers(rounds: Sequence[Round], alone: Figures) -> str:
    """Format the cost of a server, and the time that it adds to a step of the engine."""
    lines = table(
        rounds,
        {
            "socket open, s": median_cell(rounds, "open_s", ".1f"),
            "first response, s": median_cell(rounds, "ready_s", ".1f"),
            "memory at that point, GB": median_cell(rounds, "loaded_bytes", unit=GB),
            "tokens / s of 8 streams": median_cell(rounds, "tokens_per_s", ".0f"),
            "tokens / processor s": median_cell(rounds, "tokens_per_cpu_s", ".0f"),
            "first token while a prompt of 4,000 tokens is read, s": median_cell(rounds, "first_s"),
            "the same in chunks of 512 tokens": median_cell(rounds, "chunks", ".1f"),
            "small model: ms per step of 8 streams": median_cell(rounds, "small_token_s", ".1f", 1e-3),
            "processor ms": median_cell(rounds, "small_token_cpu_s", ".1f", 1e-3),
            "memory growth after 1,000 requests, MB": median_cell(rounds, "grown_bytes", ".1f", 1e6),
        },
    )
    added = [
        statistics.median(results["burnish api"][name] for results in rounds) - alone[name]
        for name in ("small_token_s", "small_token_cpu_s")
    ]
    failed = {name: figures["failed"] for name, figures in rounds[0].items() if "failed" in figures}
    failures = "".join(f"\n\n`{name}` failed: {why.strip().splitlines()[-1]}" for name, why in failed.items())
    return (
        "The same model behind `POST /v1/chat/completions`, one thread, greedy; wall time unless stated otherwise. "
        "A step is one token of each of eight streams; with a very small model this is the overhead of the "
        "server. "
        f"burnish's engine alone takes {1e3 * alone['small_token_s']:.1f} ms for that step, so the server adds "
        f"{1e3 * added[0]:.1f} ms of wall time and {1e3 * added[1]:.1f} ms of processor time. A slot takes "
        f"{alone['slot_bytes_per_token'] / 1024:.0f} KiB per token with this model.\n\n{lines}{failures}"
    )


def encoding(rounds: Sequence[Round]) -> str:
    """Format the rate of tokenization."""
    rate = measurement("rows_per_cpu_s")
    lines = table(
        rounds,
        {
            "conversations / processor s": median_cell(rounds, rate, ".0f"),
            "rate of burnish relative to it": lambda name: ratios(rounds, "burnish", name, rate),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
        },
    )
    return (
        "Conversations of a prompt and a response, with chat template and labels, in one process without a "
        "cache."
        f"\n\n{lines}"
    )
