"""One training by TRL or by transformers' Trainer, measured. Runs in their environment.

    python bench/train_peer.py trl|transformers MATERIAL OUTPUT [name=value ...]

In: the folder that ``material.py`` made; arguments of SFTConfig or TrainingArguments, as Python values. Out: the line
of ``gauge.py``.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from gauge import Gauge, as_callback, common


def arguments(words: list[str]) -> dict[str, Any]:
    return {name: ast.literal_eval(value) for name, value in (word.split("=", 1) for word in words)}


def trl(material: Path, given: dict[str, Any]) -> tuple[Any, Gauge]:
    """SFTTrainer over rows that are encoded already; it wants the learned tokens as a mask."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gauge = Gauge()
    rows = json.loads((material / "rows.json").read_text())
    encoded = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in rows
    ]
    trainer = SFTTrainer(
        str(material / "model"), args=SFTConfig(max_length=1024, **given), train_dataset=Dataset.from_list(encoded),
        callbacks=[as_callback(gauge, TrainerCallback)],
    )  # fmt: skip
    return trainer, gauge


def transformers(material: Path, given: dict[str, Any]) -> tuple[Any, Gauge]:
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    gauge = Gauge()
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(material / "model"),
        args=TrainingArguments(**given),
        train_dataset=Dataset.from_list(json.loads((material / "rows.json").read_text())),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[as_callback(gauge, TrainerCallback)],
    )
    return trainer, gauge


if __name__ == "__main__":
    library, material, output, *words = sys.argv[1:]
    trainer, gauge = {"trl": trl, "transformers": transformers}[library](
        Path(material), {**common(output), **arguments(words)}
    )
    result = trainer.train()
    gauge.report(loss=result.training_loss)
