"""A run of ``burnish train``, from the plan to the last file:

prepare     tokenizer, template, records -> rows; writes nothing and reads no weights (prepare.py)
build       model, adapter, backend, data loader, optimizer, callbacks -> a loop (loop.py)
load        the newest complete checkpoint, if it belongs to this run (recovery/resume.py)
train       loop/loop.py
finish      evaluate, save, plot, write reports (finish.py)
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from burnish.adapters.base import ADAPTERS, ModelAdapter, ModelState, parameter_lines, parameters_without_embeddings
from burnish.adapters.lora import learning_rates
from burnish.checkpoint.checkpoint import Checkpoints, later_checkpoints, output_folder
from burnish.checkpoint.manifest import integrity_errors
from burnish.config.options import raise_if
from burnish.config.secrets import mask_json
from burnish.data.batches.batching import collator, packs_rows
from burnish.data.batches.budget import Budget
from burnish.data.batches.loader import EvalBatches, RowLoader, StepPartition
from burnish.data.batches.patches import patches_of_rows
from burnish.data.stats import DataStats
from burnish.kernels.last_layer import LAST_LAYER
from burnish.kernels.probe import Capabilities
from burnish.loop.events import CallbackHandler, num_events
from burnish.loop.loop import TrainOutput
from burnish.loop.protocols import Parallel
from burnish.loop.state import TrainerControl, TrainerState
from burnish.losses.base import OBJECTIVES, StageObjective
from burnish.models.attention_choice import requested_attention
from burnish.models.images.processor import ImageProcessor, copy_companions
from burnish.models.images.together import must_run_together, run_tower_in_every_pass
from burnish.models.load import load_model, raise_if_adapter_not_finite, raise_if_empty, raise_if_not_finite
from burnish.models.patches.attention import PADDING_FREE
from burnish.models.patches.capabilities import find_capabilities
from burnish.models.patches.dropout import switch_off_dropout
from burnish.models.patches.fused import patch_forwards
from burnish.models.patches.liger import LIGER, apply_liger, takes_liger
from burnish.models.quantization.quantize import quantization_of
from burnish.models.save import save_config
from burnish.models.source import adapter_folders
from burnish.models.tokens import resize_embeddings
from burnish.optim.builtin import create_optimizer, create_scheduler, keeps_load_precision
from burnish.parallel.create import create_parallel
from burnish.parallel.precision import compute_sentence, loaded_dtype
from burnish.parallel.selection import local_rank
from burnish.parallel.single import set_seed
from burnish.report.console import note, set_log_levels, tee_log, warn
from burnish.report.metadata import METADATA_NAMES, RUN_YAML, START_ONLY_OPTIONS, RunMetadata, given_yaml
from burnish.report.options import counts_tokens
from burnish.report.profile import start_profiling
from burnish.report.progress import RunFacts
from burnish.run.agreement import raise_unless_ranks_agree
from burnish.run.callbacks import callbacks_of
from burnish.run.finish import finish, next_steps
from burnish.run.hub import RunUploads
from burnish.run.images.batches import RowsAhead, check_processes, collator_of, has_images
from burnish.run.loop import RunLoop
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.output_dir import FINISHED_NAME
from burnish.run.plan.plan import Plan
from burnish.run.plan.resources import compute_dtype, counts_of, formats_in, formats_in_words, load_dtype
from burnish.run.prepare import Prepared, prepare
from burnish.run.recovery.clearing import BackupOnOverwrite
from burnish.run.recovery.failure import TRACEBACK_NAME, failure_problem
from burnish.run.recovery.fingerprints import packages_used
from burnish.run.recovery.interrupt import InterruptCallback
from burnish.run.recovery.resume import accumulation_for, start_of
from burnish.run.recovery.saving import RetryingCheckpoints, status_of
from burnish.run.recovery.spikes import train_with_rollback
from burnish.run.recovery.stall import StallWatch
from burnish.run.references import add_mismatched_responses, add_reference_columns, precompute, setup_reference
from burnish.run.reward_heads import setup_reward_head
from burnish.run.rollouts import rollout_callbacks, setup_completions, with_numbers
from burnish.utils.files import exclusive_writer_lock
from burnish.utils.patching import allows_patch


@dataclass(frozen=True)
class Result:
    """Result of ``train_run``."""

    output: TrainOutput | None  # None if there was nothing to train
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    exit_code: int | None = None  # 128 + signal if a signal interrupted the run
    next_steps: Sequence[str] = ()  # commands that use the trained model


def train_run(plan: Plan) -> Result:
    """Run ``burnish train``.

    Raises:
        UserError: for errors in the user's input. Nothing has been written then, except if the weights do not fit.
    """
    prepared = prepare(plan)
    for sentence in (*plan.notes, *prepared.notes):
        note(sentence)
    for sentence in prepared.stats.sentences():
        warn(sentence)
    options, folder = plan.options, output_folder(plan.options)
    parallel = create_parallel(options)
    is_first = parallel.rank == 0
    set_log_levels(options, is_first, local_rank() == 0)
    with ExitStack() as contexts:
        if is_first:
            contexts.enter_context(exclusive_writer_lock(folder, METADATA_NAMES))
        interrupt = contexts.enter_context(InterruptCallback(parallel.any, options.max_train_seconds))
        start = start_of(plan, prepared.fingerprints, prepared.steps)
        for sentence in filter(None, (*start.notes, start.done)):
            note(sentence)
        uploads = RunUploads(options) if options.push_to_hub and trains(options) and is_first else None
        if start.done:
            if uploads is not None:
                uploads.push_model()
            return Result(None, folder)
        callbacks: list[Any] = [interrupt] if uploads is None else [interrupt, uploads]
        metadata = contexts.enter_context(metadata_of(plan, parallel, prepared.stats)) if is_first else None
        if is_first:
            if start.checkpoint is None and options.overwrite_output_dir and trains(options):
                callbacks.append(contexts.enter_context(BackupOnOverwrite(folder)))
            callbacks.append(metadata)
            clean_up_folder(folder, options)
        parallel.barrier()
        raise_unless_ranks_agree(plan, prepared.fingerprints(), len(prepared.rows), parallel)
        if options.stall_timeout_s:
            callbacks.append(StallWatch(options.stall_timeout_s))
        loop = build_loop(plan, prepared, parallel, start.checkpoint, callbacks)
        if uploads is not None:
            uploads.checkpoints = loop.checkpoints
        if start.checkpoint is not None:
            loop.load(start.checkpoint)
            state = loop.state
            note(f"Resuming from {start.checkpoint}: step {state.global_step} of {state.max_steps}.")
        if options.profile:
            start_profiling(loop, folder / "profile", options)
        if is_first:
            contexts.enter_context(tee_log(folder))
        result = train_and_finish(loop, plan, prepared, interrupt, metadata)
        if uploads is not None:
            uploads.finish(is_interrupted=result.exit_code is not None and interrupt.exit_code is not None)
        return result


def clean_up_folder(folder: Path, options: RunOptions) -> None:
    """Remove what an earlier start left behind: an incomplete checkpoint, a traceback, and the mark of a finished
    run."""
    Checkpoints(folder).remove_incomplete()
    (folder / TRACEBACK_NAME).unlink(missing_ok=True)
    if trains(options):
        (folder / FINISHED_NAME).unlink(missing_ok=True)  # it has fewer steps


def train_and_finish(
    loop: RunLoop, plan: Plan, prepared: Prepared, interrupt: InterruptCallback, metadata: RunMetadata | None
) -> Result:
    options, folder = plan.options, output_folder(plan.options)
    try:
        output = train_with_rollback(loop, warn) if trains(options) else None
    finally:
        loop.checkpoints.wait()  # finish a checkpoint in the background before the folder is unlocked
    if interrupt.exit_code is not None:
        if metadata is not None:
            metadata.record_stop(interrupt.exit_code)
            for sentence in resume_instructions(loop.checkpoints):
                note(sentence)
        return Result(output, folder, exit_code=interrupt.exit_code)
    metrics = finish(loop, plan, prepared, output)
    commands = [] if output is None else next_steps(folder, gives_scores=not prepared.objective.uses_lm_head)
    return Result(output, folder, metrics, status_of(loop.checkpoints), commands)


def resume_instructions(checkpoints: Checkpoints) -> list[str]:
    """Return the last checkpoint of an interrupted run, and the command that resumes from it."""
    saved = None if checkpoints.last_step is None else checkpoints.path(checkpoints.last_step)
    if saved is None or integrity_errors(saved):
        saved, _ = checkpoints.newest()
    if saved is None:
        return []
    command = ["burnish", "train", str(checkpoints.folder / RUN_YAML)]
    command += [f"resume_from_checkpoint={saved}"] if later_checkpoints(saved) else []
    return [f"The checkpoint is {saved}. To resume: {shlex.join(command)}"]


def metadata_of(plan: Plan, parallel: Parallel, stats: DataStats) -> RunMetadata:
    """Create the metadata files of the run: its process and its options."""
    folder = output_folder(plan.options)
    metadata = RunMetadata(folder, partial(failure_problem, output_dir=str(folder)))
    values = {name: getattr(plan.options, name) for name in plan.provenance if hasattr(plan.options, name)}
    rows = {"seen": stats.seen, "dropped": sum(count for reason, count in stats if reason.kind == "dropped")}
    shown, packages = mask_json(values), packages_used(plan.options)
    text = given_yaml(shown, plan.provenance, START_ONLY_OPTIONS, plan.command, packages)
    metadata.begin(text, [str(parallel.device)], rows)
    return metadata


# --- build ------------------------------------------------------------------------------------------------------------


def build_loop(
    plan: Plan, prepared: Prepared, parallel: Parallel, checkpoint: Path | None, callbacks: Sequence[Any] = ()
) -> RunLoop:
    """Build the loop at step 0.

    Args:
        prepared: output of ``prepare``.
        parallel: processes and devices of the run.
        checkpoint: checkpoint that the caller loads next; None for a new run.
        callbacks: callbacks in addition to those of the options.
    """
    options, objective, steps = plan.options, prepared.objective, prepared.steps
    prepared = add_mismatched_responses(add_reference_columns(with_numbers(prepared), options), options)
    set_seed(options.seed, options.full_determinism)
    adapter = ADAPTERS[options.finetuning_type](options, adapter_folders(options))
    model = trained_model(prepared, adapter, parallel, options)
    capabilities, ahead = _configure(prepared, model, adapter, parallel, options)

    accumulation = options.gradient_accumulation_steps
    if objective.rows_per_rank is None:
        accumulation = accumulation_for(checkpoint, options, parallel.world_size)
    most, pads = options.max_tokens_per_batch, not capabilities.is_padding_free
    budget = Budget(most, pads) if most else None
    loader = row_loader(prepared, options, parallel, accumulation, budget, ahead)

    trained = [*model.named_parameters(), *objective.own_parameters()]
    created = create_optimizer(trained, model, options, learning_rates(model, options))
    module, optimizer = parallel.prepare(objective.module(model), created)
    objective.setup(module)
    scheduler = create_scheduler(optimizer, options, steps.schedule_steps, options.learning_rate, steps.steps_per_rate)

    listeners = _listeners(prepared, model, accumulation, parallel, options, callbacks)
    listeners.arguments |= {"optimizer": optimizer, "lr_scheduler": scheduler, "train_dataloader": loader}
    checkpoints = RetryingCheckpoints(
        output_folder(options), fingerprints=prepared.fingerprints(), limit=options.save_total_limit,
        write_extras=partial(write_companions, model, adapter, prepared.tokenizer),
        in_background=options.save_in_background, processes=parallel, listeners=listeners,
        # A schedule-free optimizer changes weights for evaluation; an objective may change its parts before updates.
        copies_later=not (
            hasattr(created, "eval")
            or objective.parts
            or getattr(getattr(objective, "reference", None), "changes_weights", False)
        ),
    )  # fmt: skip
    loop = RunLoop(
        options, prepared.origins, model=module, weights=ModelState(model, adapter), objective=objective,
        parallel=parallel, loader=loader, optimizer=optimizer, scheduler=scheduler, callbacks=listeners,
        checkpoints=checkpoints, eval_sets=eval_sets(prepared, options, parallel, budget),
        flos_per_token=6 * parameters_without_embeddings(model), logs_tokens=counts_tokens(options),
    )  # fmt: skip
    for sentence in precompute(loop, prepared, options):
        note(sentence)
    listeners.fire("on_init_end")
    return loop


def _configure(
    prepared: Prepared, model: Any, adapter: ModelAdapter, parallel: Parallel, options: RunOptions
) -> tuple[Capabilities, RowsAhead | None]:
    """Configure the objective for the model, with its reward head, completions and reference.

    Returns:
        Capabilities found in the model, and a function that prepares images of later rows, if any.
    """
    objective = prepared.objective
    if prepared.family is not None and has_images(prepared):
        raise_if(check_processes(model, parallel.world_size, parallel.shards_weights))
    capabilities, notes, ahead = configure_objective(objective, model, prepared, options)
    is_together = must_run_together(model, parallel.world_size, parallel.shards_weights)
    if (family := prepared.family) is not None and has_images(prepared) and is_together:
        run_tower_in_every_pass(model, ImageProcessor.of(model, family.processor, family.options))
    notes += setup_reward_head(objective, options, parallel)
    setup_completions(prepared, model, parallel, options)
    notes += setup_reference(objective, model, adapter, parallel, options, capabilities.is_padding_free)
    for sentence in notes:
        note(sentence)
    return capabilities, ahead


def _listeners(
    prepared: Prepared, model: Any, accumulation: int, parallel: Parallel, options: RunOptions, callbacks: Sequence[Any]
) -> CallbackHandler:
    """Return the callbacks of the run with its state at step 0."""
    objective, steps, batch_size = prepared.objective, prepared.steps, options.per_device_train_batch_size
    state = TrainerState.at_start(options, steps, batch_size, parallel.rank, local_rank())
    facts = RunFacts(
        steps, batch_size, accumulation, parallel.world_size, *counts_of(model, prepared.sizes),
        unit="pack" if packs_rows(options, objective.default_packing) else "example",
        num_events=num_events(options, state),
    )  # fmt: skip
    return CallbackHandler(
        callbacks_of(options, facts, [*rollout_callbacks(objective, options), *callbacks]), options,
        state, TrainerControl(), model=model, processing_class=prepared.tokenizer, eval_dataloader=None,
    )  # fmt: skip


def trained_model(prepared: Prepared, adapter: ModelAdapter, parallel: Parallel, options: RunOptions) -> Any:
    """Load the model, attach the adapter, and place it on the device, with trainable weights in their training
    dtype."""
    in_files = loaded_dtype(prepared.config)
    notes = [compute_sentence(compute_dtype(options, prepared.config), in_files, parallel.device)]
    device = parallel.device if quantization_of(options, prepared.config) else None  # quantized kernels depend on it
    model = load_model(
        options,
        dtype=load_dtype(options, prepared.config),
        device=device,
        config=prepared.config,
        notes=notes,
        needs_head=prepared.objective.uses_lm_head,
    )
    raise_if_not_finite(model, options.model_name_or_path or "")
    if not options.train_from_scratch:
        raise_if_empty(model, options.model_name_or_path or "", notes)
    resize_embeddings(model, prepared.tokenizer, options, notes)
    model = cast(Any, adapter.attach(model))
    if folders := adapter_folders(options):
        raise_if_adapter_not_finite(model, folders)
    if prepared.objective.disables_dropout and options.disable_dropout and switch_off_dropout(model):
        notes.append(
            "Dropout is disabled, including LoRA dropout, so that log-probabilities are comparable (disable_dropout)."
        )
    parallel.move_model(model, trainable_dtype(options, model, parallel))
    turns = prepared.sizes.turns.lines if prepared.sizes.turns and trains(options) else ()
    notes += [f"{label.capitalize()}: {text}." for label, text in turns]
    if not quantization_of(options, prepared.config):
        saved: Any = model.config.dtype if adapter.saves_whole_model and trains(options) else None
        notes += formats_in_words(in_files, *formats_in(model), saved)
    for sentence in (*notes, *adapter.notes, *parameter_lines(model, options)):
        note(sentence)
    return model


def row_loader(
    prepared: Prepared, options: RunOptions, parallel: Parallel, accumulation: int, budget: Budget | None,
    ahead: RowsAhead | None = None,
) -> RowLoader:  # fmt: skip
    per_rank = prepared.objective.rows_per_rank
    cut = StepPartition(
        per_rank or options.per_device_train_batch_size, 1 if per_rank else accumulation, parallel.world_size,
        parallel.rank, options.dataloader_drop_last, None if per_rank else budget,
    )  # fmt: skip
    return RowLoader(
        prepared.rows, prepared.objective.collate, cut, keys=prepared.rows.keys_of_step, options=options,
        seed=options.seed if options.data_seed is None else options.data_seed,
        lengths=None if prepared.rows.is_streamed else prepared.rows.lengths,
        buffer_size=options.buffer_size if options.streaming else None,
        blank_row=dict(prepared.objective.row_columns), ahead=ahead,
        patches=patches_of_rows(prepared.rows, prepared.family) if budget else None,
        num_examples=prepared.rows.num_examples,
    )  # fmt: skip


def eval_sets(
    prepared: Prepared, options: RunOptions, parallel: Parallel, budget: Budget | None
) -> dict[str, EvalBatches]:
    return {
        name: EvalBatches(
            rows, prepared.objective.collate, options.per_device_eval_batch_size, parallel.world_size, parallel.rank,
            budget, rows.lengths, patches_of_rows(rows, prepared.family) if budget else None, rows.num_examples,
        )
        for name, rows in prepared.eval_rows.items()
    }  # fmt: skip


def write_companions(model: Any, adapter: ModelAdapter, tokenizer: Any, target: Path) -> None:
    """Write the files that are needed to load a checkpoint's weights elsewhere."""
    if adapter.saves_whole_model:
        save_config(model, target)
    else:
        adapter.save_config(model, str(target))
    tokenizer.save_pretrained(target)
    copy_companions(model, target)


def configure_objective(
    objective: StageObjective, model: Any, prepared: Prepared, options: RunOptions
) -> tuple[Capabilities, list[str], RowsAhead | None]:
    """Choose padding-free or padded batches and set up the objective for the model.

    Returns:
        Capabilities found in the model, notes for the user, and a function that prepares images of later rows, if any.
    """
    device, notes = next(model.parameters()).device, []
    is_asked = options.enable_liger_kernel is not None
    if takes_liger(options, device) and (is_asked or (not options.torch_compile and allows_patch(options, LIGER))):
        notes = apply_liger(model, options.liger_kernel_config, is_asked=is_asked)
    if not options.torch_compile:  # the compiler fuses by itself
        patch_forwards(model, options)
    capabilities = find_capabilities(
        model, padding_free=wants_padding_free(options), own_attention=takes_own_attention(options),
        prefix_sharing=wants_prefix_sharing(objective, model, options, device),
        last_layer=allows_patch(options, LAST_LAYER) and not options.torch_compile,
        head_of=None if options.fused_loss is False else model,
    )  # fmt: skip
    if options.needed_tokens_only and not capabilities.shares_prefixes:
        what = "the batch is padded, the model or loss uses random numbers, or the loss needs all tokens"
        notes = [*notes, f"Tokens without effect on the loss are not skipped: {what}."]
    pad_id = prepared.tokenizer.pad_token_id
    if prepared.family is None or not has_images(prepared):
        collate = collator(options, pad_id, capabilities.is_padding_free, capabilities.shares_prefixes)
        return capabilities, [*capabilities.notes, *notes, *objective.configure(capabilities, collate)], None
    images, capabilities = collator_of(options, model, pad_id, capabilities, prepared.family)
    return capabilities, [*capabilities.notes, *notes, *objective.configure(capabilities, images)], images.ahead


def takes_own_attention(options: RunOptions) -> bool:
    """Return whether burnish's attention may replace the model's."""
    return requested_attention(options) is None and allows_patch(options, PADDING_FREE)


def wants_padding_free(options: RunOptions) -> bool:
    """Return whether batches should be padding-free. Whether the model supports it is checked later."""
    return bool(options.padding_free or packs_rows(options, OBJECTIVES[options.stage].default_packing))


def wants_prefix_sharing(objective: StageObjective, model: Any, options: RunOptions, device: torch.device) -> bool:
    """Return whether to skip tokens without effect on the loss: as configured, or by default on CPUs.

    The loss must allow it. ``model`` may be without weights.
    """
    is_usual = device.type == "cpu" and not options.torch_compile
    is_enabled = is_usual if options.needed_tokens_only is None else options.needed_tokens_only
    return bool(is_enabled and objective.allows_prefix_sharing(model))


def trainable_dtype(options: RunOptions, model: Any, parallel: Parallel) -> torch.dtype:
    """Return the dtype of the trained weights. Without training, it is the dtype of the other weights."""
    if options.pure_bf16:
        return torch.bfloat16
    loaded: torch.dtype = next(model.parameters()).dtype
    if not trains(options):
        return parallel.dtype or loaded
    return loaded if keeps_load_precision(options) else torch.float32
