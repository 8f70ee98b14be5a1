"""The Trainer's words: logs, metrics as text and as files, the model card."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import metrics_format
from transformers.trainer_utils import speed_metrics
from transformers.utils import logging

from burnish.core.errors import skipped_sentence
from burnish.core.meter import Meter
from burnish.core.state import TrainerState
from burnish.core.types import Engine
from burnish.hf.face import Face
from burnish.report import results

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class FaceMeter(Meter):
    """The loop's meter. Where steps were not logged before a run ends, their metrics are in its summary, as TRL's are:
    a run of fewer steps than ``logging_steps`` would say nothing of them."""

    unlogged: dict[str, float] = {}  # noqa: RUF012  replaced, never changed

    def read(self, state: TrainerState, engine: Engine, flos_per_token: int = 0) -> dict[str, float]:
        self.unlogged = super().read(state, engine, flos_per_token)
        return self.unlogged

    def summary(self) -> dict[str, float]:
        metrics = {name: value for name, value in self.unlogged.items() if name not in ("loss", "grad_norm")}
        return {**super().summary(), **metrics}


class ReportMethods(Face):
    """Reports."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Into ``state.log_history`` and to every callback. Override it to add or change values.

        Args:
            start_time: of the training under way, for tokens per second where tokens are counted.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._tokens_before
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.call_event("on_log", self.args, self.state, self.control, logs=logs)

    _tokens_before = 0
    _started: float | None = None

    def _log_from_loop(self, values: dict[str, Any]) -> None:
        """What the loop has to say, by way of ``log``."""
        is_step = "loss" in values and self._started is not None
        if "skipped_steps" in values:
            logger.warning(skipped_sentence(values["skipped_steps"], self.state.global_step))
        if "train_runtime" in values:
            self._finalize_training(values)
        if is_step:
            self.log(values, self._started)
        else:
            self.log(values)

    def _finalize_training(self, summary: dict[str, Any]) -> None:
        """Memory into the summary. transformers' tracker knows the stage by the name of the function that calls it."""
        self._memory_tracker.stop_and_update_metrics(summary)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The same metrics as a person reads them: memory in MB, runtimes as clock times, operations in GF."""
        return dict(metrics_format(metrics))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test") as aligned lines."""
        if self.is_world_process_zero():
            print(results.format_metrics(split, metrics))

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """``<split>_results.json`` and, where ``combined``, ``all_results.json``."""
        if self.is_world_process_zero():
            results.save_metrics(split, metrics, self.args.output_dir, combined)

    def save_state(self) -> None:
        """``trainer_state.json`` in ``output_dir``."""
        if self.is_world_process_zero():
            results.save_state(self.state, self.args.output_dir)

    def is_local_process_zero(self) -> bool:
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        return bool(self.args.process_index == 0)

    def store_flos(self) -> None:
        """``state.total_flos`` is kept as the run goes; there is nothing to add."""

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: Any = None, model_name: str | None = None,
        finetuned_from: str | None = None, tasks: Any = None, dataset_tags: Any = None, dataset: Any = None,
        dataset_args: Any = None,
    ) -> None:  # fmt: skip
        """``README.md`` in ``output_dir``, in the hub's form."""
        if not self.is_world_process_zero():
            return
        from transformers.modelcard import TrainingSummary

        summary = TrainingSummary.from_trainer(
            self, language=language, license=license, tags=tags, model_name=model_name, finetuned_from=finetuned_from,
            tasks=tasks, dataset_tags=dataset_tags, dataset=dataset, dataset_args=dataset_args,
        )  # fmt: skip
        if summary.dataset == [None]:  # a set that was made in memory has no name
            summary.dataset = summary.dataset_tags = summary.dataset_args = summary.dataset_metadata = None
        card = summary.to_model_card()
        base = getattr(getattr(self.model, "config", None), "_name_or_path", "")
        if summary.finetuned_from is None and Path(base).is_dir():  # a folder has no link on the hub
            begun = f"This model is a fine-tuned version of {Path(base).name} on"
            card = card.replace("This model was trained from scratch on", begun)
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _start_clock(self) -> None:
        self._started, self._tokens_before = time.time(), self.state.num_input_tokens_seen
