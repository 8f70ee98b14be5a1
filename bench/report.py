"""Figures -> sections of docs/benchmarks.md.

In: per round, what each setting's process said. Out: text between the markers of a part; what stands outside of them is
written by hand and stays.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from settings import BASE, OURS, Setting

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
GB = 1e9
PEERS = {"TRL": "trl", "transformers": "transformers", "LLaMA-Factory": "llamafactory"}
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


def train_section(
    rounds: Sequence[Round], settings: Sequence[Setting], rate: tuple[float, float], facts: Figures, method: str,
    part: str,
) -> str:  # fmt: skip
    """Labels per processor second, memory and MFU of each setting, and burnish beside the best of each peer."""
    lines = [
        "| setting | labels / processor s | ratio to TRL's default | peak memory, GB | above what must be there, GB | "
        "MFU | mean loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        each = figures_of(rounds, name)
        if not each:
            lines.append(f"| {name} | failed | | | | | |")
            continue
        highest = max(map(peak, each))
        used = middle(each, lambda figures, name=name: mfu(figures, rate["float32" not in name], facts, method))
        losses = [figures["loss"] for figures in each if figures.get("loss") is not None]
        lines.append(
            f"| {name} | {middle(each, speed):.0f} | {ratios(rounds, name, BASE, speed)} | {highest / GB:.2f} | "
            f"{(highest - state_bytes(facts, method)) / GB:.2f} | {100 * used:.0f} % | "
            f"{f'{losses[0]:.2f}' if losses else '-'} |"
        )
    return "\n".join(
        [described(facts, method), "", *lines, "", *beside_the_best(rounds, settings, facts, method),
         about_mfu(rate, method), *loop_line(rounds), "", where(rounds, part)]
    )  # fmt: skip


def described(facts: Figures, method: str) -> str:
    adapter = "full training" if method == "full" else "LoRA of rank 8 in every linear layer but the head"
    return (
        f"A {facts['family']} shape of {facts['weights'] / 1e6:.1f}M weights ({facts['layers']} layers of "
        f"{facts['width']}, vocabulary {facts['vocabulary']:,}); {facts['rows']} rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens in the mean, {facts['longest_row']} at most, "
        f"{100 * facts['labels'] / facts['tokens']:.0f} % of them learned; eight rows to a step, or a pack "
        f"of about as many; {adapter}, AdamW, one thread."
    )


def beside_the_best(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, method: str) -> list[str]:
    """burnish beside the fastest setting of each peer, and beside its leanest."""
    lines = ["| peer | its fastest setting | burnish's rate to it | its leanest setting | burnish's memory to it | "
             "and above what must be there |", "|---|---|---:|---|---:|---:|"]  # fmt: skip
    if not whole(rounds, OURS):
        return []

    def above(figures: Figures) -> float:
        return float(figures["peak_bytes"] - state_bytes(facts, method))

    for peer, library in PEERS.items():
        best, lean = fastest(rounds, settings, library), leanest(rounds, settings, library)
        if best and lean:
            lines.append(
                f"| {peer} | {best.removeprefix(f'{peer}, ')} | {ratios(rounds, OURS, best, speed)} | "
                f"{lean.removeprefix(f'{peer}, ')} | {ratios(rounds, OURS, lean, peak)} | "
                f"{ratios(rounds, OURS, lean, above)} |"
            )
    return [*lines, ""]


def fastest(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    names = [s.name for s in settings if s.library == library and whole(rounds, s.name)]
    return max(names, key=lambda name: middle(figures_of(rounds, name), speed), default=None)


def leanest(rounds: Sequence[Round], settings: Sequence[Setting], library: str) -> str | None:
    names = [s.name for s in settings if s.library == library and whole(rounds, s.name)]
    return min(names, key=lambda name: middle(figures_of(rounds, name), peak), default=None)


def mfu(figures: Figures, rate: float, facts: Figures, method: str) -> float:
    """Operations of the model's products over the measured rate. Per weight and token 6 (Kaplan et al. 2020, section
    2.1, https://arxiv.org/abs/2001.08361), 4 where the weights are frozen and have no gradients; the head counts for
    every token, whoever leaves some out, and attention's own products count for nobody."""
    operations = (6 if method == "full" else 4) * facts["weights"]
    return operations * speed(figures) * facts["tokens"] / facts["labels"] / rate


def state_bytes(facts: Figures, method: str) -> int:
    """Weights, gradients and AdamW's two moments in float32; of a frozen model its weights in bfloat16."""
    return int((16 if method == "full" else 2) * facts["weights"])


def about_mfu(rate: tuple[float, float], method: str) -> str:
    there = "weights, gradients and optimizer in float32" if method == "full" else "the frozen weights in bfloat16"
    return (
        f"What must be there: {there}; above it stand activations, temporaries and what was imported.\n"
        f"MFU is against products of 1024 x 1024 on one thread: {rate[0] / 1e9:.0f} GFLOP/s in float32, "
        f"{rate[1] / 1e9:.0f} in bfloat16, measured in the same run."
    )


def loop_line(rounds: Sequence[Round]) -> list[str]:
    each = [found[OURS] for found in whole(rounds, OURS)]
    if not each:
        return []
    loop = middle(each, lambda figures: figures["loop_share"])
    return [
        f"The loop itself, outside of model, loss, gradients and optimizer, takes {100 * loop:.2f} % of {OURS}'s "
        "training."
    ]


def start_section(rounds: Sequence[Round], help_s: float) -> str:
    """From the command to the first step."""

    def ready(figures: Figures) -> float:
        return float(figures["ready_cpu_s"])

    lines = ["| setting | processor s | burnish's to it | wall s | memory then, GB |", "|---|---:|---:|---:|---:|"]
    for name in rounds[0]:
        each = figures_of(rounds, name)
        lines.append(
            f"| {name} | {middle(each, ready):.1f} | {ratios(rounds, OURS, name, ready)} | "
            f"{median_of(each, 'ready_wall_s'):.1f} | {median_of(each, 'ready_bytes') / GB:.2f} |"
            if each
            else f"| {name} | failed | | | |"
        )
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

    def wait_cpu(figures: Figures) -> float:
        return statistics.median(figures["save_waits_cpu_s"])

    lines = ["| | wall s | processor s of the thread that trains |", "|---|---:|---:|"]
    for name in rounds[0]:
        each = figures_of(rounds, name)
        lines.append(
            f"| {name} | {middle(each, wait):.2f} | {middle(each, wait_cpu):.2f} |"
            if each
            else f"| {name} | failed | |"
        )
    shares = (ratios(rounds, "burnish", "transformers", figure) for figure in (wait, wait_cpu))
    return "\n".join(
        [
            "Time between the end of a step and `on_save`, for a checkpoint with weights, optimizer, schedule and "
            "random numbers every four steps, and what the next update then waits for its copies; the median of a run. "
            "burnish writes while it trains on, and waits for the last one at the end of the run.",
            "",
            *lines,
            f"| burnish to transformers | {' | '.join(shares)} |",
            "",
            where(rounds, "checkpoint"),
        ]
    )


def evaluation_section(rounds: Sequence[Round]) -> str:
    """Whether an evaluation needs more memory than the training before it, and how fast it is."""

    def rate(figures: Figures) -> float:
        return float(1 / figures["evaluation_cpu_s"])

    def highest(figures: Figures) -> float:
        return float(figures["evaluation_peak_bytes"])

    lines = [
        "| | peak of the training, GB | peak of the evaluation, GB | burnish's peak to it | processor s | "
        "burnish's rate to it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        each = figures_of(rounds, name)
        beside = (
            ["-", "-"] if name.startswith("burnish") else [ratios(rounds, OURS, name, of) for of in (highest, rate)]
        )
        lines.append(
            f"| {name} | {middle(each, peak) / GB:.2f} | {middle(each, highest) / GB:.2f} | {beside[0]} | "
            f"{median_of(each, 'evaluation_cpu_s'):.1f} | {beside[1]} |"
            if each
            else f"| {name} | failed | | | | |"
        )
    return "\n".join(
        [
            "Two steps of eight rows, then an evaluation of all rows, eight at a time: the mean loss. The peak of the "
            "evaluation begins at what the training has left resident.",
            "", *lines, "", where(rounds, "evaluation"),
        ]
    )  # fmt: skip


def other_line(found: Round, facts: Figures) -> str:
    """One shape: burnish beside the setting of each peer that is fast on the usual one."""
    lines = [f"| {facts['family']} | {facts['longest']:,} | {facts['tokens'] / facts['rows']:.0f} | "]
    if not whole([found], OURS):
        return f"{lines[0]}failed | | | | | | |"
    peers = [name for name in found if name != OURS and whole([found], name)]
    measured = {peer: next((name for name in found if name.startswith(peer)), None) for peer in PEERS}
    rates = [
        "failed" if name and name not in peers else ratios([found], OURS, name, speed) if name else "-"
        for name in measured.values()
    ]
    lean = min(peers, key=lambda name: peak(found[name]), default=None)
    memory = ratios([found], OURS, lean, peak) if lean else "-"
    used = mfu(found[OURS], rate_of_products()[1], facts, "full")
    plain = ", ".join(found[OURS]["plain"]) or "-"
    return f"{lines[0]}{speed(found[OURS]):.0f} | {' | '.join(rates)} | {memory} | {100 * used:.0f} % | {plain} |"


def other_section(shapes: Sequence[tuple[Round, Figures]]) -> str:
    return "\n".join(
        [
            "Full training of the small shape in other families, and of rows of other lengths; of each peer the one "
            "setting that is fast on the usual shape: packing without checkpointing (TRL, LLaMA-Factory), grouped by "
            "length in bf16 (transformers).",
            "",
            "| model | longest row | mean row | burnish, labels / processor s | to TRL | to transformers | "
            "to LLaMA-Factory | memory to the leanest of them | MFU | the model's own code in |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
            *(other_line(found, facts) for found, facts in shapes),
            "",
            where([found for found, _ in shapes], "other", count=1),
        ]
    )


def encoding_section(rounds: Sequence[Round]) -> str:
    def rate(figures: Figures) -> float:
        return float(figures["rows_per_cpu_s"])

    lines = ["| | conversations / processor s | burnish's rate to it | peak memory, GB |", "|---|---:|---:|---:|"]
    for name in rounds[0]:
        each = figures_of(rounds, name)
        lines.append(
            f"| {name} | {middle(each, rate):.0f} | {ratios(rounds, 'burnish', name, rate)} | "
            f"{median_of(each, 'peak_bytes') / GB:.2f} |"
            if each
            else f"| {name} | failed | | |"
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


def peak(figures: Figures) -> float:
    return float(figures["peak_bytes"])


def figures_of(rounds: Sequence[Round], name: str) -> list[Figures]:
    return [found[name] for found in whole(rounds, name)]


def whole(rounds: Sequence[Round], *names: str) -> list[Round]:
    """The rounds in which none of these failed."""
    return [found for found in rounds if all("failed" not in found.get(name, {"failed": ""}) for name in names)]


def ratios(rounds: Sequence[Round], name: str, other: str, value: Callable[[Figures], float]) -> str:
    """The median of one to the other, round by round, with the least and the greatest."""
    found = [value(each[name]) / value(each[other]) for each in whole(rounds, name, other)]
    if not found:
        return "-"
    spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}{spread}"


def where(rounds: Sequence[Round], part: str, count: int | None = None) -> str:
    """The date, the machine, the versions and the command."""
    count = count or len(rounds)
    versions: dict[str, set[str]] = {}
    for figures in (figures for found in rounds for figures in found.values()):
        for library, number in figures.get("versions", {}).items():
            versions.setdefault(library, set()).add(number)
    named = ", ".join(f"{library} {' and '.join(sorted(numbers))}" for library, numbers in sorted(versions.items()))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor()}; {count} round{'s' * (count > 1)}; {named}. "
        f'Again with: `make bench WHAT="{" ".join(sys.argv[1:]) or part}"`.'
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
