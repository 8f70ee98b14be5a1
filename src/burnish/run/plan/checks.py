"""Option checks that involve several components.

They are registered with ``@check`` (``config/checks.py``), like those of the components. ``plan.py`` calls them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn import Parameter
from torch.optim import SGD

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import changed_options
from burnish.data.batches.batching import packs_rows
from burnish.inference.options import is_remote
from burnish.loop.best import best_model_metric_name, eval_prefix, is_higher_better, missing_metric
from burnish.loop.schedule import FOLLOWS_METRIC, StepPlan, lr_factor
from burnish.loop.state import RATES
from burnish.losses.base import OBJECTIVES, StageObjective
from burnish.models.attention_choice import is_flash, requested_attention
from burnish.models.source import check_model_path
from burnish.optim.builtin import OPTIMIZERS, create_scheduler
from burnish.parallel import checks as _parallel_checks  # noqa: F401  registers its checks and notes
from burnish.parallel.deepspeed.settings import zero_stage
from burnish.parallel.precision import autocast_dtype
from burnish.parallel.selection import device_of, parallel_name
from burnish.report.pace import format_count
from burnish.run.plan.options import RunOptions


def trains(options: RunOptions) -> bool:
    """Return whether the run trains: ``do_train``, or, if unset, whether it neither evaluates nor predicts."""
    if options.do_train is None:
        return not (options.do_eval or options.do_predict)
    return bool(options.do_train)


def evaluates(options: RunOptions) -> bool:
    """Return whether the run evaluates the evaluation set, during training or at the end."""
    return bool(options.do_eval or options.eval_strategy != "no")


@check
def check_something_to_do(options: RunOptions) -> Iterator[Problem]:
    if trains(options) or options.do_eval or options.do_predict:
        return
    yield Problem(
        "There is nothing to do: do_train, do_eval and do_predict are all false.",
        remedy="Remove do_train: false to train.",
        option=("do_train", "do_eval", "do_predict"),
    )


@check
def check_generates_here(options: RunOptions) -> Iterator[Problem]:
    """Check that responses to a dataset are not requested from another engine."""
    if not (is_remote(options) and (options.do_eval or options.do_predict)):
        return
    name = "infer_backend" if options.infer_url is None else "infer_url"
    what = f'"{name}" is not supported for predictions on a dataset: responses are generated in this process.'
    yield Problem(what, remedy=f"Remove {name}, or use it with burnish api or burnish chat.", option=name)


@check
def check_evaluation_set(options: RunOptions) -> Iterator[Problem]:
    """Check that a run that evaluates or predicts has an evaluation set."""
    requested = {"eval_strategy": options.eval_strategy} if options.eval_strategy != "no" else {}
    requested |= {name: "true" for name in ("do_eval", "do_predict", "eval_on_start") if getattr(options, name)}
    if not requested or options.eval_dataset or options.val_size > 0:
        return
    settings = " and ".join(f"{name}: {value}" for name, value in requested.items())
    yield Problem(
        f"{settings} {'requires' if len(requested) == 1 else 'require'} an evaluation dataset, but none is set.",
        remedy="Set eval_dataset: <name>, or val_size: 0.1 to hold out 10% of the training data.",
        option=tuple(requested),
    )


@check
def check_full_eval(options: RunOptions) -> Iterator[Problem]:
    """Check that weights that are converted for an evaluation are not sharded."""
    names = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(options, name)]
    if not names or parallel_name(options) not in ("fsdp", "deepspeed"):
        return
    what = f'"{names[0]}" is not supported with sharded weights (fsdp, deepspeed).'
    yield Problem(what, remedy="Remove it.", option=names[0])


@check
def check_schedule_by_metric(options: RunOptions) -> Iterator[Problem]:
    """Check that a schedule that follows a metric has evaluations to follow."""
    if options.lr_scheduler_type not in FOLLOWS_METRIC or options.eval_strategy != "no" or not trains(options):
        return
    yield Problem(
        f'"lr_scheduler_type" {options.lr_scheduler_type} changes the learning rate after evaluations, but '
        "eval_strategy is no.",
        option=("lr_scheduler_type", "eval_strategy"),
        remedy="Set eval_strategy: steps or epoch, with eval_dataset or val_size, or select another schedule.",
    )


@notes
def schedule_by_metric_notes(options: RunOptions) -> list[str]:
    """Return notes if warmup is set for a schedule that has none, or if the direction of the metric is not set."""
    schedule, found = options.lr_scheduler_type, []
    if schedule in (*FOLLOWS_METRIC, "constant") and (options.warmup_steps or options.warmup_ratio):
        name = "warmup_steps" if options.warmup_steps else "warmup_ratio"
        remedy = " For a warmup, set lr_scheduler_type: constant_with_warmup." * (schedule == "constant")
        found.append(f'{name} has no effect: lr_scheduler_type "{schedule}" has no warmup.{remedy}')
    if schedule in FOLLOWS_METRIC and is_higher_better(options) and "mode" not in (options.lr_scheduler_kwargs or {}):
        metric = best_model_metric_name(options)
        found.append(
            f'lr_scheduler_type "{schedule}" reduces the learning rate when {metric} rises, although higher is better. '
            'To reverse it, set lr_scheduler_kwargs: {"mode": "max"}.'
        )
    return found


@notes
def interval_notes(options: RunOptions) -> Iterator[str]:
    """Yield notes on intervals in steps whose strategy does not use them, and on a warmup that is set twice."""
    changed = changed_options(options)
    used = {
        "logging_steps": "steps" in (options.logging_strategy, options.eval_strategy),
        "eval_steps": options.eval_strategy == "steps",
        "save_steps": options.save_strategy == "steps",
    }
    for name, is_used in used.items():
        if name in changed and not is_used and trains(options):
            strategy = name.replace("_steps", "_strategy")
            yield f'"{name}" has no effect: {strategy} is {getattr(options, strategy)}.'
    if options.warmup_ratio and options.warmup_steps:
        yield '"warmup_ratio" has no effect: warmup_steps is set.'
    if len(options.dataset or ()) == 1:
        names = [name for name in ("mix_strategy", "interleave_probs") if name in changed]
        yield from (f'"{name}" has no effect on a single dataset.' for name in names)


@notes
def evaluation_notes(options: RunOptions) -> list[str]:
    """Return a note on an evaluation set that is never used."""
    if not trains(options) or evaluates(options) or options.do_predict or options.eval_on_start:
        return []
    option = f"val_size: {options.val_size:g}" if options.val_size else "eval_dataset" if options.eval_dataset else ""
    remedy = "Set eval_strategy: steps or epoch, or do_train: true and do_eval: true."
    return [f"{option} is set, but the run never evaluates. {remedy}"] if option else []


@notes
def no_training_notes(options: RunOptions) -> Iterator[str]:
    """Yield a note if do_eval or do_predict is set without do_train, so that nothing is trained."""
    if options.do_train is not None or trains(options) or not options.dataset:
        return
    name = "do_eval" if options.do_eval else "do_predict"
    yield f"Nothing is trained, because {name} is set and do_train is not. To train as well, set do_train: true."


@check
def check_flash_attention(options: RunOptions) -> Iterator[Problem]:
    """Check that flash attention has a GPU and a 16-bit compute dtype."""
    name, device = requested_attention(options), device_of(options)
    if not is_flash(name):
        return
    setting = f"attn_implementation: {name}" if options.attn_implementation else f"flash_attn: {options.flash_attn}"
    if device.type == "cpu":
        yield Problem(
            f"{setting} requires a GPU, but this run uses the CPU.",
            remedy="Remove it.",
            option="attn_implementation" if options.attn_implementation else "flash_attn",
        )
    elif options.finetuning_type == "full" and not options.pure_bf16 and autocast_dtype(options, device) is None:
        yield Problem(
            f"{setting} requires float16 or bfloat16, but this run computes in float32.",
            remedy="Set bf16: true.",
            option="attn_implementation" if options.attn_implementation else "flash_attn",
        )


SHARDABLE = ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop")
"""Elementwise optimizers without state over whole weights: they work on shards."""


@check
def check_sharded(options: RunOptions) -> Iterator[Problem]:
    """Yield problems of options that cannot be combined with sharded weights."""
    engine = parallel_name(options)
    if engine not in ("fsdp", "deepspeed"):
        return
    optimizer = OPTIMIZERS.choose(options.optim, options).name
    if trains(options) and optimizer not in SHARDABLE:
        yield Problem(
            f'The optimizer {optimizer} requires unsharded weights, but "{engine}" shards them across processes.',
            remedy=f"Set optim to one of {', '.join(SHARDABLE)}, or remove {engine} to use data parallelism.",
            option=(engine, "optim"),
        )
    if options.quantization_bit is not None and engine == "deepspeed" and zero_stage(options) == 3:
        yield Problem(
            '"quantization_bit" cannot be combined with ZeRO-3.',
            remedy="Set deepspeed: zero2, or use fsdp: full_shard.",
            option="quantization_bit",
        )
    if options.torch_compile:
        yield Problem(
            f'"torch_compile" with "{engine}" is untested and not supported.',
            remedy="Remove torch_compile.",
            option="torch_compile",
        )


@check
def check_best_model(options: RunOptions) -> Iterator[Problem]:
    """Check that the run evaluates whenever it saves; otherwise the best model could not be determined."""
    if not options.load_best_model_at_end and options.save_strategy != "best":
        return
    cause = "load_best_model_at_end" if options.load_best_model_at_end else "save_strategy: best"
    concerned = (cause.partition(":")[0], "eval_strategy", "save_strategy")
    if options.eval_strategy == "no":
        yield Problem(
            f"{cause} requires evaluation, but eval_strategy is no.",
            remedy=f"Set eval_strategy: steps with eval_dataset or val_size, or remove {cause}.",
            option=concerned,
        )
        return
    if options.save_strategy not in ("best", options.eval_strategy):
        yield Problem(
            f"{cause} requires eval_strategy and save_strategy to match. "
            f"Received: eval_strategy {options.eval_strategy}, save_strategy {options.save_strategy}.",
            remedy=f"Set save_strategy: {options.eval_strategy}.",
            option=concerned,
        )
        return
    yield from _check_evaluation_at_checkpoints(options, cause)


def _check_evaluation_at_checkpoints(options: RunOptions, cause: str) -> Iterator[Problem]:
    """Check that every checkpoint coincides with an evaluation, if both are set in steps."""
    if options.eval_strategy != "steps" or options.save_strategy != "steps":
        return
    every_eval = options.eval_steps if options.eval_steps is not None else options.logging_steps
    if (every_eval < 1) != (options.save_steps < 1):
        yield Problem(
            f"{cause} requires eval_steps and save_steps to be both numbers of steps or both fractions below 1. "
            f"Received: eval_steps {every_eval:g}, save_steps {options.save_steps:g}.",
            option=("eval_steps", "save_steps"),
        )
        return
    scale = 1_000_000 if every_eval < 1 else 1
    if round(options.save_steps * scale) % round(every_eval * scale) == 0:
        return
    yield Problem(
        f"{cause} requires save_steps to be a multiple of eval_steps. "
        f"Received: save_steps {options.save_steps:g}, eval_steps {every_eval:g}.",
        remedy=f"Set save_steps: {every_eval:g}.",
        option=("save_steps", "eval_steps"),
    )


@check
def check_schedule_arguments(options: RunOptions) -> list[Problem]:
    """Check the arguments of the learning rate schedule. They do not depend on the length of the run."""
    try:
        if options.lr_scheduler_type in FOLLOWS_METRIC:
            optimizer = SGD([Parameter(torch.zeros(1))], lr=options.learning_rate)
            create_scheduler(optimizer, options, 100, options.learning_rate)
        else:  # the first optimizer of a process imports torch._dynamo, which takes a second
            lr_factor(options, 100, options.learning_rate)
    except UserError as error:
        return list(error.problems)
    return []


def check_best_model_metric(
    options: RunOptions, metrics: Sequence[str] | None, sets: Iterable[str]
) -> Iterator[Problem]:
    """Yield a problem if the metric that the run selects by, or that is set, is one that no evaluation will compute.

    Args:
        options: options of the run.
        metrics: names of the objective's metrics; None if they are not known.
        sets: names of the evaluation sets; "" for a single one.
    """
    name = best_model_metric_name(options)
    known = [f"{eval_prefix(each)}_{metric}" for each in sets for metric in (*(metrics or ()), *RATES)]
    is_read = options.metric_for_best_model or (options.eval_strategy != "no" and _depends_on_metric(options))
    if not metrics or not is_read or not known or name in known or not trains(options):
        return
    switch = f"compute_{name.removeprefix('eval_')}"
    problem = missing_metric(name, known)
    if hasattr(options, switch):
        yield replace(problem, remedy=f"Set {switch}: true.")
        return
    of_one_set = [f"{eval_prefix(one)}_{metric}" for one in options.eval_dataset or () for metric in metrics]
    if name in of_one_set and not options.eval_on_each_dataset:
        yield replace(problem, remedy=f"Set eval_on_each_dataset: true. {problem.remedy}")
        return
    yield problem


def _depends_on_metric(options: RunOptions) -> bool:
    """Return whether the best model, the end of the run or the learning rate depends on the metric."""
    follows = options.lr_scheduler_type in FOLLOWS_METRIC or options.early_stopping_steps is not None
    return follows or bool(options.load_best_model_at_end) or options.save_strategy == "best"


def step_notes(options: RunOptions, steps: StepPlan) -> Iterator[str]:
    """Return a note if a step has more rows than the training set, which is probably a mistake."""
    if steps.rows is None or steps.rows >= steps.rows_per_step:
        return
    yield (
        f"The training set ({format_count(steps.rows, 'row')}) is smaller than the effective batch size "
        f"({steps.rows_per_step:,}): each epoch is one step. "
        "For more steps, reduce per_device_train_batch_size or gradient_accumulation_steps."
    )


def may_stream(options: RunOptions) -> bool:
    """Return whether training rows can be encoded on the fly: no option needs all rows in advance."""
    return trains(options) and not option_that_needs_all_rows(options)


@check
def check_streaming(options: RunOptions) -> Iterator[Problem]:
    """Check LLaMA-Factory's conditions for streaming, and refuse options that need all rows in advance."""
    if not options.streaming:
        return
    if options.max_steps <= 0 and trains(options):
        yield Problem(
            '"streaming" requires "max_steps".',
            remedy="For example, set max_steps: 1000.",
            option=("streaming", "max_steps"),
        )
    if 0 < options.val_size < 1:
        what = f'Expected "val_size" to be a number of examples when streaming. Received: {options.val_size:g}.'
        yield Problem(what, remedy="For example, set val_size: 100.", option="val_size")
    if trains(options) and (name := option_that_needs_all_rows(options)):
        stage = f" (stage {options.stage})" if name == "packing" and options.packing is None else ""
        why = "which needs the whole dataset before the first step"
        what = f'"streaming" cannot be combined with {name}{stage}, {why}.'
        yield Problem(what, remedy="Remove one of them.", option=("streaming", name))


@check
def check_places_of_models(options: RunOptions) -> list[Problem]:
    """Check that folders of reference and reward models exist."""
    problems: list[Problem] = []
    for option in (
        ("ref_model", "ref_model_adapters", "reward_model", "reward_model_adapters") if trains(options) else ()
    ):
        value = getattr(options, option)
        for name in [value] if isinstance(value, str) else value or ():
            if name.startswith(("http://", "https://")):
                continue
            try:
                check_model_path(name, option)
            except UserError as error:
                problems += error.problems
    return problems


@check
def check_packed_length(options: RunOptions) -> Iterator[Problem]:
    """Check that a pack has a token to predict: the first one of a sequence is never predicted."""
    if options.cutoff_len > 1 or not packs_rows(options, OBJECTIVES[options.stage].default_packing):
        return
    what = f"With cutoff_len: {options.cutoff_len}, packed sequences contain no token to predict."
    yield Problem(what, remedy="Set cutoff_len: 2 or more.", option=("cutoff_len", "packing"))


@check
def check_packed_columns(options: RunOptions) -> Iterator[Problem]:
    """Check that rows to be packed have no columns other than those with a value per token."""
    objective = OBJECTIVES[options.stage]
    others = sorted(objective.row_columns.keys() - StageObjective.row_columns.keys())
    has_own_check = objective.records in ("pairs", "unpaired", "prompts")
    if has_own_check or not others or not packs_rows(options, objective.default_packing):
        return
    what = f"The rows of stage: {options.stage} cannot be packed, because a pack has no {', '.join(others)}."
    yield Problem(what, remedy="Remove packing.", option=("packing", "neat_packing"))


def option_that_needs_all_rows(options: RunOptions) -> str:
    """Return the name of the option that needs all rows before the first step, or ""."""
    if packs_rows(options, OBJECTIVES[options.stage].default_packing):
        return "packing"
    if options.group_by_length or options.train_sampling_strategy == "group_by_length":
        return "group_by_length"
    if options.max_tokens_per_batch is not None:
        return "max_tokens_per_batch"
    return "tokenized_path" if options.tokenized_path else ""
