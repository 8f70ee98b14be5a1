"""The sections on training: rate, memory and MFU of each setting, and burnish beside the best of each peer.

In: per round, what each setting's process said, and the facts of the material. Out: text.
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
    amount,
    fastest,
    figures_of,
    leanest,
    middle,
    peak,
    ratios,
    speed,
    table,
    whole,
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
    while not best or time.process_time() - start < 1:  # an emulated product takes more than a second
        begin = time.process_time()
        x @ y
        best = max(best, 2 * 1024**3 / (time.process_time() - begin))
    return best
print(rate(torch.float32), rate(torch.bfloat16))
"""


def rate_of_products(processor: str = "") -> tuple[float, float]:
    """Floating point operations per processor second in products of 1024 by 1024: float32, bfloat16."""
    told = os.environ | LIMITS[processor]
    said = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], check=True, capture_output=True, text=True, env=told
    ).stdout
    single, half = map(float, said.split())
    return single, half


def training(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, method: str) -> str:
    """Labels per processor second, memory and MFU of each setting, and burnish beside the best of each peer."""
    ours = own(rounds)
    rate, there = rate_of_products(settings[0].processor), state_bytes(facts, method, ours)
    is_half = "float32" not in ours

    def used(name: str) -> str:
        share = middle(
            figures_of(rounds, name), lambda f: mfu(f, rate[is_half and "float32" not in name], facts, method)
        )
        return f"{100 * share:.0f} %"

    def highest(name: str) -> float:
        return max(map(peak, figures_of(rounds, name)))

    lines = table(
        rounds,
        {
            "labels / processor s": amount(rounds, speed, ".0f"),
            "relative to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "peak memory, GB": lambda name: f"{highest(name) / GB:.2f}",
            "above the minimum, GB": lambda name: f"{(highest(name) - there) / GB:.2f}",
            "MFU": used,
            "mean loss": amount(rounds, "loss"),
        },
        "setting",
    )
    beside = beside_the_best(rounds, settings, facts, method)
    return "\n".join(
        [described(facts, method), "", lines, "", *beside, about_mfu(rate, method, ours), *loop_line(rounds)]
    )


def described(facts: Figures, method: str) -> str:
    adapter = "full training" if method == "full" else _METHODS[method]
    return (
        f"A {facts['family']} shape of {facts['weights'] / 1e6:.1f}M weights ({facts['layers']} layers of "
        f"{facts['width']}, vocabulary {facts['vocabulary']:,}); {facts['rows']} rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, "
        f"{100 * facts['labels'] / facts['tokens']:.0f} % of them trained; "
        "eight rows per step, or a pack of about the same size; "
        f"{adapter}, AdamW, one thread."
    )


def beside_the_best(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures, method: str) -> list[str]:
    """burnish compared with the fastest setting of each library, and with the one that needs the least memory."""
    lines = ["| library | fastest setting | rate of burnish relative to it | setting with the least memory | "
             "memory of burnish relative to it | and above the minimum |", "|---|---|---:|---|---:|---:|"]  # fmt: skip
    ours = own(rounds)
    if not whole(rounds, ours):
        return []

    def above(figures: Figures) -> float:
        return float(figures["peak_bytes"] - state_bytes(facts, method, ours))

    for peer, library in PEERS.items():
        best, lean = fastest(rounds, settings, library), leanest(rounds, settings, library)
        if best and lean:
            lines.append(
                f"| {peer} | {best.removeprefix(f'{peer}, ')} | {ratios(rounds, ours, best, speed)} | "
                f"{lean.removeprefix(f'{peer}, ')} | {ratios(rounds, ours, lean, peak)} | "
                f"{ratios(rounds, ours, lean, above)} |"
            )
    return [*lines, ""]


def mfu(figures: Figures, rate: float, facts: Figures, method: str) -> float:
    """Operations of the model's products over the measured rate. Per weight and token 6 (Kaplan et al. 2020, section
    2.1, https://arxiv.org/abs/2001.08361), 4 where the weights are frozen and have no gradients; the head counts for
    every token, whoever leaves some out, and attention's own products count for nobody."""
    operations = (6 if method == "full" else 4) * facts["weights"]
    return operations * speed(figures) * facts["tokens"] / facts["labels"] / rate


def state_bytes(facts: Figures, method: str, ours: str) -> int:
    """Weights, gradients and AdamW's two moments in float32; of a frozen model its weights alone.

    Args:
        ours: the name of burnish's setting, which says the format of frozen weights.
    """
    frozen = 4 if ours == OURS_FLOAT32 else 2
    return int((16 if method == "full" else frozen) * facts["weights"])


def own(rounds: Sequence[Round]) -> str:
    """The name of burnish's setting in these rounds."""
    return OURS if OURS in rounds[0] else OURS_FLOAT32


def about_mfu(rate: tuple[float, float], method: str, ours: str) -> str:
    frozen = f"the frozen weights in {'float32' if ours == OURS_FLOAT32 else 'bfloat16'}"
    there = "weights, gradients and optimizer states in float32" if method == "full" else frozen
    return (
        f"The minimum is the size of {there}; the rest are activations, temporary tensors and imported libraries.\n"
        f"MFU is relative to matrix products of 1024 x 1024 on one thread: {rate[0] / 1e9:.0f} GFLOP/s in float32, "
        f"{rate[1] / 1e9:.0f} in bfloat16, measured in the same run."
    )


def loop_line(rounds: Sequence[Round]) -> list[str]:
    ours = own(rounds)
    each = [found[ours] for found in whole(rounds, ours)]
    if not each:
        return []
    loop = middle(each, lambda figures: figures["loop_share"])
    return [
        f"The loop itself, without model, loss, gradients and optimizer, takes {100 * loop:.2f} % of {ours}'s training."
    ]


def ways(rounds: Sequence[Round], facts: Figures) -> str:
    """The gain of each of burnish's own ways, laid on those above it."""
    names = list(rounds[0])
    above = dict(zip(names[1:], names, strict=False))
    lines = table(
        rounds,
        {
            "labels / processor s": amount(rounds, speed, ".0f"),
            "relative to plain": lambda name: ratios(rounds, name, PLAIN, speed),
            "relative to the line above": lambda name: (
                ratios(rounds, name, above[name], speed) if name in above else "-"
            ),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "mean loss": amount(rounds, "loss", ".4f"),
        },
        "burnish, bf16",
    )
    about = (
        f"Full training of the {facts['family']} shape on {facts['rows']} rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, eight to a step: "
        "burnish's loop without its optimizations, which are then added one at a time. The last line is the "
        "default."
    )
    return f"{about}\n\n{lines}"


def batching(rounds: Sequence[Round]) -> str:
    """The cost of each way to make micro-batches."""
    lines = table(
        rounds,
        {
            "labels / processor s": amount(rounds, speed, ".0f"),
            "relative to the first line": lambda name: ratios(rounds, name, OURS, speed),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "memory relative relative to the first line": lambda name: ratios(rounds, name, OURS, peak),
            "mean loss": amount(rounds, "loss", ".4f"),
        },
        "setting",
    )
    about = (
        "Full training on the rows of the table above. "
        "Steps have eight rows, padding-free, unless stated otherwise; a pack is as long as the maximum row. "
        "With a maximum number of tokens per micro-batch, a step has more micro-batches and is otherwise the "
        "same. Rows with a common prefix (a system prompt) are different rows with the same labels; the "
        "prefix is computed once per micro-batch."
    )
    return f"{about}\n\n{lines}"


def scripts(rounds: Sequence[Round]) -> str:
    """The gain of a script that changes its import: each line of burnish beside the one above it."""
    names = list(rounds[0])
    before = dict(zip(names[1::2], names[::2], strict=True))
    lines = table(
        rounds,
        {
            "labels / processor s": amount(rounds, speed, ".0f"),
            "relative to the line above": lambda name: (
                ratios(rounds, name, before[name], speed) if name in before else "-"
            ),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, before[name], peak) if name in before else "-",
            "mean loss": amount(rounds, "loss", ".4f"),
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
    """Pairs or records per processor second, and memory, beside TRL's default and the best of each peer."""
    best = {peer: fastest(rounds, settings, library) for peer, library in PEERS.items() if library != "transformers"}
    what, ours = PREFERENCES[stage], own(rounds)
    lines = table(
        rounds,
        {
            f"{what} / processor s": amount(rounds, speed),
            "relative to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, BASE, peak),
            "mean loss": amount(rounds, "loss", ".4f"),
        },
        "setting",
    )
    about = (
        f"{_METHODS[method]} of the {facts['family']} shape on {facts['rows']} {what} of "
        f"{facts.get('pairs') or 'conversations'}, rows of "
        f"{facts['tokens'] / facts['rows']:.0f} tokens on average, {facts['longest_row']} at most, eight to a step, "
        "AdamW, one thread. " + _ABOUT_STAGE[stage]
    )
    found = [
        f"{ours}, to the fastest of {peer}: {ratios(rounds, ours, name, speed)} times the rate, "
        f"{ratios(rounds, ours, name, peak)} of the memory."
        for peer, name in best.items()
        if name
    ]
    return "\n\n".join([about, lines, " ".join(found)])


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


def other(shapes: Sequence[tuple[Round, Figures]]) -> str:
    return "\n".join(
        [
            "Full training of the small shape in other families, and of rows of other lengths; "
            "for each library the fastest setting of the table above: "
            "packing without checkpointing (TRL, LLaMA-Factory), grouped by "
            "length in bf16 (transformers).",
            "",
            "| model | longest row | mean row | burnish, labels / processor s | to TRL | to transformers | "
            "to LLaMA-Factory | memory relative to the smallest of them | MFU | code of the model in |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
            *(other_line(found, facts) for found, facts in shapes),
        ]
    )
