"""Figures -> sections of docs/benchmarks.md.

In: per round, what each setting's process said. Out: text between the markers of a part; what stands outside of them is
written by hand and stays.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BASE = "TRL, default"
GB = 1e9
_PRODUCTS = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
def rate(dtype):
    x, y = a.to(dtype), b.to(dtype)
    best = 0
    for _ in range(8):
        begin = time.process_time()
        for _ in range(4): x @ y
        best = max(best, 4 * 2 * 1024**3 / (time.process_time() - begin))
    return best
print(rate(torch.float32), rate(torch.bfloat16))
"""

Figures = dict[str, Any]
Round = dict[str, Figures]


def rate_of_products() -> tuple[float, float]:
    """Floating point operations per processor second in products of 1024 by 1024: float32, bfloat16."""
    said = subprocess.run([sys.executable, "-c", _PRODUCTS], check=True, capture_output=True, text=True).stdout
    single, half = map(float, said.split())
    return single, half


# --- sections ---------------------------------------------------------------------------------------------------------


def train_section(rounds: Sequence[Round], rate: tuple[float, float], num_rows: int, material: Path) -> str:
    """Labels per processor second, memory and MFU of each setting."""
    rows = json.loads((material / "rows.json").read_text())
    tokens = sum(len(row["input_ids"]) for row in rows)
    labels = sum(label != -100 for row in rows for label in row["labels"])
    config = json.loads((material / "model" / "config.json").read_text())
    weights = num_weights(config)
    state = 16 * weights  # weights, gradients and AdamW's two moments, all float32

    def mfu(figures: Figures, name: str) -> float:
        """6 operations per weight and token (Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361); the
        head counts for every token, whoever leaves some out."""
        made = 6 * weights * speed(figures) * tokens / labels
        return made / rate[0 if "float32" in name else 1]

    lines = [
        "| setting | labels / processor s | ratio to TRL's default | peak memory, GB | above weights, gradients, "
        "optimizer, GB | MFU | mean loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        each = [found[name] for found in rounds]
        ratios = [speed(found[name]) / speed(found[BASE]) for found in rounds]
        peak = max(figures["peak_bytes"] for figures in each)
        losses = [figures["loss"] for figures in each if figures.get("loss") is not None]
        lines.append(
            f"| {name} | {middle(each, speed):.0f} | {spread(ratios)} | {peak / GB:.2f} | {(peak - state) / GB:.2f} | "
            f"{100 * middle(each, lambda figures, name=name: mfu(figures, name)):.0f} % | "
            f"{f'{losses[0]:.2f}' if losses else '-'} |"
        )
    loop = middle([found["burnish, bf16"] for found in rounds], lambda figures: figures["loop_share"])
    return "\n".join(
        [
            f"A Qwen2 shape of {weights / 1e6:.1f}M weights ({config['num_hidden_layers']} layers of "
            f"{config['hidden_size']}, vocabulary {config['vocab_size']:,}); {num_rows} rows of "
            f"{tokens / len(rows):.0f} tokens in the mean, {max(len(row['input_ids']) for row in rows)} at most, "
            f"{100 * labels / tokens:.0f} % of them learned; eight rows to a step, with packing two packs of 1,024 "
            "tokens; full training, AdamW, one thread.",
            "",
            *lines,
            "",
            f"MFU is against products of 1024 x 1024 on one thread: {rate[0] / 1e9:.0f} GFLOP/s in float32, "
            f"{rate[1] / 1e9:.0f} in bfloat16. The loop itself, outside of model, loss, gradients and optimizer, takes "
            f"{100 * loop:.2f} % of burnish's training in bf16.",
            "",
            where(rounds, "train"),
        ]
    )


def start_section(rounds: Sequence[Round], help_s: float) -> str:
    """From the command to the first step."""
    lines = ["| setting | processor s | wall s |", "|---|---:|---:|"]
    for name in rounds[0]:
        each = [found[name] for found in rounds]
        lines.append(f"| {name} | {median_of(each, 'ready_cpu_s'):.1f} | {median_of(each, 'ready_wall_s'):.1f} |")
    return "\n".join(
        [
            "From the start of the process to the first step: imports, model, rows (LLaMA-Factory and burnish encode "
            "them, TRL and transformers are handed token ids).",
            "",
            *lines,
            "",
            f"`burnish --help` answers in {help_s:.2f} s (wall, median of nine).",
            "",
            where(rounds, "start"),
        ]
    )


def save_section(rounds: Sequence[Round]) -> str:
    """How long the loop waits for a checkpoint."""

    def wait(figures: Figures) -> float:
        return statistics.median(figures["save_waits_s"])

    theirs, ours = ([found[name] for found in rounds] for name in ("transformers", "burnish"))
    ratios = [wait(found["burnish"]) / wait(found["transformers"]) for found in rounds]
    return "\n".join(
        [
            "Wall time between the end of a step and `on_save`, for a checkpoint with weights, optimizer, schedule and "
            "random numbers after every step; the median of a run.",
            "",
            "| | s |",
            "|---|---:|",
            f"| transformers | {middle(theirs, wait):.2f} |",
            f"| burnish | {middle(ours, wait):.2f} |",
            f"| ratio | {spread(ratios)} |",
            "",
            where(rounds, "checkpoint"),
        ]
    )


def encoding_section(rounds: Sequence[Round]) -> str:
    lines = ["| | conversations / processor s | ratio of burnish to it | peak memory, GB |", "|---|---:|---:|---:|"]
    for name in rounds[0]:
        each = [found[name] for found in rounds]
        ratios = [found["burnish"]["rows_per_cpu_s"] / found[name]["rows_per_cpu_s"] for found in rounds]
        lines.append(
            f"| {name} | {median_of(each, 'rows_per_cpu_s'):.0f} | {spread(ratios)} | "
            f"{median_of(each, 'peak_bytes') / GB:.2f} |"
        )
    return "\n".join(
        [
            "Conversations of a question and an answer, with their template and the mask of what is learned, in one "
            "process without a cache.",
            "",
            *lines,
            "",
            where(rounds, "encoding"),
        ]
    )


# --- words ------------------------------------------------------------------------------------------------------------


def speed(figures: Figures) -> float:
    return float(figures["labels"] / figures["cpu_s"])


def middle(each: Sequence[Figures], value: Callable[[Figures], float]) -> float:
    return statistics.median(map(value, each))


def median_of(each: Sequence[Figures], name: str) -> float:
    return middle(each, lambda figures: float(figures[name]))


def spread(ratios: Sequence[float]) -> str:
    """The median, and the least and the greatest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def num_weights(config: dict[str, Any]) -> int:
    """Of a Qwen2 shape whose head is its embedding; biases and norms are too few to count."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = hidden * config["num_key_value_heads"] // heads
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
    return int(config["vocab_size"] * hidden + config["num_hidden_layers"] * layer)


def where(rounds: Sequence[Round], part: str) -> str:
    """The date, the machine, the versions and the command."""
    versions: dict[str, set[str]] = {}
    for figures in (figures for found in rounds for figures in found.values()):
        for library, number in figures["versions"].items():
            versions.setdefault(library, set()).add(number)
    named = ", ".join(f"{library} {' and '.join(sorted(numbers))}" for library, numbers in sorted(versions.items()))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor()}; {len(rounds)} rounds; {named}. "
        f"Again with: `make bench WHAT={part}`."
    )


def processor() -> str:
    """What the processor calls itself, and the instructions that products in 16 bits are made with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    flags = next(line for line in lines if line.startswith("flags")).split()
    able = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{named} ({', '.join(able) or 'no AVX512'})"


def write(part: str, text: str) -> None:
    """Put ``text`` between the markers of ``part``."""
    begin, end = f"<!-- {part}: made by make bench -->", f"<!-- end of {part} -->"
    whole = DOCUMENT.read_text()
    before, after = whole.split(begin)[0], whole.split(end)[1]
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    print(text)
