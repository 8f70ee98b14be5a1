"""Training, from the first step to the last. The whole of it is ``train`` and the functions it calls, in this file.

One step, in order:

    take the group              the micro-batches of one step, on this rank
    make ready                  what an objective has to know of the whole step before the first of them
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from burnish.checkpoint.checkpoint import load_part
from burnish.config.errors import NonFiniteError
from burnish.config.options import option
from burnish.loop.best import BestChoices, remember_best
from burnish.loop.meter import Clock, Totals
from burnish.loop.metrics import joined_by_name
from burnish.loop.protocols import EvalSet
from burnish.loop.run import Run
from burnish.loop.types import Batch, Loss, StepBatch
from burnish.utils.activity import Activity, doing
from burnish.utils.work import watched


@dataclass
class LoopOptions:
    """Gradient clipping and non-finite losses."""

    max_grad_norm: float = option(1.0, "Maximum gradient norm for clipping. 0: no clipping.", ge=0)
    logging_nan_inf_filter: bool = option(True, "Exclude NaN and infinite losses from the logged mean.")
    on_non_finite: str = option(
        "stop",
        "What to do after a step whose loss or gradient is not finite: stop, or skip it and continue. Such "
        "a step is never applied.",
        choices=("stop", "skip"),
    )  # fmt: skip


class TrainOutput(NamedTuple):
    """transformers' return value of ``train()``."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class LoopChoices(BestChoices, Protocol):
    """The options that the loop reads."""

    eval_on_start: bool
    max_grad_norm: float
    on_non_finite: str


def train(run: Run, options: LoopChoices) -> TrainOutput:
    """Train from where ``run`` stands to ``max_steps``, or until a callback stops the run.

    Raises:
        NonFiniteError: at a loss or gradient that is not finite, under ``on_non_finite: stop``. The weights are those
            of the last finite step.
    """
    fire = run.callbacks.fire
    run.meter.start()
    set_training_mode(run, is_training=True)
    fire("on_train_begin")
    if options.eval_on_start and run.state.global_step == 0:
        evaluate_all(run)
    while run.state.global_step < run.state.max_steps and not run.control.should_training_stop:
        fire("on_epoch_begin")
        for group in groups(run):
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
    return end_training(run, options)


def groups(run: Run) -> Iterator[StepBatch]:
    """Yield the remaining groups of the current epoch, each as the objective expands it."""
    for group in run.stream.step_batches():
        yield from run.objective.rollout(run, group)


def take_step(run: Run, group: StepBatch, options: LoopChoices) -> None:
    """Update the weights once, from the micro-batches of ``group``."""
    engine, meter = run.engine, run.meter
    learning_rate = run.optimizer.param_groups[0]["lr"]
    batches = run.objective.prepare_step(run.model, [engine.to_device(batch) for batch in group.batches], engine)
    weight = engine.sum(sum_of([run.objective.num_items(batch) for batch in batches]))
    divisor = torch.where(weight > 0, weight, 1)

    losses: list[Loss] = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        losses.append(run.microstep(run, batch, divisor, is_last))
        if not is_last:
            run.callbacks.fire("on_substep_end")

    loss = sum_of([each.total.detach() for each in losses]) / divisor
    norm = engine.clip(trainable(run), options.max_grad_norm)
    run.callbacks.fire("on_pre_optimizer_step")
    with doing(Activity.UPDATE):
        is_applied = engine.step(run.optimizer, torch.isfinite(loss) & torch.isfinite(norm))
    run.callbacks.fire("on_optimizer_step")
    if is_applied:
        run.schedule.after_step()
    run.optimizer.zero_grad()

    run.stream.advance(group)
    run.state.global_step += 1
    run.state.epoch = group.epoch
    meter.add_step(loss, weight, joined_by_name([each.sums for each in losses]), norm, learning_rate, group.items)
    meter.add_rows(group.num_rows, group.num_tokens)
    run.watch(engine, run.state.global_step, group, loss, norm)
    if not is_applied:
        which = "gradient" if torch.isfinite(loss) else "loss"
        numbers = f"loss {loss.item()}, gradient norm {norm.item()}"
        what = f"The {which} of step {run.state.global_step} is not finite ({numbers})."
        stop_at_non_finite(run, options, what, group.items)


def microstep(run: Run, batch: Batch, weight: Tensor, is_last: bool) -> Loss:
    """Run forward and backward for one micro-batch. Ranks sync gradients on the last micro-batch of a group only.

    The engine averages gradients over ranks; the factor ``world_size`` makes a sum of that mean.

    Args:
        weight: () of the whole step, over all micro-batches and ranks; positive.
    """
    with run.engine.microbatch(run.model, last=is_last), doing(Activity.FORWARD, batch):
        with run.engine.precision():
            loss = run.objective.loss(run.model, batch)
        with doing(Activity.BACKWARD):
            run.engine.backward(loss.total * (run.engine.world_size / weight))
    return loss


def answer(run: Run, options: LoopChoices) -> None:
    """Log, evaluate and save where a callback asked for it, in transformers' order."""
    if run.control.should_log:
        log_step(run, options)
    is_new_best = False
    if run.control.should_evaluate:
        metrics = evaluate_all(run)
        is_new_best = remember_best(run.state, run.checkpoints, metrics, options)
        run.schedule.after_evaluation(metrics)
    if run.control.should_save or (options.save_strategy == "best" and is_new_best):
        save(run)


def log_step(run: Run, options: LoopChoices) -> None:
    """Log the means since the last log, with the learning rate that the last step used."""
    means = run.meter.read(run.state, run.engine, run.flos_per_token)
    if not means:
        return
    values = {**run.objective.report(means), "learning_rate": run.meter.learning_rate}
    has_skipped = run.meter.num_skipped > 0 and not run.engine.scales_loss
    if has_skipped:
        values["skipped_steps"] = run.meter.num_skipped
    run.log(run, values)
    if has_skipped:
        many = f"{run.meter.run_non_finite} steps up to step {run.state.global_step}"
        what = f"{many} had a loss or a gradient that is not finite."
        stop_at_non_finite(run, options, what, run.meter.skipped_items())


def log(run: Run, values: dict[str, Any]) -> None:
    """Append ``values`` to ``state.log_history``, and pass them to every callback."""
    values["epoch"] = run.state.epoch
    if run.logs_tokens:
        values["num_input_tokens_seen"] = run.state.num_input_tokens_seen
    run.state.log_history.append({**values, "step": run.state.global_step})
    run.callbacks.fire("on_log", logs=values)


def evaluate_all(run: Run) -> dict[str, float]:
    """Evaluate every evaluation set, and log each. Returns their metrics together."""
    metrics: dict[str, float] = {}
    for name, eval_set in run.eval_sets.items():
        metrics |= run.evaluate(run, eval_set, f"eval_{name}" if name else "eval")
    run.callbacks.fire("on_evaluate", metrics=metrics)
    return metrics


@torch.no_grad()
def evaluate(run: Run, eval_set: EvalSet, prefix: str) -> dict[str, float]:
    """Compute and log the mean loss over the items of a whole set, and its metrics.

    Sums over items are divided by the weight of the set, so the result does not depend on the batch size.
    """
    clock, totals = Clock(), Totals()
    set_training_mode(run, is_training=False)
    batches = run.objective.iter_eval(run.model, eval_set, run.engine)
    for batch in watched(batches, "Evaluating", "batches", of=eval_set):
        with doing(Activity.EVALUATE, batch), run.engine.precision():
            loss = run.objective.loss(run.model, batch)
        totals.add(loss, run.objective.num_items(batch))
        run.callbacks.fire("on_prediction_step")
    set_training_mode(run, is_training=True)
    metrics = {f"{prefix}_{name}": value for name, value in run.objective.report(totals.means(run.engine)).items()}
    metrics |= clock.rates(prefix, num_rows=eval_set.num_rows, num_steps=totals.num_batches)
    run.log(run, metrics)
    return metrics


def save(run: Run) -> None:
    """Save a checkpoint of everything in ``run.parts``."""
    run.meter.collect(run.engine)
    folder = run.checkpoints.path(run.state.global_step)
    if run.state.best_global_step == run.state.global_step:
        run.state.best_model_checkpoint = str(folder)
    run.state.stateful_callbacks = run.callbacks.state_dict()
    with doing(Activity.SAVE):
        run.checkpoints.save(run.state.global_step, run.parts, best=run.state.best_model_checkpoint)
    run.callbacks.fire("on_save")


def end_training(run: Run, options: LoopChoices) -> TrainOutput:
    """Log the summary of the run, and load the best weights if the options ask for them."""
    run.meter.read(run.state, run.engine, run.flos_per_token)
    metrics = {**run.meter.summary(), "total_flos": run.state.total_flos}
    run.log(run, metrics)
    run.checkpoints.wait()
    best = run.state.best_model_checkpoint
    if options.load_best_model_at_end and best and Path(best).is_dir():  # not there: not saved, which was said
        load_part(Path(best), run.parts["model"])
    run.callbacks.fire("on_train_end")
    return TrainOutput(run.state.global_step, metrics["train_loss"], metrics)


# --- small functions used above ---------------------------------------------------------------------------------------


def set_training_mode(run: Run, is_training: bool) -> None:
    """Switch dropout and the like on or off."""
    run.model.train(is_training)
    set_optimizer_mode(run.optimizer, is_training)


def set_optimizer_mode(optimizer: Any, is_training: bool) -> None:
    """Give the model the weights for training, or those for use, where the optimizer has both (schedule-free ones)."""
    swap = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(swap):
        swap()


def trainable(run: Run) -> list[torch.nn.Parameter]:
    """The parameters that the optimizer moves."""
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def sum_of(values: list[Tensor]) -> Tensor:
    """Add () tensors up in their order; returns ()."""
    return torch.stack(values).sum()


def learned_from(run: Run, items: Sequence[int]) -> str:
    """`` Learned from: data.json, record 3.``; nothing where the records are not known."""
    where = run.where(items) if items else ""
    return f" Learned from: {where}." if where else ""


def stop_at_non_finite(run: Run, options: LoopChoices, what: str, items: Sequence[int]) -> None:
    """Raise for steps that were not applied, unless such steps are skipped, or are part of finding a loss scale.

    Args:
        what: a sentence on the loss or the gradient.
        items: the rows of these steps, as groups name them.
    """
    if options.on_non_finite == "skip" or run.engine.scales_loss:
        return
    rows = learned_from(run, items)
    raise NonFiniteError(f"{what}{rows} It was not applied. Lower learning_rate, or set on_non_finite: skip.")
