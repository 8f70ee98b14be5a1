"""burnish fine-tunes transformer models.

``import burnish`` loads nothing but this file; each public name is imported when it is first used, so that the
command line answers at once and a script pays only for what it touches.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that holds it.
_PUBLIC: dict[str, str] = {
    "UserError": "burnish.config.errors",
    "IGNORE_INDEX": "burnish.loop.types",
    "Example": "burnish.loop.types",
    "Message": "burnish.loop.types",
    **{
        f"{method}{kind}": f"burnish.trainer.trl.preferences.{kind.lower()}"
        for method in ("CPO", "DPO", "KTO", "ORPO", "Reward")
        for kind in ("Config", "Trainer")
    },
    "EvalPrediction": "burnish.trainer.values",
    "SFTConfig": "burnish.trainer.trl.sft.config",
    "Seq2SeqTrainer": "burnish.trainer.seq2seq",
    "Seq2SeqTrainingArguments": "burnish.trainer.seq2seq",
    "SFTTrainer": "burnish.trainer.trl.sft.trainer",
    "Trainer": "burnish.trainer.trainer",
    "TrainerCallback": "burnish.loop.events",
    "TrainerControl": "burnish.loop.state",
    "TrainerState": "burnish.loop.state",
    "TrainingArguments": "burnish.trainer.arguments.training",
}

__all__ = [
    "IGNORE_INDEX", "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "EvalPrediction", "Example", "KTOConfig",
    "KTOTrainer", "Message", "ORPOConfig", "ORPOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer",
    "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainerCallback", "TrainerControl", "TrainerState",
    "TrainingArguments", "UserError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if not name.startswith("_") and (said := import_module("burnish.elsewhere").place_of(name)):
        raise ImportError(said)  # an AttributeError would lose its words in ``from burnish import ...``
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
