"""Format the section on GRPO: rate of steps and of generation compared with TRL, memory, and the share of the model's
arithmetic limit.

Functions take the rounds of measurements of each distribution of lengths and the facts of the material.
"""

from __future__ import annotations

from collections.abc import Sequence

from figures import (
    GB,
    Figures,
    Round,
    Value,
    fastest,
    figures_of,
    median_cell,
    median_of,
    peak,
    ratios,
    speed,
    successful_rounds,
    table,
)
from report_training import burnish_setting, rate_of_products
from settings import BASE, COMPLETIONS, GROUP, OURS, Setting


def generation_rate(figures: Figures) -> float:
    """Return generated tokens per processor second of generation."""
    return float(figures["generated"] / figures["generation_cpu_s"])


def operations(facts: Figures, length: float) -> tuple[float, float]:
    """Return the operations of the model's matrix products per token of a completion: for generation, and for training.

    They are 2 per weight and token in the forward pass and 4 in the backward pass (Kaplan et al. 2020, section 2.1,
    https://arxiv.org/abs/2001.08361). A prompt counts once for its completions, and without the head; products inside
    attention are not counted.

    Args:
        length: mean number of tokens of a completion.
    """
    head = facts["vocabulary"] * facts["width"]
    prompt = (facts["tokens"] - facts["labels"]) / facts["rows"] / (GROUP * length)
    forward = 2 * facts["weights"] + 2 * (facts["weights"] - head) * prompt
    return forward, 3 * forward


def share_of_limit(figures: Figures, facts: Figures, rate: float) -> tuple[float, float]:
    """Return shares of the rate of square matrix products: of the entire step, and of generation."""
    generation, training = operations(facts, figures["labels"] / figures["steps"] / COMPLETIONS)
    return (generation + training) * speed(figures) / rate, generation * generation_rate(figures) / rate


def lengths(rounds: Sequence[Round], settings: Sequence[Setting], facts: Figures) -> str:
    """Return the table of one distribution of lengths, and the comparison with the best setting of TRL."""
    rates, is_float32 = rate_of_products(settings[0].processor), burnish_setting(rounds) != OURS

    def share(index: int) -> Value:
        return lambda figures: (
            100 * share_of_limit(figures, facts, rates[not is_float32 and "float32" not in figures["name"]])[index]
        )

    for results in rounds:
        for name, figures in results.items():
            figures["name"] = name
    lines = table(
        rounds,
        {
            "step, processor s": median_cell(rounds, lambda f: f["cpu_s"] / f["steps"]),
            "generation, processor s": median_cell(rounds, lambda f: f["generation_cpu_s"] / f["steps"]),
            "tokens / completion": median_cell(rounds, lambda f: f["labels"] / f["steps"] / COMPLETIONS, ".1f"),
            "tokens / processor s of a step": median_cell(rounds, speed, ".0f"),
            "relative to TRL's default": lambda name: ratios(rounds, name, BASE, speed),
            "generated tokens / processor s": median_cell(rounds, generation_rate, ".0f"),
            "generation relative to TRL's default": lambda name: ratios(rounds, name, BASE, generation_rate),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "memory relative to it": lambda name: ratios(rounds, name, BASE, peak),
            "step, % of the limit": median_cell(rounds, share(0), ".0f"),
            "generation, % of the limit": median_cell(rounds, share(1), ".0f"),
        },
        "setting",
    )
    return f"{lines}\n\n{compare_with_best(rounds, settings)}"


def compare_with_best(rounds: Sequence[Round], settings: Sequence[Setting]) -> str:
    """Return sentences that compare burnish with TRL's default and with its fastest settings."""
    names = [
        setting.name for setting in settings if setting.library == "trl" and successful_rounds(rounds, setting.name)
    ]
    best, ours = fastest(rounds, settings, "trl"), burnish_setting(rounds)
    if not best or not successful_rounds(rounds, ours):
        return ""
    best_generation = max(names, key=lambda name: median_of(figures_of(rounds, name), generation_rate))
    return (
        f"burnish relative to TRL's default: {ratios(rounds, ours, BASE, speed)} times the rate of a step, "
        f"{ratios(rounds, ours, BASE, generation_rate)} times the rate of generation, "
        f"{ratios(rounds, ours, BASE, peak)} of the memory. Relative to the fastest setting of TRL "
        f"({best.removeprefix('TRL, ')}): {ratios(rounds, ours, best, speed)} times the rate of a step; relative to "
        f"the fastest one at generation ({best_generation.removeprefix('TRL, ')}): "
        f"{ratios(rounds, ours, best_generation, generation_rate)} "
        "times the rate of generation."
    )


def rollouts(results: Sequence[tuple[str, Sequence[Round], Figures]], settings: Sequence[Setting]) -> str:
    """Format the section. Args: results: description, rounds and facts of each distribution of lengths."""
    facts, is_float32 = results[0][2], burnish_setting(results[0][1]) != OURS
    varied = "micro-batches" if is_float32 else "dtypes and micro-batches"
    dtype = "but in float32, limited to AVX2 instructions like burnish" if is_float32 else "bf16"
    about = (
        f"GRPO of a {facts['family']} shape of {facts['weights'] / 1e6:.1f}M random weights; {COMPLETIONS} completions "
        f"per step, {GROUP} per prompt of {(facts['tokens'] - facts['labels']) / facts['rows']:.0f} tokens on average, "
        "full training, AdamW, no reference model, one thread; the reward takes no time. "
        f"TRL's GRPOTrainer runs with its defaults ({dtype}, gradient checkpointing, eight completions per "
        f"micro-batch), and with other {varied}. The limit is the arithmetic of the model, with each prompt counted "
        "once, at the speed of square matrix products in the same dtype. Completions are "
        "sampled, so their number of tokens differs between the lines if they end early; rates are per token."
    )
    parts = [f"With {name}:\n\n{lengths(rounds, settings, facts)}" for name, rounds, facts in results]
    return "\n\n".join([about, *parts])
