"""What is compared: each way to run each library, by part.

A peer runs as it comes and at the best that its options offer on a processor: bf16, rows laid beside each other or
grouped by length, nothing computed twice for the sake of memory. All of them take the same rows in steps of eight; a
pack of the longest row's length stands for as many rows as it holds in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BASE = "TRL, default"
OURS = "burnish, bf16"
ROWS_PER_STEP = 8


@dataclass(frozen=True)
class Setting:
    """One way to run one library.

    Args:
        library: whose environment it runs in.
        words: the script under bench/ and its arguments; MATERIAL and OUTPUT stand for folders.
    """

    name: str
    library: str
    words: tuple[str, ...]


def training(name: str, library: str, **options: Any) -> Setting:
    """A training with these options, said as each script reads them."""
    script = {"burnish": ("train_burnish.py",), "llamafactory": ("train_llamafactory.py",)}.get(
        library, ("train_peer.py", library)
    )
    say = spoken if library == "burnish" else repr
    words = (f"{option}={say(value)}" for option, value in options.items())
    return Setting(name, library, (*script, "MATERIAL", "OUTPUT", *words))


def spoken(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def trainings(method: str, facts: dict[str, Any]) -> tuple[Setting, ...]:
    """Every training with ``method``, full or lora.

    A frozen model is loaded in bfloat16 at each peer's best: else its weights are cast in every forward pass.
    """
    packs = max(1, round(ROWS_PER_STEP * facts["tokens"] / facts["rows"] / facts["longest"]))
    same: dict[str, Any] = {"finetuning_type": method}
    lean = same | ({"dtype": "bfloat16"} if method == "lora" else {})
    trl = lean | {"gradient_checkpointing": False}
    factory = same | {"bf16": True}
    grouped = {"train_sampling_strategy": "group_by_length"}
    packed = {"per_device_train_batch_size": packs}
    return (
        training(BASE, "trl", **same),
        training("TRL, grouped by length, no checkpointing", "trl", **trl, **grouped),
        training("TRL, packing, no checkpointing", "trl", packing=True, **trl, **packed),
        training("TRL, padding-free, no checkpointing", "trl", padding_free=True, max_length=None, **trl),
        training("transformers, bf16", "transformers", bf16=True, **lean),
        training("transformers, bf16, grouped by length", "transformers", bf16=True, **lean, **grouped),
        training("LLaMA-Factory, bf16", "llamafactory", **factory),
        training("LLaMA-Factory, bf16, grouped by length, no checkpointing", "llamafactory", **factory, **grouped,
                 disable_gradient_checkpointing=True),
        training("LLaMA-Factory, bf16, neat packing", "llamafactory", neat_packing=True, **factory, **packed),
        training("LLaMA-Factory, bf16, neat packing, no checkpointing", "llamafactory", neat_packing=True, **factory,
                 **packed, disable_gradient_checkpointing=True),
        training(OURS, "burnish", bf16=True, **same),
        training("burnish, float32", "burnish", **same),
    )  # fmt: skip


# Steps enough between two checkpoints that the first is on the disk when the second is due.
_SAVES = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
CHECKPOINT = (
    training("transformers", "transformers", bf16=True, **_SAVES),
    training("burnish", "burnish", bf16=True, **_SAVES),
)
# What is imported is no way to train: it is what every start stands on.
START = (
    training(BASE, "trl", max_steps=2),
    training("transformers", "transformers", max_steps=2, bf16=True),
    training("LLaMA-Factory", "llamafactory", max_steps=2, bf16=True),
    training(OURS, "burnish", max_steps=2, bf16=True),
    Setting("torch alone, imported", "burnish", ("imports.py", "torch")),
    Setting("torch and transformers' model, imported", "burnish",
            ("imports.py", "torch", "transformers.models.qwen2.modeling_qwen2")),
)  # fmt: skip
EVALUATION = tuple(
    training(f"burnish, {method}", "burnish", bf16=True, max_steps=2, finetuning_type=method, eval_dataset="EVALUATION",
             per_device_eval_batch_size=8)
    for method in ("full", "lora")
)  # fmt: skip
ENCODING = tuple(
    Setting(name, library, ("encode.py", library, "MATERIAL"))
    for name, library in (("TRL", "trl"), ("LLaMA-Factory", "llamafactory"), ("burnish", "burnish"))
)
