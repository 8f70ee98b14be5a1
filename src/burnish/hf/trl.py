"""``TrlTrainer``: what TRL's trainers do beyond transformers': a card after training, tokens in the log."""

from __future__ import annotations

from typing import Any

from burnish.core.loop import TrainOutput
from burnish.hf.trainer import Trainer


class TrlTrainer(Trainer):
    """Base of the trainers that speak TRL."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None, **kwargs: Any,
    ) -> TrainOutput:  # fmt: skip
        """As the Trainer's; then the model's card lies in ``output_dir``, where anything is saved."""
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)
        if self.args.save_strategy != "no":
            self.create_model_card()
        return output

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **more: Any
    ) -> None:
        """``README.md`` in ``output_dir``; the arguments are TRL's, and those of the Trainer's by their names."""
        given = {"model_name": model_name, "dataset": dataset_name, "tags": tags, **more}
        super().create_model_card(**{name: value for name, value in given.items() if value is not None})

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs or "mean_token_accuracy" in logs:
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log(logs, start_time)
