"""The Trainer's files: the saved model, and checkpoints from which a run resumes.

A checkpoint is the loop's (``checkpoint/checkpoint.py``): always complete, and without pickle files. It contains
``model.safetensors`` or ``adapter_model.safetensors``, ``config.json``, the tokenizer and ``trainer_state.json``, so
``from_pretrained`` can load it. ``save_hf_format`` adds the files from which transformers' own Trainer resumes
(``transformers_checkpoints.py``, which also reads its checkpoints).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from burnish.adapters.base import load_whole_state, whole_state
from burnish.adapters.peft import PeftAdapter, PeftOptions, name_base
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.models.save import SHARD_SIZE, save_config
from burnish.models.save_gathered import save_gathered, trained_weights_whole
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.inspection import is_peft_model

ARGUMENTS_NAME = "training_args.json"


class TrainerModel:
    """The weights of ``trainer.model`` as the part of a checkpoint called "model"."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapter = PeftAdapter(PeftOptions()) if is_peft_model(model) else None
        self.file_stem = self.adapter.file_stem if self.adapter else "model"
        if self.adapter:
            self.adapter.attach(model)

    def state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state(self.model) if self.adapter else whole_state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.adapter:
            self.adapter.load_state(self.model, state)
        elif type(self.model).load_state_dict is not nn.Module.load_state_dict:
            self.model.load_state_dict(dict(state), strict=False)  # the model's own method
        else:
            load_whole_state(self.model, state)


def write_model(model: Any, folder: Path, state_dict: dict[str, Any] | None) -> None:
    """Save weights and config for ``from_pretrained``. Only the weights if the model has no ``save_pretrained``."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft_model(model):
        name_base(model)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder), **({} if state_dict is None else {"state_dict": state_dict}))
    else:
        from safetensors.torch import save_file

        save_file(state_dict or whole_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def write_gathered(model: Any, folder: Path, whole: Any, writes: bool) -> None:
    """Save a model with sharded weights. A collective operation; rank 0 writes."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft_model(model):
        name_base(model)
        with trained_weights_whole(model, whole):
            if writes:
                model.save_pretrained(str(folder))
        return
    save_gathered(model, folder, None, SHARD_SIZE, whole, writes)
    if writes and hasattr(model, "config"):
        save_config(model, folder)


def write_configs(model: Any, folder: Path) -> None:
    """Write the config files with which other libraries can load the weights of a checkpoint."""
    if is_peft_model(model):
        name_base(model)
        model.save_pretrained(str(folder))
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(str(folder))


def write_tokenizer_and_arguments(folder: Path, companion: Any, args: TrainingArguments) -> None:
    """Save tokenizer or processor, and the arguments as JSON."""
    if hasattr(companion, "save_pretrained"):
        companion.save_pretrained(str(folder))
    text = json.dumps(args.to_dict(), indent=2, default=str)
    (folder / ARGUMENTS_NAME).write_text(text + "\n", encoding="utf-8")


def keep_only(checkpoints: Checkpoints, name: str) -> None:
    """Remove all checkpoints except the one of that name."""
    for path in checkpoints.all():
        if path.name != name:
            shutil.rmtree(path)
