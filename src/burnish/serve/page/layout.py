"""Layout of the form: the options in its topics and their order.

Everything else about an option is in its declaration, and an option that is not listed here is on the form under "all
options".
"""

from __future__ import annotations

BOXES: dict[str, tuple[str, ...]] = {
    "essentials": (
        "model_name_or_path", "dataset", "stage", "finetuning_type", "learning_rate", "num_train_epochs",
        "per_device_train_batch_size", "output_dir",
    ),
    "method": ("lora_rank", "lora_alpha", "lora_target", "quantization_bit", "use_badam", "adapter_name_or_path"),
    "data": ("template", "cutoff_len", "max_samples", "val_size", "eval_dataset", "dataset_dir"),
    "training": (
        "gradient_accumulation_steps", "max_steps", "lr_scheduler_type", "bf16", "logging_steps", "save_steps",
        "eval_strategy", "eval_steps",
    ),
}  # fmt: skip
"""Essentials are always shown; the other topics are folded."""
DEPENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lora_rank": ("finetuning_type", ("lora",)),
    "lora_alpha": ("finetuning_type", ("lora",)),
    "lora_target": ("finetuning_type", ("lora",)),
    "quantization_bit": ("finetuning_type", ("lora",)),
    "use_badam": ("finetuning_type", ("full",)),
    "eval_steps": ("eval_strategy", ("steps",)),
}
"""Option -> the option on which its visibility depends, and the values of that option for which it is shown."""
PRESETS: dict[str, dict[str, object]] = {
    "LoRA": {"finetuning_type": "lora", "learning_rate": 1e-4, "num_train_epochs": 3, "lora_rank": 8},
    "QLoRA": {"finetuning_type": "lora", "quantization_bit": 4, "learning_rate": 1e-4, "num_train_epochs": 3},
    "full": {"finetuning_type": "full", "learning_rate": 1e-5, "num_train_epochs": 3},
    "BAdam": {"finetuning_type": "full", "use_badam": True, "learning_rate": 5e-5, "num_train_epochs": 3},
    "DPO": {"stage": "dpo", "finetuning_type": "lora", "learning_rate": 5e-6, "pref_beta": 0.1, "num_train_epochs": 1},
    "CPU quick test": {
        "finetuning_type": "lora", "max_steps": 20, "cutoff_len": 256, "per_device_train_batch_size": 2,
        "logging_steps": 1, "learning_rate": 1e-4,
    },
}  # fmt: skip
