"""Plan -> Run, and the run from its first line to its last file. Read top to bottom:

    prepare     tokenizer, template, records -> rows; nothing is written, no weight is read
    assemble    model, adapter, engine, optimizer, stream, callbacks, checkpoints -> Run
    resume      from the newest whole checkpoint, if it is this run's
    train       core/loop.py
    finish      evaluate, save, plot, describe

Everything a user can have done wrong is refused by ``prepare`` or before it; ``explain`` stops there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from burnish.adapters.base import ADAPTERS, ModelState, parameter_lines, set_precision, trainable_summary
from burnish.adapters.lora import learning_rates
from burnish.app.callbacks import callbacks_of
from burnish.app.checks import FINISHED_NAME, may_run_ahead, step_notes, trains
from burnish.app.failure import TRACEBACK_NAME
from burnish.app.fingerprints import fingerprints_of
from burnish.app.interrupt import InterruptCallback
from burnish.app.plan import Plan
from burnish.app.predict import predict_all
from burnish.app.resources import check_disk, sizes_of
from burnish.app.resume import accumulation_for, clear, resume, start_of, write_finished
from burnish.core.checkpoint import Checkpoints, RngState, only_writer
from burnish.core.errors import Problem, UserError
from burnish.core.events import CallbackHandler
from burnish.core.loop import TrainOutput, evaluate, evaluate_all, save, switch, train
from burnish.core.meter import Meter
from burnish.core.options import raise_if
from burnish.core.schedule import NO_STEPS, StepPlan, check_curve, plan_steps
from burnish.core.state import TrainerControl, TrainerState
from burnish.core.types import Engine, Example, Row, Run
from burnish.data.ahead import AheadRows, ahead_notes, encode_ahead, going_ahead
from burnish.data.batching import collator, lengths_of, packed, packs_rows, splits_rows
from burnish.data.budget import Budget, check_budget
from burnish.data.examples import LazyExamples
from burnish.data.prepare import prepare as prepare_rows
from burnish.data.rows import Template
from burnish.data.sources import DataSets, load_datasets
from burnish.data.stream import Cut, EvalBatches, RowStream
from burnish.data.tally import Tally
from burnish.data.templates import fit_tokenizer, load_template
from burnish.engine.base import create_engine, set_seed
from burnish.models.attention import Layout, lay_flat
from burnish.models.check import check_model
from burnish.models.fused import fuse
from burnish.models.liger import apply_liger, takes_liger
from burnish.models.load import check_context, load_config, load_model, meta_model, raise_if_not_finite
from burnish.models.save import save_config, save_model
from burnish.models.source import adapter_folders
from burnish.models.tokens import check_vocabulary, fit_vocabulary, load_tokenizer
from burnish.objectives import OBJECTIVES
from burnish.optim.builtin import OPTIMIZERS, create_optimizer, create_scheduler
from burnish.report.card import CardFacts, write_card
from burnish.report.console import note, set_log_levels, warn
from burnish.report.options import counts_tokens
from burnish.report.plots import plot_history
from burnish.report.profile import watch
from burnish.report.progress import RunFacts
from burnish.report.results import parameters_without_embeddings, save_metrics, save_state

LOOKED_AT = 256
"""Rows that are encoded before the first step of a set that is encoded while the loop runs."""


@dataclass(frozen=True)
class Prepared:
    """What is known before a weight is read: the rows, and what happened on the way to them."""

    tokenizer: Any
    template: Template
    config: Any
    objective: Any
    rows: Sequence[Row | None]  # None where an example gives no row, which is met while the loop runs
    sample: Sequence[Row]  # what is known of them before: all, or some where they are encoded while the loop runs
    eval_rows: Mapping[str, Sequence[Row]]
    steps: StepPlan
    tally: Tally
    fingerprints: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)


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
    set_log_levels(options, engine.rank == 0, engine.rank == 0)

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
        try:
            output = train(run, options) if trains(options) else None
        finally:
            run.checkpoints.wait()  # one that is under way is whole before the folder is let go
        if interrupt.exit_code is not None:
            return Result(output, folder, exit_code=interrupt.exit_code)
        return Result(output, folder, finish(run, plan, prepared, output))


# --- prepare ----------------------------------------------------------------------------------------------------------


def prepare(plan: Plan) -> Prepared:
    """Records become rows, and everything that can be refused is refused. Reads no weight and writes no file but the
    cache of encoded rows."""
    options, tally = plan.options, Tally()
    notes: list[str] = []
    set_seed(options.seed, options.full_determinism)
    sets = load_data(plan, tally)
    config = load_config(options, options.cutoff_len, notes)
    tokenizer = load_tokenizer(options, notes)
    template = load_template(options, tokenizer)
    notes += fit_tokenizer(template, tokenizer)
    tokenizer.chat_template = template.jinja()  # what is saved renders what was trained
    raise_if(plan.placed([*check_vocabulary(tokenizer, config, options), *check_adapter(options, config)]))

    objective = OBJECTIVES[options.stage](options, template, tokenizer)
    if isinstance(sets.train, LazyExamples):
        rows: Sequence[Row | None] = encode_while_training(sets.train, objective, config, options)
        sample: Sequence[Row] = sample_of(rows)
        notes += ahead_notes(options)
    else:
        rows = sample = encode(sets.train, objective, tally, options)
    eval_rows = {name: encode(some, objective, tally, options, name) for name, some in sets.eval.items()}
    if not len(sample) and trains(options):
        raise UserError(nothing_to_learn(tally, options))
    longest = max((length for some in (sample, *eval_rows.values()) for length in row_lengths(some)), default=0)
    steps = plan_steps(options, len(rows), plan.world_size) if trains(options) else NO_STEPS
    sizes = sizes_of(options, config)
    problems = check_context(config, longest) + check_curve(options, steps.max_steps)
    largest = max((length for some in (sample, *eval_rows.values()) for length in item_lengths(some)), default=0)
    problems += check_budget(options.max_tokens_per_batch, largest)
    raise_if(plan.placed([*problems, *check_disk(options, config, sizes, steps)]))
    notes += [*sets.notes, *step_notes(options, steps)]
    data = f"{sets.fingerprint}, shuffled among {options.buffer_size}" if options.streaming else sets.fingerprint
    fingerprints = fingerprints_of(plan, data, template.form_fingerprint, steps)
    return Prepared(tokenizer, template, config, objective, rows, sample, eval_rows, steps, tally, fingerprints, notes)


def load_data(plan: Plan, tally: Tally) -> DataSets:
    """The data sets; what is wrong with them is said together with what is wrong with the model's files."""
    options = plan.options
    problems = plan.placed(check_model(options))
    try:
        sets = load_datasets(options, options.seed, tally, may_run_ahead(options))
    except UserError as error:
        raise UserError([*problems, *plan.placed(error.problems)]) from error
    raise_if(problems)
    return sets


def encode(
    examples: Sequence[Example], objective: Any, tally: Tally, options: Any, eval_name: str | None = None
) -> Sequence[Row]:
    """Rows of a set, packed where the options ask for it.

    Args:
        eval_name: of an evaluation set; None for the training set.
    """
    is_eval = eval_name is not None
    cut = not splits_rows(options, options.stage, is_eval)
    rows = prepare_rows(
        examples,
        lambda batch, counted: objective.encode(batch, counted, cut=cut),
        tally,
        fingerprint={"encoding": objective.fingerprint, "cutoff_len": options.cutoff_len, "cut": cut},
        options=options,
        name=f"eval_{eval_name}".rstrip("_") if is_eval else "train",
    )
    return packed(rows, options, options.stage, options.cutoff_len, is_eval)


def item_lengths(rows: Sequence[Row]) -> Sequence[int]:
    """Tokens of each row, or of each pack."""
    lengths = getattr(rows, "lengths", None)
    return lengths if lengths is not None else [len(row["input_ids"]) for row in rows]


def encode_while_training(examples: LazyExamples, objective: Any, config: Any, options: Any) -> AheadRows:
    """Rows of a large training set, none of which is encoded yet. A row that the model cannot take is refused when it
    is met."""

    def check(row: Row) -> None:
        raise_if(check_context(config, len(row["input_ids"])))

    return encode_ahead(
        examples, objective.encode, options=options, check=check,
        fingerprint={"encoding": objective.fingerprint, "cutoff_len": options.cutoff_len, "cut": True},
    )  # fmt: skip


def sample_of(rows: Sequence[Row | None]) -> list[Row]:
    """Some rows from all over a set, for what has to be known or said before the first step."""
    some = (rows[number] for number in range(0, len(rows), max(1, len(rows) // LOOKED_AT)))
    return [row for row in some if row is not None]


def row_lengths(rows: Sequence[Row]) -> Sequence[int]:
    """Tokens of each sequence; of a pack, of each row in it."""
    lengths = getattr(rows, "lengths", None)
    return lengths if lengths is not None else [length for row in rows for length in lengths_of(row)]


def check_adapter(options: Any, config: Any) -> list[Problem]:
    """What keeps the adapter from being attached to a model of this shape; no weight is read."""
    adapter = ADAPTERS[options.finetuning_type](options, adapter_folders(options))
    return adapter.check(meta_model(config, options.trust_remote_code))


def nothing_to_learn(tally: Tally, options: Any) -> Problem:
    reasons = "; ".join(tally.sentences()) or "the training set is empty"
    return Problem(
        f"No row is left to learn from: {reasons}.",
        where=", ".join(map(str, options.dataset or [])),
        remedy="Raise cutoff_len, or correct the data.",
    )


# --- assemble ---------------------------------------------------------------------------------------------------------


def assemble(plan: Plan, prepared: Prepared, engine: Engine, found: Path | None, callbacks: Sequence[Any] = ()) -> Run:
    """Every part of the run, made in the order in which each needs the one before it."""
    options, folder = plan.options, Path(plan.options.output_dir)
    set_seed(options.seed, options.full_determinism)
    adapter = ADAPTERS[options.finetuning_type](options, adapter_folders(options))
    model = load_model(options, dtype=load_dtype(options, engine), config=prepared.config, notes=prepared.notes)
    raise_if_not_finite(model, options.model_name_or_path)
    fit_vocabulary(model, prepared.tokenizer, options, prepared.notes)
    model = adapter.attach(model)
    set_precision(model, trainable_dtype(options, model))
    model.to(engine.device)  # before the optimizer, which may keep copies of weights
    for sentence in (*adapter.notes, *parameter_lines(model, options)):
        note(sentence)
    objective = prepared.objective
    lies_flat, sentences = fit_objective(objective, model, prepared.tokenizer, options)
    for sentence in sentences:
        note(sentence)
    budget = Budget(options.max_tokens_per_batch, pads=not lies_flat) if options.max_tokens_per_batch else None

    optimizer = create_optimizer(model.named_parameters(), model, options, learning_rates(model, options))
    wrapped, optimizer = engine.prepare(objective.module(model), optimizer)
    steps = prepared.steps
    scheduler = create_scheduler(optimizer, options, steps.max_steps, options.learning_rate)
    accumulation = accumulation_for(found, options, engine.world_size)
    cut = Cut(
        options.per_device_train_batch_size, accumulation, engine.world_size, engine.rank, options.dataloader_drop_last,
        budget,
    )  # fmt: skip
    stream = RowStream(
        prepared.rows, objective.collate, cut, seed=options.seed if options.data_seed is None else options.data_seed,
        options=options, lengths=item_lengths(prepared.sample) if prepared.sample is prepared.rows else None,
        buffer_size=options.buffer_size if options.streaming else None,
    )  # fmt: skip
    state = TrainerState(
        max_steps=steps.max_steps, num_train_epochs=steps.num_train_epochs,
        train_batch_size=options.per_device_train_batch_size,
        is_local_process_zero=engine.rank == 0, is_world_process_zero=engine.rank == 0,
    )  # fmt: skip
    state.compute_steps(options, steps.max_steps)
    trainable, total = trainable_summary(model)
    facts = RunFacts(
        len(prepared.rows), min(options.num_train_epochs, steps.num_train_epochs),
        options.per_device_train_batch_size, accumulation, engine.world_size, steps.max_steps, trainable, total,
    )  # fmt: skip
    control = TrainerControl()
    listeners = CallbackHandler(
        callbacks_of(options, facts, callbacks), options, state, control, model=model,
        processing_class=prepared.tokenizer, optimizer=optimizer, lr_scheduler=scheduler, train_dataloader=stream,
        eval_dataloader=None,
    )  # fmt: skip
    meter = Meter(engine.device, options.logging_nan_inf_filter)
    eval_sets = {
        name: EvalBatches(
            rows, objective.collate, options.per_device_eval_batch_size, engine.world_size, engine.rank, budget,
            item_lengths(rows),
        )
        for name, rows in prepared.eval_rows.items()
    }  # fmt: skip
    parts = {
        "model": ModelState(model, adapter), "optimizer": optimizer, "scheduler": scheduler, "stream": stream,
        "state": state, "callbacks": listeners, "meter": meter, "rng": RngState(), **getattr(engine, "parts", {}),
    }  # fmt: skip
    if options.save_only_model:
        parts = {name: parts[name] for name in ("model", "state")}

    def write_extras(target: Path) -> None:
        if adapter.saves_whole_model:
            save_config(model, target)
        else:
            adapter.save_config(model, str(target))
        prepared.tokenizer.save_pretrained(target)

    listeners.fire("on_init_end")
    return Run(
        model=wrapped, objective=objective, engine=engine, stream=stream, optimizer=optimizer, scheduler=scheduler,
        state=state, control=control, callbacks=listeners, meter=meter, parts=parts, eval_sets=eval_sets,
        evaluate=evaluate, flos_per_token=6 * parameters_without_embeddings(model), logs_tokens=counts_tokens(options),
        checkpoints=Checkpoints(
            folder, fingerprints=prepared.fingerprints, write_extras=write_extras, limit=options.save_total_limit,
            in_background=options.save_in_background, rank=engine.rank, barrier=engine.barrier,
        ),
    )  # fmt: skip


def fit_objective(objective: Any, model: Any, tokenizer: Any, options: Any) -> tuple[bool, list[str]]:
    """Choose between flat and padded batches, and find the way through layers and head.

    Returns:
        whether batches lie flat, and sentences for a person.
    """
    layout, device, said = Layout(False), next(model.parameters()).device, []
    if takes_liger(options, device) and not (options.torch_compile and options.enable_liger_kernel is None):
        said = apply_liger(model, options.liger_kernel_config, is_asked=options.enable_liger_kernel is not None)
    elif device.type == "cpu" and not options.torch_compile:  # a compiler fuses by itself
        fuse(model)
    if options.padding_free or packs_rows(options, options.stage):
        layout = lay_flat(model, own_attention=options.flash_attn == "auto")
    notes = objective.fit(model, collator(options, tokenizer.pad_token_id, layout.is_flat))
    return layout.is_flat, [sentence for sentence in (layout.note, *said, *notes) if sentence]


def load_dtype(options: Any, engine: Any) -> Any:
    """Weights that train are loaded as they are and raised to float32; frozen ones in the format they compute in."""
    if options.pure_bf16:
        return torch.bfloat16
    trains_all = options.finetuning_type == "full" and not keeps_load_precision(options)
    return "auto" if trains_all or getattr(engine, "dtype", None) is None else engine.dtype


def trainable_dtype(options: Any, model: Any) -> torch.dtype:
    if options.pure_bf16:
        return torch.bfloat16
    return next(model.parameters()).dtype if keeps_load_precision(options) else torch.float32


def keeps_load_precision(options: Any) -> bool:
    """Whether the optimizer keeps float32 copies of its own."""
    return bool(OPTIMIZERS.choose(options.optim, options).traits.get("keeps_load_precision"))


# --- finish -----------------------------------------------------------------------------------------------------------


def finish(run: Run, plan: Plan, prepared: Prepared, output: TrainOutput | None) -> dict[str, float]:
    """The model, the figures and the pictures, in ``output_dir``."""
    options, folder = plan.options, Path(plan.options.output_dir)
    results: dict[str, float] = {}
    switch(run, is_training=False)  # a schedule-free optimizer keeps other weights for use than for training
    if run.engine.rank == 0 and output is not None:
        model_state = run.parts["model"]
        assert isinstance(model_state, ModelState)
        adapter, model = model_state.adapter, model_state.model
        with nothing_lost(run):
            save_model(
                model, prepared.tokenizer, folder, adapter=None if adapter.saves_whole_model else adapter,
                stop_token_ids=prepared.template.stop_token_ids(),
            )  # fmt: skip
        results |= {**output.metrics, "epoch": run.state.epoch or 0.0}
        if counts_tokens(options):
            results["num_input_tokens_seen"] = run.state.num_input_tokens_seen
        save_metrics("train", results, folder)
    if run.eval_sets and (options.do_eval or options.eval_strategy != "no"):
        metrics = last_evaluation(run, options) or evaluate_all(run)
        metrics |= {"epoch": run.state.epoch} if run.state.epoch is not None else {}
        if run.engine.rank == 0:
            save_metrics("eval", metrics, folder)
        results |= metrics
    if options.do_predict:
        results |= predict_all(run, prepared, plan)
    if run.engine.rank == 0:
        count_late(prepared)
    if run.engine.rank == 0 and output is not None:
        save_state(run.state, folder)
        describe(run, plan, prepared, results)
        write_finished(folder, run.state, prepared.fingerprints)
    return results


@contextmanager
def nothing_lost(run: Run) -> Iterator[None]:
    """Where the model cannot be written, what was trained is kept as a checkpoint, from which the same command writes
    it. The failure goes on its way."""
    is_written = False
    try:
        yield
        is_written = True
    finally:
        is_kept = run.checkpoints.path(run.state.global_step).is_dir()
        if not (is_written or is_kept) and run.engine.world_size == 1:  # other ranks do not know, and would not save
            switch(run, is_training=True)
            save(run)
            run.checkpoints.wait()


def last_evaluation(run: Run, options: Any) -> dict[str, float]:
    """The metrics of the evaluation that the last step ended with, where the weights are still those."""
    if options.load_best_model_at_end:
        return {}
    entries = [entry for entry in run.state.log_history if entry["step"] == run.state.global_step]
    found = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    is_whole = all(f"eval_{name}_loss".replace("__", "_") in found for name in run.eval_sets)
    return found if is_whole else {}


def count_late(prepared: Prepared) -> None:
    """Say what happened to rows that were encoded while the loop ran."""
    if isinstance(prepared.rows, AheadRows):
        prepared.tally.merge(prepared.rows.counted())
        for sentence in prepared.tally.sentences():
            warn(sentence)


def describe(run: Run, plan: Plan, prepared: Prepared, results: Mapping[str, float]) -> None:
    """Pictures of the loss, and the model card."""
    options, folder = plan.options, Path(plan.options.output_dir)
    pictures = plot_history(run.state.log_history, folder, folder.name) if options.plot_loss else []
    trained: Any = run.parts["model"]
    trainable, total = trainable_summary(trained.model)
    write_card(
        folder,
        CardFacts(
            name=folder.resolve().name,
            base_model="" if options.train_from_scratch else options.model_name_or_path,
            datasets=[str(name) for name in options.dataset or []],
            stage=options.stage, method=options.finetuning_type, trainable_parameters=trainable, all_parameters=total,
            is_adapter=not trained.adapter.saves_whole_model,
            options={spec.name: value for spec, value, _ in plan.changed()}, results=results,
            tally=prepared.tally.sentences(), has_chat_template=bool(prepared.tokenizer.chat_template),
            picture=pictures[0].name if pictures else "",
        ),
    )  # fmt: skip
