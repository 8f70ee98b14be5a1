"""The Trainer's files: the model for others to load, and checkpoints for this run to go on from.

A checkpoint is the loop's (``core/checkpoint.py``): written whole or not at all, and without a pickle. It holds
``model.safetensors`` or ``adapter_model.safetensors``, ``config.json``, the tokenizer and ``trainer_state.json``, so
``from_pretrained`` reads it. ``save_hf_format`` adds the files from which transformers' own Trainer goes on
(``foreign.py``, which also reads its checkpoints).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from burnish.adapters.base import load_whole_state, whole_state
from burnish.adapters.peft import PeftAdapter
from burnish.core import loop
from burnish.core.checkpoint import Checkpoints
from burnish.core.types import Stateful
from burnish.hf.face import Face
from burnish.hf.foreign import write_transformers_files

ARGUMENTS_NAME = "training_args.json"


class ModelPart:
    """The weights of ``trainer.model`` as the part of a checkpoint called "model"."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adapter = PeftAdapter(None) if is_peft_model(model) else None
        self.file_stem = self.adapter.file_stem if self.adapter else "model"
        if self.adapter:
            self.adapter.attach(model)

    def state_dict(self) -> dict[str, Tensor]:
        return self.adapter.state(self.model) if self.adapter else whole_state(self.model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.adapter:
            self.adapter.load_state(self.model, state)
        elif type(self.model).load_state_dict is not nn.Module.load_state_dict:
            self.model.load_state_dict(dict(state), strict=False)  # the model's own way
        else:
            load_whole_state(self.model, state)


class FaceCheckpoints(Checkpoints):
    """Checkpoints that are saved by way of ``Trainer._save_checkpoint``, which a subclass may override."""

    def __init__(self, trainer: SavingMethods, folder: Path, **given: Any) -> None:
        super().__init__(folder, **given)
        self.trainer = trainer
        self.due: tuple[int, Mapping[str, Stateful], str | None] | None = None  # while a save is under way

    def save(
        self, step: int, parts: Mapping[str, Stateful], *, best: str | None = None, copies_later: bool = False
    ) -> Path:
        """``copies_later`` is not asked for here: what a subclass does after it may change any weight."""
        self.due = step, parts, best
        self.trainer._save_checkpoint(self.trainer.model, self.trainer._trial)
        self.due = None
        return self.path(step)

    def write(self) -> Path:
        """Write the checkpoint that is due."""
        assert self.due is not None
        step, parts, best = self.due
        return super().save(step, parts, best=best)


class SavingMethods(Face):
    """Files."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, configuration and tokenizer, for ``from_pretrained``. The first process alone writes."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(str(folder), **({} if state_dict is None else {"state_dict": state_dict}))
        else:
            from safetensors.torch import save_file

            save_file(state_dict or whole_state(model), folder / "model.safetensors", metadata={"format": "pt"})
        self._save_companions(folder)

    def _save_companions(self, folder: Path) -> None:
        """Tokenizer or processor, and the arguments. The arguments are JSON: nothing is pickled."""
        companion: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(companion, "save_pretrained"):
            companion.save_pretrained(str(folder))
        text = json.dumps(self.args.to_dict(), indent=2, default=str)
        (folder / ARGUMENTS_NAME).write_text(text + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write ``checkpoint-<step>`` with everything that the run needs to go on."""
        if self._checkpoints.due is None:  # asked for by a script or a callback rather than by the loop
            assert self._run is not None
            loop.save(self._run)
            return
        folder = self._checkpoints.write()
        if self.args.push_to_hub:
            self._checkpoints.wait()
            self._push_from_checkpoint(str(folder))  # type: ignore[attr-defined]

    def _write_extras(self, folder: Path) -> None:
        """What makes a checkpoint loadable elsewhere; the weights themselves are a part, written by ``Checkpoints``."""
        from burnish.hf.trainer import Trainer

        if type(self).save_model is not Trainer.save_model or type(self)._save is not Trainer._save:
            self.save_model(str(folder), _internal_call=True)
            return
        model: Any = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model):
            model.save_pretrained(str(folder))
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(str(folder))
        self._save_companions(folder)
        if self.args.save_hf_format:
            write_transformers_files(folder, self.optimizer, self.lr_scheduler)

    def _get_output_dir(self, trial: Any = None) -> str:
        """``output_dir``, or the folder of a trial below it."""
        if trial is None or self.hp_search_backend is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{getattr(trial, 'number', trial)}"
        return str(Path(self.args.output_dir) / name)

    def _drop_surplus(self, checkpoints: Checkpoints) -> None:
        """With ``save_total_limit`` 1 only the best checkpoint outlives the run."""
        best = self.state.best_model_checkpoint
        if self.args.save_total_limit != 1 or best is None or not self.args.should_save:
            return
        for path in checkpoints.all():
            if path.name != Path(best).name:
                shutil.rmtree(path)


def is_peft_model(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")
