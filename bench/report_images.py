"""Format the section on training with images.

Functions take the rounds of measurements and return text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from figures import (
    GB,
    PEERS,
    Figures,
    Round,
    fastest,
    least_memory,
    measurement,
    median_cell,
    peak,
    ratio_cell,
    ratios,
    speed,
    table,
    table_line,
)
from image_material import MAX_PIXELS, PHOTOS
from settings import IMAGES_OURS, image_settings
from train_images import ROWS_PER_STEP

from burnish.parallel.precision import has_fast_bfloat16


def images(steps: Sequence[Round], starts: Sequence[Round], facts: Figures, num_photos: int) -> str:
    """Format rate and memory of training steps, and the time to the first step with many photos."""
    return "\n\n".join([_describe(facts), _steps(steps), _best(steps), _start(starts, num_photos)])


def _describe(facts: Figures) -> str:
    """Return the description of the material."""
    dtype = "bfloat16" if has_fast_bfloat16() else "float32"
    sizes = ", ".join(f"{PHOTOS.count(size)} of {size[0]}x{size[1]}" for size in dict.fromkeys(PHOTOS))
    return (
        f"A Qwen2.5-VL shape of {facts['weights'] / 1e6:.1f}M weights; {facts['rows']} rows with a JPEG each ({sizes} "
        f"in turn), resized to {MAX_PIXELS:,} pixels at most by the image processor, {ROWS_PER_STEP} rows per step; "
        f"LoRA on the language model, vision tower frozen, {dtype}, one thread for products. TRL and LLaMA-Factory use "
        "torchvision for images, burnish Pillow. Three epochs, the default of all: burnish keeps the features of the "
        "frozen tower, which runs in its first epoch only. Each runs in a separate process; the first step is not "
        "counted."
    )


def _step_s(figures: Figures) -> float:
    return float(figures["cpu_s"] / figures["steps"])


def _steps(rounds: Sequence[Round]) -> str:
    return table(
        rounds,
        {
            "processor s per step": median_cell(rounds, _step_s),
            "rate of burnish relative to it": ratio_cell(rounds, IMAGES_OURS, speed),
            "wall s per step": median_cell(rounds, lambda figures: figures["wall_s"] / figures["steps"]),
            "peak memory, GB": median_cell(rounds, peak, unit=GB),
            "memory of burnish relative to it": ratio_cell(rounds, IMAGES_OURS, peak),
            "mean loss": median_cell(rounds, "loss"),
        },
        "setting",
    )


def _best(rounds: Sequence[Round]) -> str:
    """Compare burnish with the fastest setting of each library and with the one that needs the least memory."""
    settings = image_settings(is_start=False)
    lines = [
        table_line(
            [
                "library",
                "fastest setting",
                "rate of burnish relative to it",
                "setting with the least memory",
                "memory relative to it",
            ]
        )
    ]
    lines.append("|---|---|---:|---|---:|")
    for peer, library in PEERS.items():
        best, smallest = fastest(rounds, settings, library), least_memory(rounds, settings, library)
        if best and smallest:
            compared = [ratios(rounds, IMAGES_OURS, best, speed), smallest, ratios(rounds, IMAGES_OURS, smallest, peak)]
            lines.append(table_line([peer, best, *compared]))
    return "\n".join(lines)


def _start(rounds: Sequence[Round], num_photos: int) -> str:
    ready = measurement("ready_cpu_s")
    lines = table(
        rounds,
        {
            "processor s": median_cell(rounds, ready, ".1f"),
            "wall s": median_cell(rounds, "ready_wall_s", ".1f"),
            "wall time relative to burnish": lambda name: _relative_wall_time(rounds, name),
            "peak memory, GB": median_cell(rounds, "ready_peak_bytes", unit=GB),
        },
        "until the first step",
    )
    return (
        f"From the start of the process until the first step with {num_photos:,} photos of 1280x960, nothing cached: "
        "LLaMA-Factory decodes and resizes every photo while it encodes, burnish reads headers, and TRL encodes in its "
        f"steps.\n\n{lines}"
    )


def _relative_wall_time(rounds: Sequence[Round], name: str) -> str:
    """Return the wall time to the first step relative to burnish."""
    values = [
        each[name]["ready_wall_s"] / each[IMAGES_OURS]["ready_wall_s"]
        for each in rounds
        if "ready_wall_s" in each.get(name, {}) and "ready_wall_s" in each.get(IMAGES_OURS, {})
    ]
    return f"{median(values):.1f}" if values and name != IMAGES_OURS else "-"


def planning(results: Mapping[str, Figures], count: int) -> str:
    """Format how long ``burnish explain`` takes for ``count`` records with an image each."""
    if "failed" in results:
        return str(results["failed"])
    about = (
        f"`burnish explain` of {count:,} records with a JPEG file each, a Qwen2.5-VL shape, LoRA, nothing cached: "
        "imports, records, image headers, token ids and labels of all rows. No image is decoded."
    )
    lines = [table_line(["characters per record", "wall s", "processor s", "peak memory, GB"]), "|---:|---:|---:|---:|"]
    for each in results.values():
        cells = [f"{each['characters']:.0f}", f"{each['wall_s']:.1f}", f"{each['cpu_s']:.1f}"]
        lines.append(table_line([*cells, f"{each['peak_bytes'] / GB:.2f}"]))
    return f"{about}\n\n" + "\n".join(lines)
