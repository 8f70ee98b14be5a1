"""The methods of a ``Trainer`` for files: model, checkpoints, results, model card, hub; see ``files/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_pt_utils import metrics_format

from burnish.report import results
from burnish.trainer.files import card, files
from burnish.trainer.files.transformers_checkpoints import write_transformers_files
from burnish.trainer.methods.optimizer import OptimizerMethods


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
            files.write_gathered(self.model, folder, self._parallel.whole, writes)
        elif writes:
            files.write_model(self.accelerator.unwrap_model(self.model), folder, state_dict)
        if writes:
            files.write_tokenizer_and_arguments(folder, self._companion, self.args)

    @property
    def _companion(self) -> Any:
        """The tokenizer or processor that is saved with the model."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save ``checkpoint-<step>`` with everything that the run needs to resume."""
        assert self._loop is not None
        self.store_flos()
        folder = self._loop.write_checkpoint()
        if self.args.push_to_hub:
            self._loop.checkpoints.wait()
            self._push_from_checkpoint(str(folder))

    def _write_extras(self, folder: Path) -> None:
        """Write the files with which other libraries can load a checkpoint. ``Checkpoints`` writes its weights."""
        if type(self).save_model is not FileMethods.save_model or type(self)._save is not FileMethods._save:
            self.save_model(str(folder), _internal_call=True)
            return
        files.write_configs(self.accelerator.unwrap_model(self.model), folder)
        files.write_tokenizer_and_arguments(folder, self._companion, self.args)
        if self.args.save_hf_format:
            write_transformers_files(folder, self.optimizer, self.lr_scheduler)

    def _finalize_training(self, summary: dict[str, Any]) -> None:
        """Add memory metrics to the summary. transformers' tracker determines the stage from the name of its caller."""
        self._memory_tracker.stop_and_update_metrics(summary)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
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
        """Called before a checkpoint and at the end. Does nothing, because ``state.total_flos`` is always up to
        date."""

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
            commit_message: message of the commit.
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
        self._tell("on_push_begin")
        self._hub.wait()
        return self._hub.upload(
            self.args.output_dir, commit_message, self.args, blocking=blocking, token=token, revision=revision,
            ignore=[".*", "checkpoint-*"],
        )  # fmt: skip

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._hub.is_due(self.args):
            self._tell("on_push_begin")
            message = f"Training in progress, step {self.state.global_step}"
            self._hub.push_checkpoint(checkpoint_folder, message, self.args)
