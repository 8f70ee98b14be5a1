"""The loop of a ``Trainer``: ``core.loop.Loop``, which calls the trainer's methods where a script may override them.

microstep    ``training_step``, if a script computes the loss; else the loop's own
loss         ``_prepare_inputs``, then the objective, within ``compute_loss_context_manager``
evaluate     ``evaluate``
record       ``log``
save         ``_save_checkpoint``
load         also checkpoints of transformers
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils import logging

from burnish.checkpoint import checkpoint
from burnish.checkpoint.comparison import compare_with_checkpoint
from burnish.config.errors import skipped_sentence
from burnish.loop.loop import Loop
from burnish.loop.schedule import StepPlan
from burnish.loop.state import TrainerState, keeping_plan
from burnish.loop.types import Batch, Loss
from burnish.trainer.data.stream import PaddingBatch
from burnish.trainer.files.transformers_checkpoints import is_foreign, load_foreign
from burnish.trainer.loss import StepUnderWay, accepting, explaining_ids, without_gradient, without_weight

if TYPE_CHECKING:
    from burnish.trainer.arguments.training import TrainingArguments
    from burnish.trainer.trainer import Trainer

logger = logging.get_logger("transformers.trainer")  # so that the verbosity a script sets for it holds here too


class TrainerLoop(Loop):
    """A ``Loop`` that trains for a ``Trainer``.

    Args:
        plan: the steps of the run. accumulation: micro-batches of a step.
        ignore_keys: outputs of the model that evaluations leave out.
        parts: the other arguments of ``Loop``.
    """

    def __init__(
        self, trainer: Trainer, plan: StepPlan, accumulation: int, ignore_keys: list[str] | None, **parts: Any
    ) -> None:
        super().__init__(trainer.args, **parts)
        self.trainer, self.plan, self.accumulation, self.ignore_keys = trainer, plan, accumulation, ignore_keys
        self.started_s = time.time()

    def microstep(self, batch: Batch, num_items: Tensor, is_last: bool) -> Loss:
        """The loop's microstep; or ``training_step``, a mean, if a script computes the loss."""
        trainer = self.trainer
        self.state.total_flos += float(trainer.floating_point_ops(batch))
        with explaining_ids(trainer.model, batch):
            if not trainer.loss_is_scripted:
                return super().microstep(batch, num_items, is_last)
            trainer._step = StepUnderWay(num_items)
            items = None if trainer._items(batch, num_items) is None else num_items
            with self.engine.microbatch(self.model, last=is_last):
                value = accepting(trainer.training_step, "num_items_in_batch")(
                    self.model, batch, num_items_in_batch=items
                )
        sums, trainer._step = trainer._step.sums, StepUnderWay()
        return Loss(without_gradient(value, self.engine.device) * (num_items / self.engine.world_size), sums)

    def loss(self, batch: Batch) -> Loss:
        """The objective's loss of the inputs that the trainer prepares. A padding batch counts nothing."""
        trainer = self.trainer
        self.set_training_mode(True)  # a callback may have evaluated
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = self.objective.loss(self.model, inputs)
        trainer._empty_cache_if_due()
        return without_weight(loss) if isinstance(batch, PaddingBatch) else loss

    def evaluate(self) -> dict[str, float]:
        """Evaluate as ``Trainer.evaluate`` does, which logs each set and tells the callbacks."""
        metrics = self.trainer.evaluate(ignore_keys=self.ignore_keys)
        self.trainer._report_to_hp_search(self.trainer._trial, self.state.global_step, metrics)
        return metrics

    def record(self, values: dict[str, Any]) -> None:
        """Pass ``values`` to ``Trainer.log``; with the start of the training, for the tokens per second of a step."""
        if "skipped_steps" in values:
            logger.warning(skipped_sentence(values["skipped_steps"], self.state.global_step))
        if "loss" in values:
            self.trainer.log(values, self.started_s)
        else:
            self.trainer.log(values)

    def summary(self, unlogged: Mapping[str, float]) -> dict[str, float]:
        """The loop's summary, with the metrics of steps that were not logged, as TRL's, and the memory."""
        metrics = {name: value for name, value in unlogged.items() if name not in ("loss", "grad_norm")}
        values = {**super().summary(unlogged), **metrics}
        self.trainer._finalize_training(values)
        return values

    def save(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model, self.trainer._trial)
        self.callbacks.fire("on_save")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint of burnish or of transformers. The arguments are followed where they differ."""
        with keeping_plan(self.state):
            if is_foreign(folder):
                notes = load_foreign(folder, self, self.trainer.model, self.plan.steps_per_epoch, self.accumulation)
            else:
                notes = compare_with_checkpoint(folder, self.checkpoints.fingerprints, despite=True)
                there = {n: p for n, p in self.parts.items() if p.is_saved or checkpoint.has_part(folder, p.stem_of(0))}
                checkpoint.load(folder, there, self.engine.rank)
            for note in [*notes, *differences(self.state, self.trainer.args)]:
                logger.warning(note)
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning(f"The best checkpoint so far, {best}, is gone; it is not loaded at the end.")
            self.state.best_model_checkpoint = None
        if self.trainer.args.ignore_data_skip:
            self.stream.load_state_dict({"epoch": self.stream.state_dict()["epoch"], "position": 0})

    def describe_rows(self, items: Sequence[int]) -> str:
        return f"rows {', '.join(map(str, items))} of train_dataset"


def differences(before: TrainerState, args: TrainingArguments) -> list[str]:
    """Sentences on arguments that differ from the checkpoint's. The arguments are followed."""
    names = ("logging_steps", "eval_steps", "save_steps")
    now = {name: value for name in names if (value := getattr(args, name)) is not None and value >= 1}
    pairs = [(name, value, getattr(before, name)) for name, value in now.items()]
    pairs.append(("per_device_train_batch_size", args.per_device_train_batch_size, before.train_batch_size))
    return [
        f"{name}: {value} (from args) != {earlier} (from trainer_state.json)"
        for name, value, earlier in pairs
        if earlier is not None and value != earlier
    ]
