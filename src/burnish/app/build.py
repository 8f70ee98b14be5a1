"""Plan -> Run, and the run from its first line to its last file. Read top to bottom:

prepare     tokenizer, template, records -> rows; nothing is written, no weight is read (prepare.py)
assemble    model, adapter, engine, optimizer, stream, callbacks, checkpoints -> Run
resume      from the newest whole checkpoint, if it is this run's (resume.py)
train       core/loop.py
finish      evaluate, save, plot, describe (finish.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from burnish.adapters.base import ADAPTERS, ModelAdapter, ModelState, parameter_lines, set_precision, trainable_summary
from burnish.adapters.lora import learning_rates
from burnish.app.callbacks import callbacks_of
from burnish.app.checks import FINISHED_NAME, trains
from burnish.app.failure import TRACEBACK_NAME
from burnish.app.finish import finish
from burnish.app.interrupt import InterruptCallback
from burnish.app.plan import Plan
from burnish.app.prepare import Prepared, item_lengths, prepare
from burnish.app.resume import accumulation_for, clear, resume, start_of
from burnish.core.checkpoint import Checkpoints, RngState, only_writer
from burnish.core.collection import collect_from_here
from burnish.core.events import CallbackHandler
from burnish.core.loop import TrainOutput, evaluate, train
from burnish.core.meter import Meter
from burnish.core.schedule import StepPlan
from burnish.core.state import TrainerControl, TrainerState
from burnish.core.types import Engine, Run
from burnish.data.ahead import going_ahead
from burnish.data.batching import collator, packs_rows
from burnish.data.budget import Budget
from burnish.data.stream import Cut, EvalBatches, RowStream
from burnish.engine.base import create_engine, set_seed
from burnish.engine.options import local_rank
from burnish.models.attention import Layout, lay_flat
from burnish.models.attention_choice import asked_attention
from burnish.models.fused import fuse
from burnish.models.liger import apply_liger, takes_liger
from burnish.models.load import load_model, raise_if_not_finite
from burnish.models.quantize import is_quantised
from burnish.models.save import save_config
from burnish.models.source import adapter_folders
from burnish.models.tokens import fit_vocabulary
from burnish.ops.kernels import kernel_notes
from burnish.ops.probe import shares_prefixes
from burnish.optim.builtin import OPTIMIZERS, create_optimizer, create_scheduler
from burnish.report.console import note, set_log_levels, warn
from burnish.report.options import counts_tokens
from burnish.report.profile import watch
from burnish.report.progress import RunFacts
from burnish.report.results import parameters_without_embeddings


@dataclass(frozen=True)
class Result:
    """What ``train_run`` leaves behind."""

    output: TrainOutput | None  # None where there was nothing left to do
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    exit_code: int | None = None  # 128 + signal where one cut the run short


def train_run(plan: Plan) -> Result:
    """The whole of ``burnish train``.

    Raises:
        UserError: for what the user gave; before anything is written, but for a model whose weights do not fit.
    """
    prepared = prepare(plan)
    for sentence in (*plan.notes, *prepared.notes):
        note(sentence)
    for sentence in prepared.tally.sentences():
        warn(sentence)
    with going_ahead(prepared.rows):
        return run_prepared(plan, prepared)


def run_prepared(plan: Plan, prepared: Prepared) -> Result:
    """From the engine to the last file."""
    options, folder = plan.options, Path(plan.options.output_dir)
    engine = create_engine(options)
    set_log_levels(options, engine.rank == 0, local_rank() == 0)

    def any_rank(asked: bool) -> bool:
        """Ranks hear of a signal at different moments and must stop at the same step; one read per step."""
        return asked if engine.world_size == 1 else bool(engine.sum(torch.tensor(float(asked), device=engine.device)))

    with only_writer(folder) if engine.rank == 0 else nullcontext(), InterruptCallback(any_rank) as interrupt:
        start = start_of(plan, prepared.fingerprints, prepared.steps)
        for sentence in filter(None, (*start.notes, start.done)):
            note(sentence)
        if start.done:
            return Result(None, folder)
        found = start.checkpoint
        if engine.rank == 0:
            Checkpoints(folder).sweep()
            for name in (TRACEBACK_NAME, FINISHED_NAME):  # of a failure that this run makes good, or of fewer steps
                (folder / name).unlink(missing_ok=True)
            if found is None and options.overwrite_output_dir:
                clear(folder)
        engine.barrier()
        run = assemble(plan, prepared, engine, found, [interrupt])
        if found is not None:
            resume(run, found)
        if options.profile:
            watch(run, folder / "profile", options)
        collect_from_here()
        try:
            output = train(run, options) if trains(options) else None
        finally:
            run.checkpoints.wait()  # one that is under way is whole before the folder is let go
        if interrupt.exit_code is not None:
            return Result(output, folder, exit_code=interrupt.exit_code)
        return Result(output, folder, finish(run, plan, prepared, output))


# --- assemble ---------------------------------------------------------------------------------------------------------


def assemble(plan: Plan, prepared: Prepared, engine: Engine, found: Path | None, callbacks: Sequence[Any] = ()) -> Run:
    """Every part of the run, made in the order in which each needs the one before it."""
    options, objective, steps = plan.options, prepared.objective, prepared.steps
    set_seed(options.seed, options.full_determinism)
    adapter = ADAPTERS[options.finetuning_type](options, adapter_folders(options))
    model = trained_model(prepared, adapter, engine, options)
    lies_flat, sentences = fit_objective(objective, model, prepared.tokenizer, options)
    for sentence in sentences:
        note(sentence)

    optimizer = create_optimizer(model.named_parameters(), model, options, learning_rates(model, options))
    wrapped, optimizer = engine.prepare(objective.module(model), optimizer)
    scheduler = create_scheduler(optimizer, options, steps.max_steps, options.learning_rate)
    accumulation = accumulation_for(found, options, engine.world_size)
    budget = Budget(options.max_tokens_per_batch, pads=not lies_flat) if options.max_tokens_per_batch else None
    stream = row_stream(prepared, options, engine, accumulation, budget)
    state, control = first_state(options, steps, engine), TrainerControl()
    facts = RunFacts(
        len(prepared.rows), min(options.num_train_epochs, steps.num_train_epochs), options.per_device_train_batch_size,
        accumulation, engine.world_size, steps.max_steps, *trainable_summary(model),
    )  # fmt: skip
    listeners = CallbackHandler(
        callbacks_of(options, facts, callbacks), options, state, control, model=model,
        processing_class=prepared.tokenizer, optimizer=optimizer, lr_scheduler=scheduler, train_dataloader=stream,
        eval_dataloader=None,
    )  # fmt: skip
    meter = Meter(engine.device, options.logging_nan_inf_filter)
    parts = {
        "model": ModelState(model, adapter), "optimizer": optimizer, "scheduler": scheduler, "stream": stream,
        "state": state, "callbacks": listeners, "meter": meter, "rng": RngState(), **getattr(engine, "parts", {}),
    }  # fmt: skip
    if options.save_only_model:
        parts = {name: parts[name] for name in ("model", "state")}
    listeners.fire("on_init_end")
    return Run(
        model=wrapped, objective=objective, engine=engine, stream=stream, optimizer=optimizer, scheduler=scheduler,
        state=state, control=control, callbacks=listeners, meter=meter, parts=parts,
        eval_sets=eval_sets(prepared, options, engine, budget), evaluate=evaluate,
        flos_per_token=6 * parameters_without_embeddings(model), logs_tokens=counts_tokens(options),
        checkpoints=checkpoints_of(prepared, options, engine, adapter, model),
    )  # fmt: skip


def trained_model(prepared: Prepared, adapter: ModelAdapter, engine: Engine, options: Any) -> Any:
    """The model with its weights, on its device, and what moves in the format in which it moves."""
    notes: list[str] = []
    device = engine.device if is_quantised(options, prepared.config) else None  # its kernels are chosen for a device
    model = load_model(options, dtype=load_dtype(options, engine), device=device, config=prepared.config, notes=notes)
    raise_if_not_finite(model, options.model_name_or_path)
    fit_vocabulary(model, prepared.tokenizer, options, notes)
    model = adapter.attach(model)
    set_precision(model, trainable_dtype(options, model, engine))
    model.to(engine.device)  # before the optimizer, which may keep copies of weights
    for sentence in (*notes, *adapter.notes, *parameter_lines(model, options)):
        note(sentence)
    return model


def row_stream(prepared: Prepared, options: Any, engine: Engine, accumulation: int, budget: Budget | None) -> RowStream:
    cut = Cut(
        options.per_device_train_batch_size, accumulation, engine.world_size, engine.rank, options.dataloader_drop_last,
        budget,
    )  # fmt: skip
    return RowStream(
        prepared.rows, prepared.objective.collate, cut,
        seed=options.seed if options.data_seed is None else options.data_seed, options=options,
        lengths=item_lengths(prepared.sample) if prepared.sample is prepared.rows else None,
        buffer_size=options.buffer_size if options.streaming else None,
    )  # fmt: skip


def eval_sets(prepared: Prepared, options: Any, engine: Engine, budget: Budget | None) -> dict[str, EvalBatches]:
    return {
        name: EvalBatches(
            rows, prepared.objective.collate, options.per_device_eval_batch_size, engine.world_size, engine.rank,
            budget, item_lengths(rows),
        )
        for name, rows in prepared.eval_rows.items()
    }  # fmt: skip


def first_state(options: Any, steps: StepPlan, engine: Engine) -> TrainerState:
    state = TrainerState(
        max_steps=steps.max_steps, num_train_epochs=steps.num_train_epochs,
        train_batch_size=options.per_device_train_batch_size,
        is_local_process_zero=engine.rank == 0, is_world_process_zero=engine.rank == 0,
    )  # fmt: skip
    state.compute_steps(options, steps.max_steps)
    return state


def checkpoints_of(prepared: Prepared, options: Any, engine: Engine, adapter: ModelAdapter, model: Any) -> Checkpoints:
    """The checkpoints of the run, each with what makes it loadable elsewhere."""

    def write_extras(target: Path) -> None:
        if adapter.saves_whole_model:
            save_config(model, target)
        else:
            adapter.save_config(model, str(target))
        prepared.tokenizer.save_pretrained(target)

    return Checkpoints(
        options.output_dir, fingerprints=prepared.fingerprints(), write_extras=write_extras,
        limit=options.save_total_limit, in_background=options.save_in_background, rank=engine.rank,
        barrier=engine.barrier,
    )  # fmt: skip


def fit_objective(objective: Any, model: Any, tokenizer: Any, options: Any) -> tuple[bool, list[str]]:
    """Choose between flat and padded batches, and find the way through layers and head.

    Returns:
        whether batches lie flat, and sentences for a person.
    """
    layout, device, said = Layout(False), next(model.parameters()).device, []
    if takes_liger(options, device) and not (options.torch_compile and options.enable_liger_kernel is None):
        said = apply_liger(model, options.liger_kernel_config, is_asked=options.enable_liger_kernel is not None)
    if not options.torch_compile:  # a compiler fuses by itself
        fuse(model)
        said = [*said, *kernel_notes(device)]
    if wants_flat(options):
        layout = lay_flat(model, own_attention=asked_attention(options) is None)
    needed_only = layout.is_flat and computes_needed_only(objective, model, options)
    if options.needed_tokens_only and not needed_only:
        what = "rows are padded, or model or loss draw at random, or go over all of them"
        said = [*said, f"All tokens are computed, needed or not: {what}."]
    notes = objective.fit(model, collator(options, tokenizer.pad_token_id, layout.is_flat, needed_only))
    return layout.is_flat, [sentence for sentence in (layout.note, *said, *notes) if sentence]


def wants_flat(options: Any) -> bool:
    """Whether rows are to be laid end to end; the model has the last word."""
    return bool(options.padding_free or packs_rows(options, options.stage))


def wants_needed_only(objective: Any, model: Any, options: Any, device: torch.device) -> bool:
    """Whether tokens are to be left out that nothing depends on: as asked or on a CPU, if the loss allows it. ``model``
    need have no weights."""
    is_usual = device.type == "cpu" and not options.torch_compile
    wanted = is_usual if options.needed_tokens_only is None else options.needed_tokens_only
    allows = getattr(objective, "allows_needed_only", None)  # an objective of a plugin need not know of it
    return bool(wanted and allows is not None and allows(model))


def computes_needed_only(objective: Any, model: Any, options: Any) -> bool:
    """Whether they are left out: if the model, asked, is seen to allow it too."""
    wanted = wants_needed_only(objective, model, options, next(model.parameters()).device)
    return wanted and shares_prefixes(model)


def load_dtype(options: Any, engine: Any) -> Any:
    """Weights that train are loaded as they are and raised to float32; others in the format they compute in."""
    if options.pure_bf16:
        return torch.bfloat16
    trains_all = trains(options) and options.finetuning_type == "full" and not keeps_load_precision(options)
    return "auto" if trains_all or getattr(engine, "dtype", None) is None else engine.dtype


def trainable_dtype(options: Any, model: Any, engine: Any) -> torch.dtype:
    """Of what the method trains; in a run that only evaluates or predicts, as the other weights."""
    if options.pure_bf16:
        return torch.bfloat16
    loaded: torch.dtype = next(model.parameters()).dtype
    if not trains(options):
        return getattr(engine, "dtype", None) or loaded
    return loaded if keeps_load_precision(options) else torch.float32


def keeps_load_precision(options: Any) -> bool:
    """Whether the optimizer keeps float32 copies of its own."""
    return bool(OPTIMIZERS.choose(options.optim, options).traits.get("keeps_load_precision"))
