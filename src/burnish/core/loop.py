"""Training, from the first step to the last. The whole of it is ``train`` and the functions it calls, in this file.

One step, in order:

    take the group              the micro-batches of one step, on this rank
    count its weight            the items (label-bearing tokens, say) of all micro-batches and all ranks
    per micro-batch             forward, then backward on its share: total / weight
    clip, then update           unless the loss or a gradient is not finite
    schedule, state, cursor     move on together
    callbacks                   raise flags: log, evaluate, save, stop
    answer                      the flags, in that order

Because a micro-batch adds ``total / weight of the whole step``, the update does not depend on how the step was cut
into micro-batches, padded, packed or spread over ranks. Because the stream's order is a function of (seed, epoch), an
evaluation in between cannot disturb it. Because everything that changes is in ``run.parts``, a run that was stopped
goes on as if it had not been.

The loop knows *when*; an ``Objective`` knows *what*. No method of training has a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.core.checkpoint import load_part
from burnish.core.early_stopping import deciding_metric, is_higher_better
from burnish.core.errors import NonFiniteError
from burnish.core.events import EVENTS
from burnish.core.meter import Clock, Totals
from burnish.core.options import option
from burnish.core.types import Batch, Group, Loss, Run


@dataclass
class LoopOptions:
    """What the loop itself asks for."""

    max_grad_norm: float = option(1.0, "Gradients longer than this are scaled down to it; 0 leaves them.", ge=0)
    logging_nan_inf_filter: bool = option(True, "Leave NaN and infinite losses out of the logged mean.")
    on_non_finite: str = option(
        "stop", "A step whose loss or gradient is not finite is never applied; then stop, or skip it and go on.",
        choices=("stop", "skip"),
    )  # fmt: skip


class TrainOutput(NamedTuple):
    """transformers' return value of ``train()``."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def train(run: Run, options: Any) -> TrainOutput:
    """From where ``run`` stands to ``max_steps``, or until a callback stops it.

    Raises:
        NonFiniteError: at a loss or gradient that is not finite, under ``on_non_finite: stop``. The weights are those
            of the last finite step.
    """
    fire = run.callbacks.fire
    run.meter.start()
    switch(run, is_training=True)
    fire("on_train_begin")
    if options.eval_on_start and run.state.global_step == 0:
        evaluate_all(run)
    while run.state.global_step < run.state.max_steps and not run.control.should_training_stop:
        fire("on_epoch_begin")
        for group in run.stream.groups():
            fire("on_step_begin")
            take_step(run, group, options)
            fire("on_step_end")
            answer(run, options)
            if run.control.should_epoch_stop or run.control.should_training_stop:
                break
        if run.control.should_epoch_stop or run.stream.is_used_up:
            run.stream.end_epoch()
        fire("on_epoch_end")
        answer(run, options)
    return finish(run, options)


def take_step(run: Run, group: Group, options: Any) -> None:
    """One update of the weights from the micro-batches of ``group``."""
    engine, meter = run.engine, run.meter
    learning_rate = run.optimizer.param_groups[0]["lr"]
    batches = [engine.to_device(batch) for batch in group.batches]
    weight = engine.sum(sum_of([run.objective.weight(batch) for batch in batches]))
    share = 1 / torch.where(weight > 0, weight, 1)

    losses: list[Loss] = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        losses.append((run.microstep or microstep)(run, batch, share, is_last))
        if not is_last:
            run.callbacks.fire("on_substep_end")

    loss = sum_of([loss.total.detach() for loss in losses]) * share
    norm = engine.clip(trainable(run), options.max_grad_norm)
    run.callbacks.fire("on_pre_optimizer_step")
    run.checkpoints.settle()  # the last moment at which the weights are those that a checkpoint under way saves
    is_applied = engine.step(run.optimizer, torch.isfinite(loss) & torch.isfinite(norm))
    run.callbacks.fire("on_optimizer_step")
    if is_applied and not follows_metric(run.scheduler):
        run.scheduler.step()
    run.optimizer.zero_grad()

    run.stream.advance(group)
    run.state.global_step += 1
    run.state.epoch = group.epoch
    meter.add_step(loss, weight, summed([loss.sums for loss in losses]), norm, learning_rate)
    meter.add_rows(group.num_rows, group.num_tokens)
    if options.on_non_finite == "stop" and not is_applied and not engine.scales_loss:
        raise non_finite(run, loss, norm)


def microstep(run: Run, batch: Batch, share: Tensor, is_last: bool) -> Loss:
    """Forward and backward of one micro-batch. Gradients are synced between ranks on the last of a group only.

    The engine averages gradients over ranks, hence the factor ``world_size``: what is wanted is their sum.
    """
    with run.engine.microbatch(run.model, last=is_last):
        with run.engine.precision():
            loss = run.objective.loss(run.model, batch)
        run.engine.backward(loss.total * (share * run.engine.world_size))
    return loss


def answer(run: Run, options: Any) -> None:
    """Log, evaluate and save where a callback asked for it, in transformers' order."""
    if run.control.should_log:
        log_step(run, options)
    is_new_best = False
    if run.control.should_evaluate:
        metrics = evaluate_all(run)
        is_new_best = remember_best(run, metrics, options)
        if follows_metric(run.scheduler):
            run.scheduler.step(deciding_metric(options, metrics))
    if run.control.should_save or (options.save_strategy == "best" and is_new_best):
        save(run)


def log_step(run: Run, options: Any) -> None:
    """The means since the last log, with the learning rate that the last step used."""
    learning_rate = run.meter.learning_rate
    before = run.meter.run_non_finite
    means = run.meter.read(run.state, run.engine, run.flos_per_token)
    if not means:
        return
    skipped = 0 if run.engine.scales_loss else run.meter.run_non_finite - before
    log(run, {**means, "learning_rate": learning_rate} | ({"skipped_steps": skipped} if skipped else {}))
    if skipped and options.on_non_finite == "stop":
        raise NonFiniteError(f"{run.meter.run_non_finite} steps up to step {run.state.global_step} were not finite.")


def log(run: Run, values: dict[str, Any]) -> None:
    """Into ``state.log_history``, and to every callback."""
    if run.log is not None:
        return run.log(run, values)
    if run.state.epoch is not None:
        values["epoch"] = run.state.epoch
    if run.logs_tokens:
        values["num_input_tokens_seen"] = run.state.num_input_tokens_seen
    run.state.log_history.append({**values, "step": run.state.global_step})
    run.callbacks.fire("on_log", logs=values)


def evaluate_all(run: Run) -> dict[str, float]:
    """Every evaluation set, logged one by one. Returns their metrics together."""
    metrics: dict[str, float] = {}
    for name, batches in run.eval_sets.items():
        metrics |= run.evaluate(run, batches, f"eval_{name}" if name else "eval")
    run.callbacks.fire("on_evaluate", metrics=metrics)
    return metrics


@torch.no_grad()
def evaluate(run: Run, batches: Iterable[Batch], prefix: str) -> dict[str, float]:
    """The mean loss over the items of a whole set, and its metrics; logged.

    Sums over items divided by the weight of the set: the result does not depend on the batch size.
    """
    clock, totals = Clock(), Totals()
    switch(run, is_training=False)
    for batch in batches:
        batch = run.engine.to_device(batch)
        with run.engine.precision():
            loss = run.objective.loss(run.model, batch)
        totals.add(loss, run.objective.weight(batch))
        run.callbacks.fire("on_prediction_step")
    switch(run, is_training=True)
    metrics = {f"{prefix}_{name}": value for name, value in totals.means(run.engine).items()}
    metrics |= clock.rates(prefix, num_rows=getattr(batches, "num_rows", None), num_steps=totals.num_batches)
    log(run, metrics)
    return metrics


def remember_best(run: Run, metrics: dict[str, float], options: Any) -> bool:
    """Whether this evaluation is the best so far; ``state`` keeps it if so."""
    if not (options.load_best_model_at_end or options.save_strategy == "best" or options.metric_for_best_model):
        return False
    value, best = deciding_metric(options, metrics), run.state.best_metric
    if best is not None and not (value > best if is_higher_better(options) else value < best):
        return False
    if value != value:  # NaN would stay the best for ever, because nothing compares with it
        return False
    run.state.best_metric, run.state.best_global_step = value, run.state.global_step
    if run.checkpoints.last_step == run.state.global_step:  # saved by steps, then evaluated at the end of the epoch
        run.state.best_model_checkpoint = str(run.checkpoints.path(run.state.global_step))
    return True


def save(run: Run) -> None:
    """A checkpoint of everything in ``run.parts``."""
    run.meter.collect(run.engine)
    folder = run.checkpoints.path(run.state.global_step)
    if run.state.best_global_step == run.state.global_step:
        run.state.best_model_checkpoint = str(folder)
    run.state.stateful_callbacks = run.callbacks.state_dict()
    # Only an update changes a weight, as far as burnish's own code goes; of other code nobody knows.
    is_ours = run.microstep is None and not any(run.callbacks.strangers(event) for event in EVENTS)
    run.checkpoints.save(run.state.global_step, run.parts, best=run.state.best_model_checkpoint, copies_later=is_ours)
    if run.callbacks.strangers("on_save"):
        run.checkpoints.wait()  # someone else's callback may read or upload the folder
    run.callbacks.fire("on_save")


def finish(run: Run, options: Any) -> TrainOutput:
    """The summary of the run, and the best weights if they were asked for."""
    run.meter.read(run.state, run.engine, run.flos_per_token)
    metrics = {**run.meter.summary(), "total_flos": run.state.total_flos}
    log(run, metrics)
    run.checkpoints.wait()
    if options.load_best_model_at_end and run.state.best_model_checkpoint:
        load_part(Path(run.state.best_model_checkpoint), "model", run.parts["model"])
    run.callbacks.fire("on_train_end")
    return TrainOutput(run.state.global_step, metrics["train_loss"], metrics)


# --- small words used above -------------------------------------------------------------------------------------------


def switch(run: Run, is_training: bool) -> None:
    """Dropout and its like on or off; schedule-free optimizers keep two sets of weights and switch too."""
    run.model.train(is_training)
    swap = getattr(run.optimizer, "train" if is_training else "eval", None)
    if callable(swap):
        run.checkpoints.settle()
        swap()


def trainable(run: Run) -> list[torch.nn.Parameter]:
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def sum_of(values: list[Tensor]) -> Tensor:
    """() the sum of () tensors, in their order."""
    return torch.stack(values).sum()


def summed(dicts: list[Any]) -> dict[str, Tensor]:
    return {name: sum_of([d[name].detach() for d in dicts]) for name in (dicts[0] if dicts else {})}


def follows_metric(scheduler: Any) -> bool:
    """Whether the schedule moves with an evaluation's metric rather than with the steps."""
    return type(scheduler).__name__ in {"ReduceLROnPlateau", "GreedyLR"}


def non_finite(run: Run, loss: Tensor, norm: Tensor) -> NonFiniteError:
    what = "loss" if not torch.isfinite(loss) else "gradient"
    return NonFiniteError(
        f"The {what} of step {run.state.global_step} is not finite (loss {loss.item()}, gradient norm {norm.item()}). "
        "The step was not applied. Lower learning_rate, or set on_non_finite: skip."
    )
