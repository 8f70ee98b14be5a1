"""Fingerprints of everything that a run depends on, stored in each checkpoint and compared before a run resumes.

Data, template, tokenizer, adapters and base model are identified by content, so that folders may be moved. Every other
option is stored, except those listed in ``UNTRACKED_OPTIONS``, which change neither the rows, nor their order, nor the
arithmetic of a step, and those in ``BY_CONTENT``, whose content is stored instead. A new option therefore prevents
resuming until it is listed as untracked. Options that may change are in ``checkpoint.comparison.MAY_CHANGE``; changes
are applied and reported. Any other change is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import burnish
from burnish.adapters.base import ADAPTERS
from burnish.checkpoint.comparison import EVALUATION, MAY_CHANGE
from burnish.config.extensions import packages_of
from burnish.config.options import specs
from burnish.config.registry import Member, Registry
from burnish.config.secrets import mask_json_without_environment
from burnish.data.chat.table import TEMPLATES
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS
from burnish.data.sets.formats import FORMATS
from burnish.loop.schedule import FOLLOWS_METRIC, StepPlan
from burnish.losses.base import OBJECTIVES
from burnish.losses.reward import REWARD_HEADS
from burnish.models.fingerprint import (
    adapters_fingerprint,
    base_fingerprint,
    config_fingerprint,
    model_fingerprint,
    place_fingerprint,
)
from burnish.models.generate import GenerationOptions
from burnish.models.reward_files import reward_model_folders
from burnish.optim.builtin import OPTIMIZERS
from burnish.report.trackers import TRACKERS
from burnish.run.plan.checks import evaluates
from burnish.run.plan.options import GROUPS, MEMBER_GROUPS, RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.response_metrics import METRICS, MetricOptions
from burnish.utils.source_files import source_digest

BY_CONTENT: dict[str, tuple[str, ...]] = {
    "base_model, config": ("model_name_or_path", "model_revision", "cache_dir"),
    "adapters": ("adapter_name_or_path",),
    "ref_model": ("ref_model",),
    "ref_model_adapters": ("ref_model_adapters",),
    "eval_data": ("eval_dataset",),
    "data": (
        "dataset", "dataset_dir", "formatting", "columns", "tags", "max_samples", "val_size", "mix_strategy",
        "interleave_probs", "on_bad_record", "streaming", "buffer_size",
    ),
    "template": ("template", "default_system", "tool_format", "missing_control_tokens"),
    "tokenizer": ("add_tokens", "add_special_tokens"),
    "rows_per_step": ("per_device_train_batch_size", "gradient_accumulation_steps"),
}  # fmt: skip
"""Fingerprint -> options that it covers."""
UNTRACKED_OPTIONS: dict[str, tuple[str, ...]] = {
    "whether to train, evaluate and predict": ("do_train", "do_eval", "do_predict", "eval_on_start"),
    "access tokens": ("hf_hub_token", "ms_hub_token"),
    "how examples are tokenized and loaded": (
        "preprocessing_batch_size", "preprocessing_num_workers", "overwrite_cache", "tokenized_path",
        "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory",
    ),
    "evaluation": ("per_device_eval_batch_size", "compute_accuracy", "compute_entropy"),
    "where and how checkpoints are saved": (
        "output_dir", "overwrite_output_dir", "resume", "resume_from_checkpoint", "resume_despite_changes",
        "save_total_limit", "save_only_model", "save_in_background",
    ),
    "output and logs": ("print_param_status", "badam_verbose", "logging_nan_inf_filter"),
    "time limit": ("max_train_seconds",),
    "process startup and communication": (
        "num_processes", "max_restarts", "stall_timeout_s",
        "ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters",
        "ddp_static_graph",
    ),
}  # fmt: skip
"""Reason -> options that change neither rows nor arithmetic."""
UNTRACKED_GROUPS = (
    "GenerationOptions", "InferOptions", "MetricOptions", "ExportOptions", "QuantizedExportOptions", "ReportOptions",
    "HubOptions", "ProfileOptions",
)  # fmt: skip
LIBRARIES = ("torch", "transformers")
_POST_TRAINING_OPTIONS = ("do_eval", "do_predict", "report_to", "plot_loss", "profile")


def kept_options() -> list[str]:
    """Return the options whose values are stored in a checkpoint."""
    left_out = {name for names in (*BY_CONTENT.values(), *UNTRACKED_OPTIONS.values()) for name in names}
    return [
        name
        for group in (*GROUPS, *MEMBER_GROUPS)
        if group.__name__ not in UNTRACKED_GROUPS
        for name, spec in specs(group).items()
        if name not in left_out and not spec.ignored and not spec.is_secret
    ]


def values_of(options: RunOptions) -> dict[str, Any]:
    """Return the values of the kept options, as JSON data."""
    values = {name: getattr(options, name) for name in kept_options()}
    made: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return made


def may_change(options: RunOptions) -> frozenset[str]:
    """Return the fingerprints that may change on resume. Evaluation may change unless it affects the training."""
    decides = (
        options.load_best_model_at_end or options.save_strategy == "best" or options.early_stopping_steps is not None
        or options.lr_scheduler_type in FOLLOWS_METRIC
    )  # fmt: skip
    accepted = {"reward functions"} if options.on_changed_reward == "accept" else set()
    return (MAY_CHANGE - EVALUATION if decides else MAY_CHANGE) | accepted


def post_training_options(options: RunOptions) -> dict[str, Any]:
    """Return the options for work other than training, as JSON data. A finished run does not repeat that work."""
    names = [
        *_POST_TRAINING_OPTIONS,
        *(UNTRACKED_OPTIONS["evaluation"] if options.do_predict or evaluates(options) else ()),
    ]
    if options.do_predict:
        names += [*specs(GenerationOptions), *specs(MetricOptions)]
    values: dict[str, Any] = json.loads(json.dumps({name: getattr(options, name) for name in names}, default=str))
    return values


def fingerprints_of(plan: Plan, contents: Mapping[str, Any], steps: StepPlan) -> dict[str, Any]:
    """Return the fingerprints of a run as JSON data; see ``checkpoint.comparison.MAY_CHANGE`` for allowed changes.

    Secrets, such as a key among the arguments of a reward function, are replaced, and may therefore change.

    Args:
        contents: hashes of training and evaluation data, template and tokenizer.
        steps: number of steps and rows per step.
    """
    options, known = plan.options, specs(RunOptions)
    prints = values_of(options)
    prints |= {name: place_fingerprint(value) for name, value in prints.items() if known[name].names_place}
    if options.ref_model:
        prints["ref_model"] = model_fingerprint(options.ref_model, options, "ref_model")
    if options.reward_model and options.reward_model_type != "api":
        folders = reward_model_folders(options.reward_model, options.reward_model_adapters or (), options)
        base, *adapters = map(str, folders)
        prints["reward_model"] = model_fingerprint(base, options, "reward_model", reads_text=True)
        prints["reward_model_adapters"] = adapters_fingerprint(adapters, options, "reward_model_adapters")
    found: dict[str, Any] = mask_json_without_environment(
        prints
        | plugin_code(options)
        | {
            **contents,
            "base_model": base_fingerprint(options, options.seed),
            "config": config_fingerprint(options),
            "adapters": adapters_fingerprint(options.adapter_name_or_path, options, "adapter_name_or_path"),
            "ref_model_adapters": adapters_fingerprint(options.ref_model_adapters, options, "ref_model_adapters"),
            "rows_per_step": steps.rows_per_step,
            "world_size": plan.world_size,
            "versions": {"burnish": burnish.__version__, **{name: version(name) for name in LIBRARIES}},
        }
    )
    return found


def plugin_members(options: RunOptions) -> dict[str, Member[Any]]:
    """Return the selected members that other packages registered and that the weights depend on, by option."""
    families: dict[str, tuple[Registry[Any], str | None]] = {
        "stage": (OBJECTIVES, options.stage), "finetuning_type": (ADAPTERS, options.finetuning_type),
        "optim": (OPTIMIZERS, options.optim), "template": (TEMPLATES, options.template),
        "tool_format": (TOOL_FORMATS, options.tool_format), "formatting": (FORMATS, options.formatting),
        "reward_head": (REWARD_HEADS, options.reward_head),
    }  # fmt: skip
    chosen = {
        option: registry.choose(name, options)
        for option, (registry, name) in families.items()
        if name is not None and name in registry
    }
    return {option: member for option, member in chosen.items() if not member.is_ours}


def plugin_code(options: RunOptions) -> dict[str, str]:
    """Return a hash of the code of each selected member that another package registered."""
    found = {f"code of {option} {each.name}": code_digest(each) for option, each in plugin_members(options).items()}
    return {name: digest for name, digest in found.items() if digest}


def code_digest(member: Member[Any]) -> str:
    """Return a hash of the code of a member that another package registered; "" for a member of burnish."""
    file = None if member.is_ours else getattr(sys.modules.get(member.module), "__file__", None)
    return source_digest(Path(file)) if file else ""


def packages_used(options: RunOptions) -> list[str]:
    """Return the name and version of each package that a run uses as an extension."""
    listed: list[tuple[Registry[Any], Sequence[str]]] = [
        (TRACKERS, options.report_to or ()), (METRICS, options.predict_metrics if options.do_predict else ())
    ]  # fmt: skip
    others = [registry.get(name) for registry, names in listed for name in names if name in registry]
    members = [*plugin_members(options).values(), *(member for member in others if not member.is_ours)]
    return packages_of(member.module for member in members) if members else []
