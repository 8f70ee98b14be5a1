"""Scripts in TRL's style over a few records and a tiny model."""

from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback

import burnish
from small_run import WORDS

disable_progress_bars()

PLAIN = {
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 2, "report_to": "none",
    "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False, "max_length": 128,
}  # fmt: skip


def message_list(role, text):
    return [{"role": role, "content": text}]


def pairs(count=12):
    return [
        {
            "prompt": message_list("user", f"Repeat: {WORDS[i % 10]}"),
            "chosen": message_list("assistant", " ".join([WORDS[i % 10]] * (1 + i % 4))),
            "rejected": message_list("assistant", WORDS[(i + 3) % 10]),
        }
        for i in range(count)
    ]


def labelled_examples(count=12):
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
        for i, pair in enumerate(pairs(count))
    ]


def as_dataset(rows):
    return Dataset.from_list(rows) if isinstance(rows, list) else rows


def make(kind, model, output, rows=None, trainer_args=None, subclass=None, **arguments):
    """Create a trainer. Args: kind: its class in burnish, or the base of ``subclass``."""
    config = getattr(burnish, kind.replace("Trainer", "Config"))
    rows = (labelled_examples() if kind == "KTOTrainer" else pairs()) if rows is None else rows
    trainer = (subclass or getattr(burnish, kind))(
        model=str(model) if not hasattr(model, "forward") else model, train_dataset=as_dataset(rows),
        args=config(str(output), **{**PLAIN, **arguments}), **(trainer_args or {}),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer):
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
