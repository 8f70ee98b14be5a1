"""One training by TRL or by transformers' Trainer, measured. Runs in their environment.

    python bench/train_peer.py trl|transformers MATERIAL OUTPUT [name=value ...]

In: the folder that ``material.py`` made; arguments of SFTConfig or TrainingArguments, as Python values, and beside them
``finetuning_type='lora'`` for an adapter of ``peft`` and ``dtype='bfloat16'`` for the weights of the model. With
``made_by='burnish'`` the classes come from there, as in a script that changes its import and nothing else; with
``do_eval=True`` the rows are evaluated after the training, with ``do_predict=True`` their prompts are answered.
Out: the line of ``gauge.py``.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gauge import ANSWERS, PREFERENCES, Gauge, as_callback, common, rows_counted
from material import facts_of, preference_sets
from rewarded import REWARDED, trainer_of_trl


def arguments(words: list[str]) -> dict[str, Any]:
    return {name: ast.literal_eval(value) for name, value in (word.split("=", 1) for word in words)}


def lora(stage: str) -> Any:
    from peft import LoraConfig

    task = "SEQ_CLS" if stage == "rm" else "CAUSAL_LM"
    return LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type=task)


def load(material: Path, dtype: str, stage: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if stage == "rm":
        return AutoModelForSequenceClassification.from_pretrained(material / "model", dtype=dtype, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(material / "model", dtype=dtype)


def trl(material: Path, model: Any, adapter: Any, given: dict[str, Any]) -> tuple[Any, Gauge]:
    """SFTTrainer over rows that are encoded already; it wants the learned tokens as a mask."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gauge, made_by = Gauge(), import_module(given.pop("made_by", "trl"))
    listens = made_by.__name__ != "burnish"
    rows = json.loads((material / "rows.json").read_text())
    encoded = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in rows
    ]
    trainer = made_by.SFTTrainer(
        model, args=made_by.SFTConfig(
            **{"max_length": facts_of(material)["longest"], "completion_only_loss": True, **given}  # not by itself
        ),
        train_dataset=Dataset.from_list(encoded), processing_class=AutoTokenizer.from_pretrained(material / "model"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, listens)],
    )  # fmt: skip
    return trainer, gauge


def preferences(stage: str, material: Path, model: Any, adapter: Any, given: dict[str, Any]) -> tuple[Any, Gauge]:
    """DPOTrainer, KTOTrainer or RewardTrainer over conversations, as their scripts have them."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gauge, made_by = Gauge(rows_counted(stage)), import_module(given.pop("made_by", "trl"))
    kind = {"dpo": "DPO", "kto": "KTO", "rm": "Reward"}[stage]
    records = preference_sets(material)[PREFERENCES[stage]]

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    rows = [
        {"prompt": said("user", record["instruction"]),
         **({"completion": said("assistant", record["output"]), "label": record["kto_tag"]} if stage == "kto" else
            {name: said("assistant", record[name]) for name in ("chosen", "rejected")})}
        for record in records
    ]  # fmt: skip
    trainer = getattr(made_by, f"{kind}Trainer")(
        model=model, args=getattr(made_by, f"{kind}Config")(**{"max_length": facts_of(material)["longest"], **given}),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(material / "model"),
        peft_config=adapter, callbacks=[as_callback(gauge, TrainerCallback, listens=False)],
    )  # fmt: skip
    return trainer, gauge


def transformers(material: Path, model: Any, adapter: Any, given: dict[str, Any]) -> tuple[Any, Gauge]:
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback

    gauge, made_by = Gauge(), import_module(given.pop("made_by", "transformers"))
    listens = made_by.__name__ != "burnish"
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    trainer = made_by.Trainer(
        model,
        args=made_by.TrainingArguments(**given),
        train_dataset=Dataset.from_list(json.loads((material / "rows.json").read_text())),
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(material / "model")),
        callbacks=[as_callback(gauge, TrainerCallback, listens)],
    )
    return trainer, gauge


def main(words: list[str]) -> None:
    library, folder, output, *options = words
    material, given = Path(folder), {**common(output), **arguments(options)}
    stage = given.pop("stage", "sft")
    adapter = lora(stage) if given.pop("finetuning_type", "full") == "lora" else None
    model = load(material, given.pop("dtype", "float32"), stage)
    is_ours = given.get("made_by") == "burnish"
    make = {"trl": trl, "transformers": transformers}[library] if stage == "sft" else partial(preferences, stage)
    if stage in REWARDED:
        make = trainer_of_trl
    trainer, gauge = make(material, model, adapter, given)
    if is_ours and stage == "sft":
        gauge.watch(trainer)
    trainer.train()
    if given.get("do_eval"):
        trainer.evaluate(trainer.train_dataset)
    if given.get("do_predict"):
        gauge.on_predict(answer(model, material))
    gauge.report()


def answer(model: Any, material: Path) -> int:
    """Answer the prompts in batches, in bfloat16, with transformers' own ``generate``; the number of new tokens."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model", padding_side="left")
    rows = json.loads((material / "rows.json").read_text())
    prompts = [row["input_ids"][: sum(label == -100 for label in row["labels"])] for row in rows]
    count, size = 0, ANSWERS["per_device_eval_batch_size"]
    model.eval()
    for start in range(0, len(prompts), size):
        batch = tokenizer.pad({"input_ids": prompts[start : start + size]}, return_tensors="pt")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            made = model.generate(
                **batch, max_new_tokens=ANSWERS["max_new_tokens"], min_new_tokens=ANSWERS["max_new_tokens"],
                do_sample=False, use_cache=True, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        count += made[:, batch["input_ids"].shape[1] :].numel()
    return count


if __name__ == "__main__":
    main(sys.argv[1:])
