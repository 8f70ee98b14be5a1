"""The section on training with images.

In: per round, what each setting's process said. Out: text.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from figures import GB, PEERS, Figures, Round, amount, beside, fastest, leanest, line, named, peak, ratios, speed, table
from image_material import MOST_PIXELS, PHOTOS
from settings import IMAGES_OURS, of_images
from train_images import ROWS_PER_STEP


def images(steps: Sequence[Round], starts: Sequence[Round], facts: Figures, num_photos: int) -> str:
    """Rate and memory of the steps, and the time until the first step of many photos."""
    return "\n\n".join([_described(facts), _steps(steps), _best(steps), _start(starts, num_photos)])


def _described(facts: Figures) -> str:
    sizes = ", ".join(f"{PHOTOS.count(size)} of {size[0]}x{size[1]}" for size in dict.fromkeys(PHOTOS))
    return (
        f"A Qwen2.5-VL shape of {facts['weights'] / 1e6:.1f}M weights; {facts['rows']} rows with a JPEG each ({sizes} "
        f"in turn), resized to {MOST_PIXELS:,} pixels at most by the image processor, {ROWS_PER_STEP} rows to a step; "
        "LoRA on the language model, vision tower frozen, bfloat16, one thread for products. TRL and LLaMA-Factory use "
        "torchvision for images, burnish Pillow. Each runs in a separate process; the first step is not counted."
    )


def _step_s(figures: Figures) -> float:
    return float(figures["cpu_s"] / figures["steps"])


def _steps(rounds: Sequence[Round]) -> str:
    return table(
        rounds,
        {
            "processor s a step": amount(rounds, _step_s),
            "rate of burnish relative to it": beside(rounds, IMAGES_OURS, speed),
            "wall s a step": amount(rounds, lambda figures: figures["wall_s"] / figures["steps"]),
            "peak memory, GB": amount(rounds, peak, unit=GB),
            "memory of burnish relative to it": beside(rounds, IMAGES_OURS, peak),
            "mean loss": amount(rounds, "loss"),
        },
        "setting",
    )


def _best(rounds: Sequence[Round]) -> str:
    """burnish beside the fastest setting of each peer, and beside its leanest."""
    settings = of_images(is_start=False)
    lines = [
        line(
            [
                "peer",
                "fastest setting",
                "rate of burnish relative to it",
                "setting with the least memory",
                "memory relative to it",
            ]
        )
    ]
    lines.append("|---|---|---:|---|---:|")
    for peer, library in PEERS.items():
        best, lean = fastest(rounds, settings, library), leanest(rounds, settings, library)
        if best and lean:
            compared = [ratios(rounds, IMAGES_OURS, best, speed), lean, ratios(rounds, IMAGES_OURS, lean, peak)]
            lines.append(line([peer, best, *compared]))
    return "\n".join(lines)


def _start(rounds: Sequence[Round], num_photos: int) -> str:
    ready = named("ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": amount(rounds, ready, ".1f"),
            "wall s": amount(rounds, "ready_wall_s", ".1f"),
            "wall time relative to burnish": lambda name: _times(rounds, name),
            "peak memory, GB": amount(rounds, "ready_peak_bytes", unit=GB),
        },
        "until the first step",
    )
    return (
        f"From the start of the process until the first step with {num_photos:,} photos of 1280x960, nothing cached: "
        "LLaMA-Factory decodes and resizes every photo while it encodes, burnish reads headers, and TRL encodes in its "
        f"steps.\n\n{lines}"
    )


def _times(rounds: Sequence[Round], name: str) -> str:
    found = [
        each[name]["ready_wall_s"] / each[IMAGES_OURS]["ready_wall_s"]
        for each in rounds
        if "ready_wall_s" in each.get(name, {}) and "ready_wall_s" in each.get(IMAGES_OURS, {})
    ]
    return f"{median(found):.1f}" if found and name != IMAGES_OURS else "-"
