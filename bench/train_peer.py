"""Measure one training with TRL or with transformers' Trainer. Runs in their environment.

    python bench/train_peer.py trl|transformers MATERIAL OUTPUT [name=value ...]

Takes the folder of ``material.py`` and arguments of SFTConfig or TrainingArguments with Python values. Additional
arguments: ``finetuning_type='lora'`` trains a LoRA adapter of ``peft``; ``dtype='bfloat16'`` is the dtype of the
weights; ``made_by='burnish'`` imports the classes from burnish, as a script that changes only its import;
``do_eval=True`` evaluates the rows after training; ``do_predict=True`` generates responses to their prompts. Prints the
line of ``gauge.py``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gauge import GENERATION_OPTIONS, PREFERENCES, Gauge, as_callback, common_arguments, counted_rows_per_step
from grpo import GRPO_STAGES, make_trl_trainer
from material import make_preference_datasets, read_facts


def parse_options(items: list[str]) -> dict[str, Any]:
    """Parse ``name=value`` options with Python values."""
    return {name: ast.literal_eval(value) for name, value in (item.split("=", 1) for item in items)}


def lora(stage: str) -> Any:
    """Return the LoRA configuration."""
    from peft import LoraConfig

    task = "SEQ_CLS" if stage == "rm" else "CAUSAL_LM"
    return LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type=task)


def load(material: Path, dtype: str, stage: str) -> Any:
    """Load the model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if stage == "rm":
        return AutoModelForSequenceClassification.from_pretrained(material / "model", dtype=dtype, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(material / "model", dtype=dtype)


def trl(material: Path, model: Any, adapter: Any, overrides: dict[str, Any]) -> tuple[Any, Gauge]:
    """Return an SFTTrainer for tokenized rows, with the trained tokens as a mask."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gauge, made_by = Gauge(), import_module(overrides.pop("made_by", "trl"))
    counts_labels = made_by.__name__ != "burnish"
    rows = json.loads((material / "rows.json").read_text())
    encoded = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in rows
    ]
    trainer = made_by.SFTTrainer(
        model, args=made_by.SFTConfig(
            # completion_only_loss is not the default for tokenized rows.
            **{"max_length": read_facts(material)["longest"], "completion_only_loss": True, **overrides}
        ),
        train_dataset=Dataset.from_list(encoded), processing_class=AutoTokenizer.from_pretrained(material / "model"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, counts_labels)],
    )  # fmt: skip
    return trainer, gauge


def preferences(stage: str, material: Path, model: Any, adapter: Any, overrides: dict[str, Any]) -> tuple[Any, Gauge]:
    """Return a DPOTrainer, KTOTrainer or RewardTrainer for conversations."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gauge, made_by = Gauge(counted_rows_per_step(stage)), import_module(overrides.pop("made_by", "trl"))
    kind = {"dpo": "DPO", "kto": "KTO", "rm": "Reward"}[stage]
    records = make_preference_datasets(material)[PREFERENCES[stage]]

    def messages(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    rows = [
        {"prompt": messages("user", record["instruction"]),
         **({"completion": messages("assistant", record["output"]), "label": record["kto_tag"]} if stage == "kto" else
            {name: messages("assistant", record[name]) for name in ("chosen", "rejected")})}
        for record in records
    ]  # fmt: skip
    trainer = getattr(made_by, f"{kind}Trainer")(
        model=model,
        args=getattr(made_by, f"{kind}Config")(**{"max_length": read_facts(material)["longest"], **overrides}),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(material / "model"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, counts_labels=False)],
    )  # fmt: skip
    return trainer, gauge


def transformers(material: Path, model: Any, adapter: Any, overrides: dict[str, Any]) -> tuple[Any, Gauge]:
    """Return a Trainer for tokenized rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback

    gauge, made_by = Gauge(), import_module(overrides.pop("made_by", "transformers"))
    counts_labels = made_by.__name__ != "burnish"
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    trainer = made_by.Trainer(
        model,
        args=made_by.TrainingArguments(**overrides),
        train_dataset=Dataset.from_list(json.loads((material / "rows.json").read_text())),
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(material / "model")),
        callbacks=[as_callback(gauge, TrainerCallback, counts_labels)],
    )
    return trainer, gauge


def main(argv: list[str]) -> None:
    library, folder, output, *options = argv
    material, overrides = Path(folder), {**common_arguments(output), **parse_options(options)}
    stage = overrides.pop("stage", "sft")
    adapter = lora(stage) if overrides.pop("finetuning_type", "full") == "lora" else None
    model = load(material, overrides.pop("dtype", "float32"), stage)
    uses_burnish = overrides.get("made_by") == "burnish"
    create: Callable[..., tuple[Any, Gauge]] = (
        {"trl": trl, "transformers": transformers}[library] if stage == "sft" else partial(preferences, stage)
    )
    if stage in GRPO_STAGES:
        create = make_trl_trainer
    trainer, gauge = create(material, model, adapter, overrides)
    if uses_burnish and stage == "sft":
        gauge.count_trainer_labels(trainer)
    trainer.train()
    if overrides.get("do_eval"):
        trainer.evaluate(trainer.train_dataset)
    if overrides.get("do_predict"):
        gauge.on_predict(generate(model, material))
    gauge.report()


def generate(model: Any, material: Path) -> int:
    """Generate responses to the prompts in batches in bfloat16 with transformers' ``generate``; return the number of
    new tokens."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model", padding_side="left")
    rows = json.loads((material / "rows.json").read_text())
    prompts = [row["input_ids"][: sum(label == -100 for label in row["labels"])] for row in rows]
    count, size = 0, GENERATION_OPTIONS["per_device_eval_batch_size"]
    model.eval()
    for start in range(0, len(prompts), size):
        batch = tokenizer.pad({"input_ids": prompts[start : start + size]}, return_tensors="pt")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            output = model.generate(
                **batch, max_new_tokens=GENERATION_OPTIONS["max_new_tokens"],
                min_new_tokens=GENERATION_OPTIONS["max_new_tokens"],
                do_sample=False, use_cache=True, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        count += output[:, batch["input_ids"].shape[1] :].numel()
    return count


if __name__ == "__main__":
    main(sys.argv[1:])
