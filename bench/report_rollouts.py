"""The section on learning from rewards: steps and the drawing of completions beside TRL's, memory, and the limit that
the arithmetic of the model sets.

In: for even and for uneven lengths, per round, what each setting's process said, and the facts of the material. Out:
text.
"""

from __future__ import annotations

from collections.abc import Sequence

from figures import (
    GB,
    Figures,
    Round,
    Value,
    amount,
    fastest,
    figures_of,
    middle,
    peak,
    ratios,
    speed,
    table,
    whole,
)
from report_training import rate_of_products
from settings import BASE, COMPLETIONS, GROUP, OURS, Setting


def drawn(figures: Figures) -> float:
    """Tokens of completions that are drawn, per processor second of drawing."""
    return float(figures["drawn"] / figures["drawing_cpu_s"])


def operations(facts: Figures, length: float) -> tuple[float, float]:
    """Operations of the model's products per token of a completion: of drawing it, and of the step besides.

    Two per weight and token forward and four backward (Kaplan et al. 2020, section 2.1,
    https://arxiv.org/abs/2001.08361). A prompt counts once for its completions, and without the head; attention's own
    products count for nobody.

    Args:
        length: tokens of a completion on average.
    """
    head = facts["vocabulary"] * facts["width"]
    prompt = (facts["tokens"] - facts["labels"]) / facts["rows"] / (GROUP * length)
    forward = 2 * facts["weights"] + 2 * (facts["weights"] - head) * prompt
    return forward, 3 * forward


def of_limit(figures: Figures, facts: Figures, rate: float) -> tuple[float, float]:
    """Shares of the rate that products of square matrices reach: of the whole step, and of drawing alone."""
    drawing, training = operations(facts, figures["labels"] / figures["steps"] / COMPLETIONS)
    return (drawing + training) * speed(figures) / rate, drawing * drawn(figures) / rate


def lengths(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures) -> str:
    """The table of one distribution of lengths, and burnish beside the best of TRL."""
    rates = rate_of_products()

    def share(which: int) -> Value:
        return lambda figures: 100 * of_limit(figures, facts, rates["float32" not in figures["name"]])[which]

    for found in rounds:
        for name, figures in found.items():
            figures["name"] = name
    lines = table(
        rounds,
        {
            "step, processor s": amount(rounds, lambda f: f["cpu_s"] / f["steps"]),
            "generation, processor s": amount(rounds, lambda f: f["drawing_cpu_s"] / f["steps"]),
            "tokens / completion": amount(rounds, lambda f: f["labels"] / f["steps"] / COMPLETIONS, ".1f"),
            "tokens / processor s of a step": amount(rounds, speed, ".0f"),
            "to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "generated tokens / processor s": amount(rounds, drawn, ".0f"),
            "generation relative to TRL's default": lambda name: ratios(rounds, name, BASE, drawn),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, BASE, peak),
            "step, % of the limit": amount(rounds, share(0), ".0f"),
            "generation, % of the limit": amount(rounds, share(1), ".0f"),
        },
        "setting",
    )
    return f"{lines}\n\n{beside_the_best(rounds, settings)}"


def beside_the_best(rounds: Sequence[Round], settings: Sequence[Setting]) -> str:
    names = [setting.name for setting in settings if setting.library == "trl" and whole(rounds, setting.name)]
    best = fastest(rounds, settings, "trl")
    if not best or not whole(rounds, OURS):
        return ""
    draws = max(names, key=lambda name: middle(figures_of(rounds, name), drawn))
    return (
        f"burnish to TRL's default: {ratios(rounds, OURS, BASE, speed)} times the rate of a step, "
        f"{ratios(rounds, OURS, BASE, drawn)} times that of drawing, {ratios(rounds, OURS, BASE, peak)} of the memory. "
        f"To the fastest of TRL ({best.removeprefix('TRL, ')}): {ratios(rounds, OURS, best, speed)} times the rate of "
        f"a step; to the fastest at generation ({draws.removeprefix('TRL, ')}): {ratios(rounds, OURS, draws, drawn)} "
        "times that of generation."
    )


def rollouts(found: Sequence[tuple[str, Sequence[Round], Figures]], settings: Sequence[Setting]) -> str:
    """Args: found: a name of the lengths, rounds and facts, for each of them."""
    facts = found[0][2]
    about = (
        f"GRPO of a {facts['family']} shape of {facts['weights'] / 1e6:.1f}M random weights; {COMPLETIONS} completions "
        f"a step, {GROUP} to a prompt of {(facts['tokens'] - facts['labels']) / facts['rows']:.0f} tokens on average, "
        "full training, AdamW, no reference model, one thread; a reward that takes no time. "
        "TRL's GRPOTrainer runs with its defaults (bf16, gradient checkpointing, eight completions per "
        "micro-batch), and with other dtypes and micro-batches. The limit is the arithmetic of the model, with each "
        "prompt counted once, at the speed of square matrix products in the same dtype. Completions are "
        "sampled, so their number of tokens differs between the lines if they end early; rates are per token."
    )
    parts = [f"With {name}:\n\n{lengths(rounds, settings, facts)}" for name, rounds, facts in found]
    return "\n\n".join([about, *parts])
