"""The methods of a ``Trainer`` for files: saved models, checkpoints to resume from, results, model card, hub.

A checkpoint is the loop's (``checkpoint/checkpoint.py``): always complete, and without pickle files. It contains
``model.safetensors`` or ``adapter_model.safetensors``, ``config.json``, the tokenizer and ``trainer_state.json``, so
``from_pretrained`` can load it. ``save_hf_format`` adds the files from which transformers' own Trainer resumes
(``files/transformers_checkpoints.py``, which also reads its checkpoints).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.trainer_pt_utils import metrics_format

from burnish.adapters.base import FinetuningOptions, ModelState, model_state
from burnish.adapters.full import FullAdapter
from burnish.adapters.peft import PeftAdapter, PeftOptions, is_peft_model, name_base
from burnish.config.secrets import mask_json
from burnish.models.save import SHARD_SIZE, replacing_weights, save_config
from burnish.models.save_gathered import save_gathered, trained_weights_whole
from burnish.report import results
from burnish.run.hub import LOCAL_FILES
from burnish.trainer.files import card
from burnish.trainer.files.transformers_checkpoints import write_transformers_files
from burnish.trainer.methods.optimizer import OptimizerMethods
from burnish.trainer.notes import logger

ARGUMENTS_NAME = "training_args.json"


class FileMethods(OptimizerMethods):
    """Model, checkpoints, results, model card and hub."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model, configuration and tokenizer for ``from_pretrained``. Only the main process writes."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        writes, folder = self.args.should_save, Path(self.args.output_dir if output_dir is None else output_dir)
        if self._parallel.is_sharded:
            self._parallel.reshard(self.model_wrapped)  # after an evaluation some weights are still gathered
            write_gathered(self.model, folder, self._parallel.full_tensor, writes)
        elif writes:
            write_model(self.accelerator.unwrap_model(self.model), folder, state_dict)
        if writes:
            self._write_companions(folder)

    def _write_companions(self, folder: Path) -> None:
        """Save tokenizer or processor, and the arguments as JSON."""
        if hasattr(self._saved_processing_class, "save_pretrained"):
            self._saved_processing_class.save_pretrained(str(folder))
        arguments = mask_json(json.loads(json.dumps(self.args.to_dict(), default=str)))
        (folder / ARGUMENTS_NAME).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")

    @property
    def _saved_processing_class(self) -> Any:
        """The tokenizer or processor that is saved with the model."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: Any = None) -> None:
        """Save ``checkpoint-<step>`` with everything that the run needs to resume.

        Args:
            model, trial: of the run.
            metrics: not used. Overrides for earlier versions of transformers pass it.
        """
        assert self._loop is not None
        self.store_flos()
        folder = self._loop.write_checkpoint()
        if self.args.push_to_hub:
            self._loop.checkpoints.wait()
            self._push_from_checkpoint(str(folder))

    def _write_extras(self, folder: Path) -> None:
        """Write the files with which other libraries can load a checkpoint. ``Checkpoints`` writes its weights."""
        if self._overrides("save_model") or self._overrides("_save"):
            self.save_model(str(folder), _internal_call=True)
            return
        write_configs(self.accelerator.unwrap_model(self.model), folder)
        self._write_companions(folder)
        if self.args.save_hf_format:
            write_transformers_files(folder, self.optimizer, self.lr_scheduler)

    @staticmethod
    def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics in readable form: memory in MB, runtimes as h:mm:ss, operations in GF."""
        return dict(metrics_format(metrics))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test") as aligned lines."""
        if self.is_world_process_zero():
            print(results.format_metrics(split, metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and, if ``combined``, ``all_results.json``."""
        if self.is_world_process_zero():
            results.save_metrics(split, metrics, self.args.output_dir, combined)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to ``output_dir``."""
        if self.is_world_process_zero():
            results.save_state(self.state, self.args.output_dir)

    def store_flos(self) -> None:
        """Add the floating-point operations of all processes since the last call to ``state.total_flos``.

        Called before each log and checkpoint and at the end. A collective operation: all processes must call it.
        """
        flos = torch.tensor(self.current_flos, dtype=torch.float64, device=self._parallel.device)
        self.state.total_flos += float(self._parallel.sum(flos))
        self.current_flos = 0.0

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: Any = None, model_name: str | None = None,
        finetuned_from: str | None = None, tasks: Any = None, dataset_tags: Any = None, dataset: Any = None,
        dataset_args: Any = None,
    ) -> None:  # fmt: skip
        """Write ``README.md`` to ``output_dir``, in the format of the hub."""
        fields = {"language": language, "license": license, "tags": tags, "model_name": model_name,
                "finetuned_from": finetuned_from, "tasks": tasks, "dataset_tags": dataset_tags, "dataset": dataset,
                "dataset_args": dataset_args}  # fmt: skip
        if self.is_world_process_zero():
            card.write_trainer_card(self, Path(self.args.output_dir), fields)

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, private: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Save the model, write its card and upload ``output_dir``.

        Args:
            blocking: whether to wait for the upload.
            token: access token of the hub.
            revision: branch to push to.
            private: whether a new repository is private. Default: ``hub_private_repo``.
            kwargs: arguments of the model card.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if self.args.process_index != 0:
            return None
        kwargs.setdefault("model_name", Path(self.args.output_dir).name)
        self.create_model_card(**kwargs)
        self._call_event("on_push_begin")
        self._hub.wait()
        return self._hub.upload(
            self.args.output_dir, commit_message, self.args, blocking=blocking, token=token, revision=revision,
            ignore=LOCAL_FILES,
        )  # fmt: skip

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.process_index == 0 and self._hub.is_due(self.args):
            self._call_event("on_push_begin")
            message = f"Training in progress, step {self.state.global_step}"
            try:
                self._hub.push_checkpoint(checkpoint_folder, message, self.args)
            except OSError as error:  # the checkpoint is saved, and training continues
                logger.warning(f"{checkpoint_folder} was not uploaded, because it could not be copied: {error}")


class TrainerModel(ModelState):
    """The weights of ``trainer.model`` as the part of a checkpoint called "model"."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            model, PeftAdapter(PeftOptions()) if is_peft_model(model) else FullAdapter(FinetuningOptions())
        )
        if not self.adapter.saves_whole_model:
            self.adapter.attach(model)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        is_own = type(self.model).load_state_dict is not nn.Module.load_state_dict
        if self.adapter.saves_whole_model and is_own:
            self.model.load_state_dict(dict(state), strict=False)
        else:
            super().load_state_dict(state)


def write_model(model: Any, folder: Path, state_dict: dict[str, Any] | None) -> None:
    """Save weights and config for ``from_pretrained``. Only the weights if the model has no ``save_pretrained``."""
    folder.mkdir(parents=True, exist_ok=True)
    is_adapter = is_peft_model(model)
    if is_adapter:
        name_base(model)
    with nullcontext() if is_adapter else replacing_weights(folder):
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(str(folder), **({} if state_dict is None else {"state_dict": state_dict}))
        else:
            save_file(state_dict or model_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def write_gathered(model: Any, folder: Path, whole: Any, writes: bool) -> None:
    """Save a model with sharded weights. A collective operation; rank 0 writes."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft_model(model):
        name_base(model)
        with trained_weights_whole(model, whole):
            if writes:
                model.save_pretrained(str(folder))
        return
    with replacing_weights(folder) if writes else nullcontext():
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
