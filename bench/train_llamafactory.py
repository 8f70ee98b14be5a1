"""One training by LLaMA-Factory, measured. Runs in its environment.

    python bench/train_llamafactory.py MATERIAL OUTPUT [name=value ...]

In: the folder that ``material.py`` made; keys of LLaMA-Factory's YAML, as Python values. Out: the line of ``gauge.py``.
It reads the records as it always does and encodes them with its template ``chatml``, whose tokens are those of
``rows.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import without_media  # noqa: F401 - first, because LLaMA-Factory imports torchaudio where it needs none
from gauge import Gauge, as_callback, common, rows_counted
from llamafactory.train.tuner import run_exp
from material import facts_of, preference_sets
from train_peer import arguments
from transformers import TrainerCallback


def run(material: Path, output: str, given: dict[str, Any]) -> None:
    gauge = Gauge(rows_counted(given.get("stage", "sft")))
    preference_sets(material)
    config = {
        "model_name_or_path": str(material / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "rows", "dataset_dir": str(material), "template": "chatml",
        "cutoff_len": facts_of(material)["longest"], "overwrite_cache": True, "plot_loss": False, **common(output),
        **given,
    }  # fmt: skip
    try:
        run_exp(config, [as_callback(gauge, TrainerCallback)])
    except RuntimeError:
        if "peak_bytes" not in gauge.more:  # else it has trained, and cannot save a reward model with a tied head
            raise
    gauge.report()


def main(words: list[str]) -> None:
    run(Path(words[0]), words[1], arguments(words[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
