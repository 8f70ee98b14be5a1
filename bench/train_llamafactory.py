"""Measure one training with LLaMA-Factory. Runs in its environment.

    python bench/train_llamafactory.py MATERIAL OUTPUT [name=value ...]

Takes the folder of ``material.py`` and keys of LLaMA-Factory's YAML with Python values. Prints the line of
``gauge.py``. Records are read and encoded by LLaMA-Factory with its template ``chatml``, which produces the tokens of
``rows.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import without_torchaudio  # noqa: F401 - first, because LLaMA-Factory imports torchaudio without need
from gauge import Gauge, as_callback, common_arguments, counted_rows_per_step
from llamafactory.train.tuner import run_exp
from material import make_preference_datasets, read_facts
from train_peer import parse_options
from transformers import TrainerCallback


def run(material: Path, output: str, overrides: dict[str, Any]) -> None:
    """Train and print the measurements."""
    gauge = Gauge(counted_rows_per_step(overrides.get("stage", "sft")))
    make_preference_datasets(material)
    config = {
        "model_name_or_path": str(material / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "rows", "dataset_dir": str(material), "template": "chatml",
        "cutoff_len": read_facts(material)["longest"], "overwrite_cache": True, "plot_loss": False,
        **common_arguments(output),
        **overrides,
    }  # fmt: skip
    try:
        run_exp(config, [as_callback(gauge, TrainerCallback)])
    except RuntimeError:
        if (
            "peak_bytes" not in gauge.more
        ):  # otherwise only saving failed: it cannot save a reward model with a tied head
            raise
    gauge.report()


def main(argv: list[str]) -> None:
    run(Path(argv[0]), argv[1], parse_options(argv[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
