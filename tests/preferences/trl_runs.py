"""TRL's golden runs as scripts with burnish: models, records and arguments."""

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
    """Return the golden model's tokenizer with the model's class, which splits numbers into digits."""
    return Qwen2Tokenizer.from_pretrained(GOLDEN / "tokenizer")


def pair_ids(record):
    """Return a pair of the golden runs with TRL's columns."""
    chosen, rejected = record["chosen"], record["rejected"]
    start = chosen["prompt_length"]
    ids = {"prompt_ids": chosen["input_ids"][:start], "chosen_ids": chosen["input_ids"][start:]}
    return {**ids, "rejected_ids": rejected["input_ids"][start:]}


def full_ids(record):
    return {f"{side}_ids": record[side]["input_ids"] for side in ("chosen", "rejected")}


def labelled_ids(record):
    completion, mismatched = record["completion"], record["kl"]
    start = completion["prompt_length"]
    return {
        "prompt_ids": completion["input_ids"][:start], "completion_ids": completion["input_ids"][start:],
        "label": record["tag"], "KL_completion_ids": mismatched["input_ids"][mismatched["prompt_length"] :],
    }  # fmt: skip


def golden_set(kind):
    records = golden()["runs"]["rows"]["chatml"]["kto" if kind == "KTOTrainer" else "pairs"]
    convert = {"KTOTrainer": labelled_ids, "RewardTrainer": full_ids}.get(kind, pair_ids)
    return Dataset.from_list([convert(record) for record in records])


def trainer_of(kind, folder, output, rows, model=None, given=None, **arguments):
    """Create a trainer. Args: kind: its class in burnish. given: further constructor arguments."""
    if isinstance(model, str):
        model_class = "AutoModelForSequenceClassification" if model == "scorer" else "AutoModelForCausalLM"
        model = getattr(transformers, model_class).from_pretrained(folder / "models" / model)
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
