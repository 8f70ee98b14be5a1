"""TRL's short runs as scripts of burnish: models, records and arguments."""

import transformers
from datasets import Dataset, disable_progress_bars
from golden_run import GOLDEN, golden
from transformers import PrinterCallback, Qwen2Tokenizer

import burnish

disable_progress_bars()

PLAIN = {
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 2, "report_to": "none",
    "gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 1e-3, "optim": "adamw_torch",
    "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
}  # fmt: skip


def tokenizer():
    """As it came with the golden model: of that model's class, which cuts numbers into digits."""
    return Qwen2Tokenizer.from_pretrained(GOLDEN / "tokenizer")


def pair_ids(record):
    """A pair of the golden runs by TRL's columns."""
    chosen, rejected = record["chosen"], record["rejected"]
    at = chosen["prompt_length"]
    ids = {"prompt_ids": chosen["input_ids"][:at], "chosen_ids": chosen["input_ids"][at:]}
    return {**ids, "rejected_ids": rejected["input_ids"][at:]}


def whole_ids(record):
    return {f"{side}_ids": record[side]["input_ids"] for side in ("chosen", "rejected")}


def verdict_ids(record):
    own, other = record["completion"], record["kl"]
    at = own["prompt_length"]
    return {
        "prompt_ids": own["input_ids"][:at], "completion_ids": own["input_ids"][at:], "label": record["tag"],
        "KL_completion_ids": other["input_ids"][other["prompt_length"] :],
    }  # fmt: skip


def golden_set(kind):
    records = golden()["runs"]["rows"]["chatml"]["kto" if kind == "KTOTrainer" else "pairs"]
    made = {"KTOTrainer": verdict_ids, "RewardTrainer": whole_ids}.get(kind, pair_ids)
    return Dataset.from_list([made(record) for record in records])


def trainer_of(kind, folder, output, rows, model=None, given=None, **arguments):
    """A trainer of this name, with a golden model by default."""
    if isinstance(model, str):
        made_by = "AutoModelForSequenceClassification" if model == "scorer" else "AutoModelForCausalLM"
        model = getattr(transformers, made_by).from_pretrained(folder / "models" / model)
    config = getattr(burnish, kind.replace("Trainer", "Config"))
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    trainer = getattr(burnish, kind)(
        model=model, args=config(str(output), **{**PLAIN, **arguments}), train_dataset=rows,
        **{"processing_class": tokenizer(), **(given or {})},
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def logs_of(trainer):
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]
