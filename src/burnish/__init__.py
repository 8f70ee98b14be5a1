"""burnish fine-tunes transformer models.

``import burnish`` loads this file only. Each public name is imported on first use, so that the command line starts
quickly and a script imports only what it uses.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # typing is not imported here: see utils/sigint.py
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
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
    **{
        f"{method}{kind}": f"burnish.trainer.trl.rollouts.{kind.lower()}"
        for method in ("GRPO", "RLOO")
        for kind in ("Config", "Trainer")
    },
    **dict.fromkeys(("CPOTrainer", "ORPOTrainer"), "burnish.trainer.trl.preferences.without_reference"),
    "DataCollatorForCompletionOnlyLM": "burnish.trainer.trl.sft.completion_only",
    "EvalPrediction": "burnish.trainer.values",
    "RewardModel": "burnish.rollouts.rewards.models",
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
    "IGNORE_INDEX", "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "DataCollatorForCompletionOnlyLM",
    "EvalPrediction", "Example", "GRPOConfig", "GRPOTrainer", "KTOConfig", "KTOTrainer", "Message", "ORPOConfig",
    "ORPOTrainer", "RLOOConfig", "RLOOTrainer", "RewardConfig", "RewardModel", "RewardTrainer", "SFTConfig",
    "SFTTrainer", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainerCallback", "TrainerControl",
    "TrainerState", "TrainingArguments", "UserError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if not name.startswith("_"):
        reexports = import_module("burnish.reexports")
        if name in reexports.OWNER_OF:
            return reexports.reexport(name)
        if message := reexports.message_for(name):
            # ``from burnish import name`` would replace an AttributeError's message with a generic one.
            raise ImportError(message) if _is_import(sys._getframe(1)) else AttributeError(message)
        if _is_import(sys._getframe(1)):
            raise ImportError(reexports.owner_message(name))
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")


def _is_import(frame: FrameType) -> bool:
    """Return whether ``frame`` is executing ``from burnish import name`` rather than an attribute access."""
    from opcode import opmap

    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
