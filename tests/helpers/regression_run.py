"""A two-layer regression with dropout on the real loop, loader and checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from burnish.checkpoint.checkpoint import CheckpointOptions, Checkpoints
from burnish.config.options import union
from burnish.data.batches.loader import EvalBatches, LoaderOptions, RowLoader, StepPartition
from burnish.loop.events import CallbackHandler, DefaultFlowCallback, IntervalOptions, TrainerCallback
from burnish.loop.loop import Loop, LoopOptions
from burnish.loop.protocols import Objective
from burnish.loop.schedule import LRScheduleOptions, StepOptions, plan_steps
from burnish.loop.spikes import SpikeOptions
from burnish.loop.state import TrainerControl, TrainerState
from burnish.loop.types import Loss
from burnish.optim.badam import BadamOptions
from burnish.optim.builtin import OptimOptions, create_optimizer, create_scheduler
from burnish.parallel.single import ParallelOptions, SingleProcess

RegressionOptions = union(
    "ToyOptions", StepOptions, LRScheduleOptions, IntervalOptions, LoopOptions, CheckpointOptions, OptimOptions,
    LoaderOptions, ParallelOptions, BadamOptions, SpikeOptions,
)  # fmt: skip


class Regression(nn.Module):
    def __init__(self, dropout=0.1, width=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, inputs):
        return self.net(inputs).squeeze(-1)


@dataclass
class RegressionObjective(Objective):
    """The sum of squared errors over rows whose label is not ignored."""

    def collate(self, rows):
        return {"input_ids": torch.stack([r[0] for r in rows]), "labels": torch.stack([r[1] for r in rows])}

    def num_items(self, batch):
        return (batch["labels"] != -100).sum().float()

    def loss(self, model, batch):
        error = model(batch["input_ids"]) - batch["labels"]
        keep = batch["labels"] != -100
        return Loss((error.square() * keep).sum(), {"abs_error": (error.abs() * keep).sum()})


def rows(num=22, seed=3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 4, generator=generator)
    return list(zip(inputs, inputs.sum(1).tanh(), strict=True))


def make_run(
    folder: Path,
    callbacks=(),
    dropout=0.1,
    num_rows=22,
    eval_rows=0,
    model=None,
    objective=None,
    **overrides,
):
    """Return a loop and its options."""
    overrides = {
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "num_train_epochs": 2,
        **overrides,
    }
    options = RegressionOptions(**overrides)
    torch.manual_seed(options.seed)
    model = model or Regression(dropout)
    objective, engine = objective or RegressionObjective(), SingleProcess(options)
    optimizer = create_optimizer(model.named_parameters(), model, options)
    model, optimizer = engine.prepare(model, optimizer)
    steps = plan_steps(options, num_rows, inner_steps=objective.inner_steps)
    scheduler = create_scheduler(optimizer, options, steps.max_steps, options.learning_rate)
    state = TrainerState.at_start(options, steps, options.per_device_train_batch_size)
    partition = StepPartition(options.per_device_train_batch_size, options.gradient_accumulation_steps)
    loader = RowLoader(rows(num_rows), objective.collate, partition, seed=options.seed, options=options)
    handler = CallbackHandler([DefaultFlowCallback(), *callbacks], options, state, TrainerControl(), model=model)
    checkpoints = Checkpoints(
        folder, limit=options.save_total_limit, in_background=options.save_in_background, listeners=handler,
        copies_later=True,
    )  # fmt: skip
    sets = {"": EvalBatches(rows(eval_rows, seed=9), objective.collate, options.per_device_eval_batch_size)}
    run = Loop(
        options, model=model, weights=Weights(model), objective=objective, parallel=engine, loader=loader,
        optimizer=optimizer, scheduler=scheduler, callbacks=handler, checkpoints=checkpoints,
        eval_sets=sets if eval_rows else {},
    )  # fmt: skip
    return run, options


class Weights:
    """The weights of a model as a part of checkpoints."""

    file_stem = "model"

    def __init__(self, model):
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_times(history):
    return [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in history]


class StopAt(TrainerCallback):
    """Saves a checkpoint after a step and stops the run."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True
