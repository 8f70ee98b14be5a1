"""The training loop. ``Loop.train`` and ``Loop.step`` show all of it.

One step, in order:

    take a step batch        the micro-batches of one step, on this rank
    prepare_step             let the objective see all micro-batches before the first forward pass
    count the items          trained tokens, for example, over all micro-batches and all ranks
    per micro-batch          forward, then backward on its share: total / items of the step
    clip, then update        unless the loss or a gradient is not finite
    schedule, state, loader  advance together
    callbacks                set flags: log, evaluate, save, stop
    handle the flags         in that order

Each micro-batch contributes ``total / items of the whole step``, so the update does not depend on how the step was
divided into micro-batches, padded, packed or distributed over ranks. The order of the data is a function of (seed,
epoch), so an evaluation in between does not change it. Everything that changes during training is in ``Loop.parts``, so
a resumed run continues exactly.

The loop decides *when* something happens; an ``Objective`` decides *what* is computed. ``burnish train`` runs
``RunLoop`` and ``burnish.Trainer`` runs ``TrainerLoop``: subclasses that override single methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from burnish.checkpoint.checkpoint import Checkpoints, load, load_part
from burnish.checkpoint.parts import ModelPart, Part, Stateful, parts_of
from burnish.config.errors import NonFiniteError, UserError
from burnish.config.options import option
from burnish.loop.best import BestChoices, best_model_metric, eval_prefix, remember_best
from burnish.loop.events import CallbackHandler
from burnish.loop.meter import Clock, EvalSums, Meter
from burnish.loop.metrics import join_metrics_by_name
from burnish.loop.protocols import EvalSet, Loader, Objective, Parallel
from burnish.loop.rollout import RolloutBuffer
from burnish.loop.schedule import follows_metric
from burnish.loop.spikes import SpikeOptions, SpikeWatch
from burnish.loop.state import preserve_plan
from burnish.loop.types import Batch, Loss, StepBatch
from burnish.utils.activity import Activity, annotate_errors
from burnish.utils.work import track


@dataclass
class LoopOptions:
    """Gradient clipping and non-finite losses."""

    max_grad_norm: float = option(1.0, "Maximum gradient norm for clipping. 0: no clipping.", ge=0)
    logging_nan_inf_filter: bool = option(True, "Exclude NaN and infinite losses from the logged mean.")
    on_non_finite: str = option(
        "stop",
        "What to do after a step whose loss or gradient is not finite: stop, or skip it and continue. The "
        "update of such a step is never applied.",
        choices=("stop", "skip"),
    )  # fmt: skip


class TrainOutput(NamedTuple):
    """Return value of ``train()``, as in transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class LoopChoices(BestChoices, SpikeOptions, LoopOptions):
    """Options that the loop reads."""


class Loop:
    """One training run. Its components are attributes.

    Args:
        model: ``objective.module(...)`` after ``parallel.prepare``.
        weights: the weights that a checkpoint stores.
        optimizer: the optimizer after ``parallel.prepare``.
        scheduler: the scheduler of that optimizer, from torch, transformers or a script.
        callbacks: the handler whose ``state`` and ``control`` are those of the run.
        eval_sets: evaluation sets by name; "" for a single one.
        flos_per_token: floating-point operations of forward and backward for one token.
        logs_tokens: whether every log includes num_input_tokens_seen.
    """

    def __init__(
        self, options: LoopChoices, *, model: nn.Module, weights: ModelPart, objective: Objective, parallel: Parallel,
        loader: Loader, optimizer: Any, scheduler: Any, callbacks: CallbackHandler, checkpoints: Checkpoints,
        eval_sets: Mapping[str, EvalSet] | None = None, flos_per_token: int = 0,
        logs_tokens: bool = False,
    ) -> None:  # fmt: skip
        self.options = options
        self.model, self.objective, self.parallel, self.loader = model, objective, parallel, loader
        self.optimizer = optimizer
        self.scheduler, self.follows_metric = scheduler, follows_metric(scheduler)
        self.callbacks, self.state, self.control = callbacks, callbacks.state, callbacks.control
        self.checkpoints = checkpoints
        self.eval_sets = {} if eval_sets is None else eval_sets
        self.meter = Meter(parallel.device, options.logging_nan_inf_filter)
        self.spikes = SpikeWatch(options.spike_ratio) if options.on_spike != "no" else None
        self.rollout_buffer = RolloutBuffer(parallel.rank, parallel.world_size, objective.redistribute)
        self.flos_per_token, self.logs_tokens = flos_per_token, logs_tokens
        others: dict[str, Stateful | Part] = {"stream": loader, "state": self.state}
        others |= {**objective.parts, **loader.parts}
        if self.spikes is not None:
            others["spikes"] = self.spikes
        others |= {"meter": self.meter, **parallel.parts}
        if objective.inner_steps > 1:
            others["rollout"] = Part(self.rollout_buffer, "rollout", on_each_rank=True, reads_all_ranks=True)
        parts = parts_of(weights, optimizer, scheduler, others, save_only_model=options.save_only_model)
        self.parts = parallel.sharded_parts(parts)  # everything that a checkpoint stores, by name

    def train(self) -> TrainOutput:
        """Train from the current step to ``max_steps``, or until a callback stops the run.

        Raises:
            NonFiniteError: if a loss or gradient is not finite and ``on_non_finite`` is ``stop``. The weights are those
                of the last finite step.
        """
        self.meter.start()
        self.set_training_mode(True)
        self.callbacks.fire("on_train_begin")
        if self.options.eval_on_start and self.state.global_step == 0:
            self.evaluate()
        is_over = self.state.global_step == self.state.max_steps or self.control.should_training_stop
        if self.loader.is_in_epoch and (is_over or self.loader.is_ended_early):
            self.finish_epoch()  # the checkpoint of the last step of an epoch was saved before the end of the epoch
        num_empty = 0
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            if self.loader.has_short_epochs and self.loader.epoch >= self.state.num_train_epochs:
                break  # a callback ended epochs early, so there are fewer than max_steps steps
            if self.callbacks.fire("on_epoch_begin").should_training_stop:
                break
            num_empty += 1
            for step_batch in self.step_batches():
                num_empty = 0
                self.callbacks.fire("on_step_begin")
                self.step(step_batch)
                self.callbacks.fire("on_step_end")
                self.handle_control()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self.end_epoch_on_request()
            self.finish_epoch()
            if num_empty == 2:  # the first one may be the end of an epoch in which the run was resumed
                raise UserError(
                    "An epoch has no training step left.", remedy="Raise spike_ratio to skip fewer examples."
                )
        return self.end_training()

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the remaining step batches of the epoch: first those left of the current rollout, then new ones."""
        yield from self.rollout_buffer.remaining()
        source = self.loader.step_batches()
        for step_batch in source:
            inner_batches = self.objective.rollout(
                self.model, step_batch, self.parallel, self.state.global_step, source
            )
            assert len(inner_batches) == self.objective.inner_steps, (
                f"{type(self.objective).__name__}.rollout: {len(inner_batches)}"
            )
            self.rollout_buffer.fill(inner_batches)
            yield from self.rollout_buffer.remaining()

    def step(self, step_batch: StepBatch) -> None:
        """Run forward and backward for all micro-batches of a step, then update the weights once."""
        learning_rate = self.learning_rate()
        batches: Sequence[Batch] = [self.parallel.to_device(batch) for batch in step_batch.batches]
        batches = self.objective.prepare_step(self.model, batches, self.parallel)
        num_items = self.parallel.sum(sum_of([self.objective.num_items(batch) for batch in batches]))
        divisor = torch.where(num_items > 0, num_items, 1)

        losses: list[Loss] = []
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            losses.append(self.microstep(batch, divisor, is_last))
            if not is_last:
                self.callbacks.fire("on_substep_end")

        loss = sum_of([each.total.detach() for each in losses]) / divisor
        norm = self.parallel.clip(self.trainable_parameters(), self.options.max_grad_norm)
        self.callbacks.fire("on_pre_optimizer_step")
        self.checkpoints.wait_for_copies()  # a background save may still be copying the weights
        with annotate_errors(Activity.UPDATE):
            is_finite = torch.isfinite(loss) & torch.isfinite(norm)
            is_applied = self.parallel.step(self.optimizer, is_finite & (num_items > 0))
        self.callbacks.fire("on_optimizer_step")
        if is_applied and not self.follows_metric:
            self.scheduler.step()
        self.drop_gradients()
        self.objective.end_step()

        self.loader.advance(step_batch)
        self.rollout_buffer.advance()
        self.state.global_step += 1
        self.state.epoch = step_batch.epoch
        sums = join_metrics_by_name([each.sums for each in losses])
        self.meter.add_step(step_batch, loss, num_items, sums, norm, is_finite, learning_rate)
        if self.parallel.world_size == 1:  # with several processes, counting at each step would be a reduction
            self.count_tokens()
        if self.spikes is not None:
            self.spikes.check(self.parallel, self.state.global_step, step_batch, loss, norm)
        if not is_applied and num_items > 0:  # a step without items has no loss
            cause = "gradient" if torch.isfinite(loss) else "loss"
            numbers = f"loss {loss.item()}, gradient norm {norm.item()}"
            what = f"The {cause} of step {self.state.global_step} is not finite ({numbers})."
            self.stop_at_non_finite(what, step_batch.indices)

    def microstep(self, batch: Batch, divisor: Tensor, is_last: bool) -> Loss:
        """Run forward and backward for one micro-batch. Ranks sync gradients on the last micro-batch of a step only.

        The backend averages gradients over ranks. Multiplying the loss by ``world_size`` turns this mean into a sum.

        Args:
            batch: one micro-batch on the device.
            divisor: () items of the whole step, over all micro-batches and ranks, but at least 1.
            is_last: whether this is the last micro-batch of the step.
        """
        with self.parallel.microbatch(self.model, last=is_last), annotate_errors(Activity.FORWARD, batch):
            loss = self.loss(batch)
            with annotate_errors(Activity.BACKWARD):
                self.parallel.backward(loss.total * (self.parallel.world_size / divisor))
        return loss

    def loss(self, batch: Batch) -> Loss:
        """Compute the loss of one micro-batch as a sum over its items, in the precision of the run."""
        with self.parallel.precision():
            return self.objective.loss(self.model, batch)

    def handle_control(self) -> None:
        """Log, evaluate and save if a callback requested it, in transformers' order."""
        if self.control.should_log:
            self.log()
        if self.control.should_evaluate or self.control.should_save:
            self.count_tokens()
        is_new_best = False
        if self.control.should_evaluate:
            metrics = self.evaluate()
            is_new_best = remember_best(self.state, self.checkpoints, metrics, self.options)
            if self.follows_metric:
                self.scheduler.step(best_model_metric(self.options, metrics))
        if self.control.should_save or (self.options.save_strategy == "best" and is_new_best):
            self.save()

    def count_tokens(self) -> None:
        """Add the tokens of the steps since the last count to the state, which evaluations and checkpoints show."""
        self.meter.count_tokens(self.state, self.parallel, self.flos_per_token)

    def log(self) -> None:
        """Log the means since the last log, and the learning rate of the last step.

        Raises:
            NonFiniteError: if a step since the last log was not finite and ``on_non_finite`` is ``stop``. A device with
                fused updates skips such a step without a device read, so it is only found here.
        """
        means = self.meter.read(self.state, self.parallel, self.flos_per_token)
        if not means:
            return
        values = {**self.objective.report(means), "learning_rate": self.meter.learning_rate}
        has_skipped = self.meter.num_non_finite > 0 and not self.parallel.scales_loss
        if has_skipped:
            values["skipped_steps"] = self.meter.num_non_finite
        self.record(values)
        if has_skipped:
            number = self.meter.run_num_non_finite
            steps = f"{number} {'step' if number == 1 else 'steps'} up to step {self.state.global_step}"
            what = f"{steps} had a loss or a gradient that is not finite."
            self.stop_at_non_finite(what, self.meter.non_finite_indices())

    def record(self, values: dict[str, Any]) -> None:
        """Append ``values`` to ``state.log_history``, and pass them to every callback."""
        values["epoch"] = self.state.epoch
        if self.logs_tokens:
            values["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**values, "step": self.state.global_step})
        self.callbacks.fire("on_log", logs=values)

    def evaluate(self) -> dict[str, float]:
        """Evaluate every evaluation set and log each. Returns the metrics of all sets."""
        metrics: dict[str, float] = {}
        for name, eval_set in self.eval_sets.items():
            metrics |= self.evaluate_set(eval_set, eval_prefix(name))
        self.callbacks.fire("on_evaluate", metrics=metrics)
        return metrics

    @torch.no_grad()
    def evaluate_set(self, eval_set: EvalSet, prefix: str) -> dict[str, float]:
        """Compute and log the mean loss over the items of a whole set, and its metrics.

        Sums over items are divided by the items of the set, so the result does not depend on the batch size.
        """
        clock, totals = Clock(), EvalSums()
        was_training = self.model.training
        self.set_training_mode(False)
        batches = self.objective.iter_eval(self.model, eval_set, self.parallel)
        for batch in track(batches, "Evaluating", "batches", of=eval_set):
            with annotate_errors(Activity.EVALUATE, batch):
                loss = self.loss(batch)
            totals.add(loss, self.objective.num_items(batch))
            self.callbacks.fire("on_prediction_step", done=totals.num_batches, total=len(eval_set))
        self.set_training_mode(was_training)
        means = self.objective.report(totals.means(self.parallel))
        metrics = {f"{prefix}_{name}": value for name, value in means.items()}
        metrics |= clock.rates(prefix, num_rows=eval_set.num_rows, num_steps=totals.num_batches)
        self.record(metrics)
        return metrics

    def save(self) -> None:
        """Save a checkpoint and fire ``on_save``."""
        self.write_checkpoint()
        self.callbacks.fire("on_save")

    def write_checkpoint(self) -> Path:
        """Save everything in ``parts`` as the checkpoint of the current step. Returns its folder."""
        self.meter.reduce_to_rank_0(self.parallel)
        folder = self.checkpoints.path(self.state.global_step)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.stateful_callbacks = self.callbacks.state_dict()
        self.end_epoch_on_request()
        with annotate_errors(Activity.SAVE):
            return self.checkpoints.save(self.state.global_step, self.parts, best=self.state.best_model_checkpoint)

    def load(self, folder: Path) -> None:
        """Load the state of every part from a checkpoint. Planned values (number of steps, intervals) keep their
        current state.

        Raises:
            UserError: if the checkpoint is damaged, lacks a part, or belongs to another optimizer.
        """
        with preserve_plan(self.state):
            load(folder, self.parts, self.parallel.rank)
        if self.parallel.rank:  # the checkpoint contains the sums of all ranks, which rank 0 continues
            self.meter.clear_sums()

    def end_epoch_on_request(self) -> None:
        """End the current epoch if a callback has requested it. A run that is resumed here continues with the next."""
        if self.loader.is_in_epoch and self.control.should_epoch_stop:
            self.loader.is_ended_early = self.loader.has_short_epochs = True

    def finish_epoch(self) -> None:
        """Fire ``on_epoch_end`` and handle the flags. If the epoch has no more steps, the loader moves to the next one
        first; remaining step batches of a rollout are dropped."""
        if self.loader.is_ended_early or self.loader.is_exhausted:
            self.rollout_buffer.clear()
            self.loader.end_epoch()
        self.loader.is_in_epoch = False
        self.callbacks.fire("on_epoch_end")
        self.handle_control()

    def end_training(self) -> TrainOutput:
        """Log the summary of the run, and load the best weights if the options ask for them."""
        unlogged = self.meter.read(self.state, self.parallel, self.flos_per_token)
        metrics = self.summary(unlogged)
        self.record(metrics)
        self.checkpoints.wait()
        if self.options.load_best_model_at_end:
            self.parallel.barrier()  # rank 0 writes checkpoints
        best = self.state.best_model_checkpoint
        if self.options.load_best_model_at_end and best and Path(best).is_dir():  # a failed save has been reported
            for part in self.parts.values():
                if part.is_of_model:
                    load_part(Path(best), part)
        self.callbacks.fire("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def summary(self, unlogged: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the whole run, which are logged at the end of training.

        Args:
            unlogged: means of the steps since the last log; may be empty.
        """
        return {**self.meter.summary(), "total_flos": self.state.total_flos}

    def set_training_mode(self, is_training: bool) -> None:
        """Switch the model and the optimizer between training and evaluation mode."""
        self.model.train(is_training)
        set_optimizer_mode(self.optimizer, is_training)

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def drop_gradients(self) -> None:
        """Drop the gradients of a step, also those of trainable parameters that a script left out of the optimizer."""
        self.optimizer.zero_grad()
        for parameter in self.trainable_parameters():
            parameter.grad = None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that receive gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def describe_rows(self, indices: Sequence[int]) -> str:
        """The records of these rows, in words for messages; "" if they are not known."""
        return ""

    def examples_sentence(self, indices: Sequence[int]) -> str:
        """`` Examples: data.json, record 3.``, to be appended to a message; "" if the records are not known."""
        rows = self.describe_rows(indices) if indices else ""
        return f" Examples: {rows}." if rows else ""

    def stop_at_non_finite(self, what: str, indices: Sequence[int]) -> None:
        """Raise NonFiniteError, unless ``on_non_finite`` is ``skip`` or the steps are part of adjusting a loss scale.

        Args:
            what: a sentence about the loss or the gradient.
            indices: indices of the rows of these steps in the training set.

        Raises:
            NonFiniteError: for steps that were not applied.
        """
        if self.options.on_non_finite == "skip" or self.parallel.scales_loss:
            return
        remedy = "The update was not applied. Lower learning_rate, or set on_non_finite: skip."
        raise NonFiniteError(f"{what}{self.examples_sentence(indices)} {remedy}")


def set_optimizer_mode(optimizer: Any, is_training: bool) -> None:
    """Switch an optimizer with ``train()`` and ``eval()`` (schedule-free optimizers) to one of its modes."""
    swap = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(swap):
        swap()


def sum_of(values: list[Tensor]) -> Tensor:
    """Sum () tensors; returns ()."""
    return torch.stack(values).sum()
