"""Format the sections on training: rate, memory and MFU of each setting, and burnish compared with the best of each
library.

Each function takes the rounds of measurements and the facts of the material, and returns text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from figures import (
    GB,
    PEERS,
    Figures,
    Round,
    fastest,
    figures_of,
    least_memory,
    median_cell,
    median_of,
    peak,
    ratios,
    speed,
    successful_rounds,
    table,
)
from gauge import PREFERENCES
from measuring import LIMITS
from settings import BASE, OURS, OURS_FLOAT32, PLAIN, Setting

_PRODUCTS = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
def rate(dtype):
    x, y = a.to(dtype), b.to(dtype)
    best, start = 0, time.process_time()
    while not best or time.process_time() - start < 1:  # an emulated product may take more than a second
        begin = time.process_time()
        x @ y
        best = max(best, 2 * 1024**3 / (time.process_time() - begin))
    return best
print(rate(torch.float32), rate(torch.bfloat16))
"""


def rate_of_products(processor: str = "") -> tuple[float, float]:
    """Return floating point operations per processor second in products of 1024 x 1024 matrices: float32, bfloat16."""
    variables = os.environ | LIMITS[processor]
    output = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], check=True, capture_output=True, text=True, env=variables
    ).stdout
    single, half = map(float, output.split())
    return single, half


def training(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, method: str) -> str:
    """Format labels per processor second, memory and MFU of each setting, and burnish compared with the best of each
    library."""
    ours = burnish_setting(rounds)
    rate, minimum = rate_of_products(settings[0].processor), state_bytes(facts, method, ours)
    is_half = "float32" not in ours

    def utilization(name: str) -> str:
        share = median_of(
            figures_of(rounds, name), lambda f: mfu(f, rate[is_half and "float32" not in name], facts, method)
        )
        return f"{100 * share:.0f} %"

    def highest_peak(name: str) -> float:
        return max(map(peak, figures_of(rounds, name)))

    lines = table(
        rounds,
        {
            "labels / processor s": median_cell(rounds, speed, ".0f"),
            "relative to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "peak memory, GB": lambda name: f"{highest_peak(name) / GB:.2f}",
            "above the minimum, GB": lambda name: f"{(highest_peak(name) - minimum) / GB:.2f}",
            "MFU": utilization,
            "mean loss": median_cell(rounds, "loss"),
        },
        "setting",
    )
    comparison = compare_with_best(rounds, settings, facts, method)
    return "\n".join(
        [describe(facts, method), "", lines, "", *comparison, explain_mfu(rate, method, ours), *loop_line(rounds)]
    )


def describe(facts: Figures, method: str) -> str:
    """Return the description of model, rows and method."""
    adapter = "full training" if method == "full" else _METHODS[method]
    return (
        f"A {facts['family']} shape of {facts['weights'] / 1e6:.1f}M weights ({facts['layers']} layers of "
        f"{facts['width']}, vocabulary {facts['vocabulary']:,}); {facts['rows']} rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, "
        f"{100 * facts['labels'] / facts['tokens']:.0f} % of them trained; "
        "eight rows per step, or a pack of about the same size; "
        f"{adapter}, AdamW, one thread."
    )


def compare_with_best(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, method: str) -> list[str]:
    """Return a table that compares burnish with the fastest setting of each library, and with the one that needs the
    least memory."""
    lines = ["| library | fastest setting | rate of burnish relative to it | setting with the least memory | "
             "memory of burnish relative to it | and above the minimum |", "|---|---|---:|---|---:|---:|"]  # fmt: skip
    ours = burnish_setting(rounds)
    if not successful_rounds(rounds, ours):
        return []

    def above(figures: Figures) -> float:
        return float(figures["peak_bytes"] - state_bytes(facts, method, ours))

    for peer, library in PEERS.items():
        best, smallest = fastest(rounds, settings, library), least_memory(rounds, settings, library)
        if best and smallest:
            lines.append(
                f"| {peer} | {best.removeprefix(f'{peer}, ')} | {ratios(rounds, ours, best, speed)} | "
                f"{smallest.removeprefix(f'{peer}, ')} | {ratios(rounds, ours, smallest, peak)} | "
                f"{ratios(rounds, ours, smallest, above)} |"
            )
    return [*lines, ""]


def mfu(figures: Figures, rate: float, facts: Figures, method: str) -> float:
    """Return the model FLOPs utilization: operations of the model's matrix products divided by the measured rate. They
    are 6 per weight and token (Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361), or 4 for frozen
    weights, which have no gradients. The head counts for every token, even if a library skips some; products inside
    attention are not counted."""
    operations = (6 if method == "full" else 4) * facts["weights"]
    return float(operations * speed(figures) * facts["tokens"] / facts["labels"] / rate)


def state_bytes(facts: Figures, method: str, ours: str) -> int:
    """Return the size of weights, gradients and AdamW's two moments in float32; with frozen weights, that of the
    weights.

    Args:
        ours: name of burnish's setting, which determines the dtype of frozen weights.
    """
    frozen = 4 if ours == OURS_FLOAT32 else 2
    return int((16 if method == "full" else frozen) * facts["weights"])


def burnish_setting(rounds: Sequence[Round]) -> str:
    """Return the name of burnish's setting in these rounds."""
    return OURS if OURS in rounds[0] else OURS_FLOAT32


def explain_mfu(rate: tuple[float, float], method: str, ours: str) -> str:
    """Return the explanation of the minimum memory and of MFU."""
    frozen = f"the frozen weights in {'float32' if ours == OURS_FLOAT32 else 'bfloat16'}"
    kept = "weights, gradients and optimizer states in float32" if method == "full" else frozen
    return (
        f"The minimum is the size of {kept}; the rest are activations, temporary tensors and imported libraries.\n"
        f"MFU is relative to matrix products of 1024 x 1024 on one thread: {rate[0] / 1e9:.0f} GFLOP/s in float32, "
        f"{rate[1] / 1e9:.0f} in bfloat16, measured in the same run."
    )


def loop_line(rounds: Sequence[Round]) -> list[str]:
    """Return a line on the time of the training loop itself."""
    ours = burnish_setting(rounds)
    each = [results[ours] for results in successful_rounds(rounds, ours)]
    if not each:
        return []
    loop = median_of(each, lambda figures: figures["loop_share"])
    return [
        f"The loop itself, without model, loss, gradients and optimizer, takes {100 * loop:.2f} % of {ours}'s training."
    ]


def optimizations(rounds: Sequence[Round], facts: Figures) -> str:
    """Format the gain of each of burnish's optimizations, added one after the other."""
    names = list(rounds[0])
    above = dict(zip(names[1:], names, strict=False))
    lines = table(
        rounds,
        {
            "labels / processor s": median_cell(rounds, speed, ".0f"),
            "relative to plain": lambda name: ratios(rounds, name, PLAIN, speed),
            "relative to the line above": lambda name: (
                ratios(rounds, name, above[name], speed) if name in above else "-"
            ),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "mean loss": median_cell(rounds, "loss", ".4f"),
        },
        "burnish, bf16",
    )
    about = (
        f"Full training of the {facts['family']} shape on {facts['rows']} rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, eight per step: "
        "burnish's loop without its optimizations, which are then added one at a time. The last line is the "
        "default."
    )
    return f"{about}\n\n{lines}"


def batching(rounds: Sequence[Round]) -> str:
    """Format the cost of each way to form micro-batches."""
    lines = table(
        rounds,
        {
            "labels / processor s": median_cell(rounds, speed, ".0f"),
            "relative to the first line": lambda name: ratios(rounds, name, OURS, speed),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "memory relative to the first line": lambda name: ratios(rounds, name, OURS, peak),
            "mean loss": median_cell(rounds, "loss", ".4f"),
        },
        "setting",
    )
    about = (
        "Full training on the rows of the table above. "
        "Steps have eight rows, padding-free, unless stated otherwise; a pack is as long as the longest row. "
        "With a maximum number of tokens per micro-batch, a step has more micro-batches and is otherwise the "
        "same. Rows with a common prefix (a system prompt) are different rows with the same labels; the "
        "prefix is computed once per micro-batch."
    )
    return f"{about}\n\n{lines}"


def scripts(rounds: Sequence[Round]) -> str:
    """Format the gain of a script that changes its import: each line of burnish compared with the line above."""
    names = list(rounds[0])
    before = dict(zip(names[1::2], names[::2], strict=True))
    lines = table(
        rounds,
        {
            "labels / processor s": median_cell(rounds, speed, ".0f"),
            "relative to the line above": lambda name: (
                ratios(rounds, name, before[name], speed) if name in before else "-"
            ),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, before[name], peak) if name in before else "-",
            "mean loss": median_cell(rounds, "loss", ".4f"),
        },
        "script",
    )
    about = (
        "Full training of the qwen2 shape by two typical scripts, eight padded rows per step: TRL's "
        "SFTTrainer with its defaults, and transformers' Trainer in bfloat16; and by the same scripts with one import "
        "changed."
    )
    return f"{about}\n\n{lines}"


_METHODS = {"full": "Full training", "lora": "LoRA of rank 8 in every linear layer but the head"}
_ABOUT_STAGE = {
    "dpo": "The reference is the initial model.",
    "kto": "The reference is the initial model.",
    "rm": "Heads are random, so losses differ. LLaMA-Factory trains this model but cannot save it, because its head is "
    "tied.",
}


def preferences(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, stage: str, method: str) -> str:
    """Format pairs or examples per processor second and memory, compared with TRL's default and the best of each
    library."""
    best = {peer: fastest(rounds, settings, library) for peer, library in PEERS.items() if library != "transformers"}
    unit, ours = PREFERENCES[stage], burnish_setting(rounds)
    lines = table(
        rounds,
        {
            f"{unit} / processor s": median_cell(rounds, speed),
            "relative to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, BASE, peak),
            "mean loss": median_cell(rounds, "loss", ".4f"),
        },
        "setting",
    )
    about = (
        f"{_METHODS[method]} of the {facts['family']} shape on {facts['rows']} {unit} of "
        f"{facts.get('pairs') or 'conversations'}, rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, eight per step, "
        "AdamW, one thread. " + _ABOUT_STAGE[stage]
    )
    sentences = [
        f"{ours}, relative to the fastest setting of {peer}: {ratios(rounds, ours, name, speed)} times the rate, "
        f"{ratios(rounds, ours, name, peak)} of the memory."
        for peer, name in best.items()
        if name
    ]
    return "\n\n".join([about, lines, " ".join(sentences)])


def shape_line(results: Round, facts: Figures) -> str:
    """Return the line of one shape: burnish compared with the setting of each library that is fast on the default
    shape."""
    lines = [f"| {facts['family']} | {facts['longest']:,} | {facts['tokens'] / facts['rows']:.0f} | "]
    if not successful_rounds([results], OURS):
        return f"{lines[0]}failed | | | | | | |"
    peers = [name for name in results if name != OURS and successful_rounds([results], name)]
    measured = {peer: next((name for name in results if name.startswith(peer)), None) for peer in PEERS}
    rates = [
        "failed" if name and name not in peers else ratios([results], OURS, name, speed) if name else "-"
        for name in measured.values()
    ]
    smallest = min(peers, key=lambda name: peak(results[name]), default=None)
    memory = ratios([results], OURS, smallest, peak) if smallest else "-"
    utilization = mfu(results[OURS], rate_of_products()[1], facts, "full")
    plain = ", ".join(results[OURS]["plain"]) or "-"
    return (
        f"{lines[0]}{speed(results[OURS]):.0f} | {' | '.join(rates)} | {memory} | {100 * utilization:.0f} % | {plain} |"
    )


def other_shapes(shapes: Sequence[tuple[Round, Figures]]) -> str:
    """Format the training of other families and row lengths."""
    return "\n".join(
        [
            "Full training of the small shape in other families, and of rows of other lengths; "
            "for each library the fastest setting of the table above: "
            "packing without checkpointing (TRL, LLaMA-Factory), grouped by "
            "length in bf16 (transformers).",
            "",
            "| model | longest row | mean row | burnish, labels / processor s | relative to TRL | relative to "
            "transformers | relative to LLaMA-Factory | memory relative to the smallest of them | MFU | "
            "not optimized |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
            *(shape_line(results, facts) for results, facts in shapes),
        ]
    )
