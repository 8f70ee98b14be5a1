"""Reference models of a run, with their memory cost.

- new adapter: the model without the adapter; costs only forward passes
- continued adapter, or PiSSA: a copy of the adapter's initial weights
- full training: a copy of the model's initial weights
- ``ref_model``: a second frozen model
- ``precompute_ref_log_probs``: any of these, evaluated once before the first step; no copy of initial weights is kept

A reference model with another vocabulary than the policy is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from burnish.adapters.base import ModelAdapter
from burnish.adapters.lora import LoraAdapter, load_adapter
from burnish.adapters.lora_model import merge_into_base
from burnish.config.errors import UserError
from burnish.data.rows.mismatched import RowsWithMismatched
from burnish.kernels.probe import shares_prefixes, unwrap_peft
from burnish.loop.loop import Loop
from burnish.loop.protocols import Parallel
from burnish.losses.base import StageObjective
from burnish.losses.reference import (
    DisabledAdapter,
    InitialWeights,
    MovingReference,
    Reference,
    SeparateModel,
    ShardedInitialWeights,
    UnchangedModel,
    refuse_sharded_weights,
)
from burnish.models.attention_choice import requested_attention
from burnish.models.images.features import patch_vision_model
from burnish.models.load import load_config, load_model
from burnish.models.options import REFERENCE_MODEL
from burnish.models.patches.attention import PADDING_FREE, make_padding_free
from burnish.models.patches.fused import patch_forwards
from burnish.models.source import adapter_folders
from burnish.run.plan.checks import trains
from burnish.run.plan.memory import Formats, shown_bytes
from burnish.run.plan.options import RunOptions
from burnish.run.plan.other_models import other_vocabulary, reference_options
from burnish.run.plan.resources import Sizes, load_dtype
from burnish.run.prepare import Prepared
from burnish.run.reference_cache import RowsWithReference, fill
from burnish.utils.patching import allows_patch


def setup_reference(
    objective: StageObjective, model: nn.Module, adapter: ModelAdapter, parallel: Parallel, options: RunOptions,
    is_padding_free: bool,
) -> list[str]:  # fmt: skip
    """Set the objective's reference model, if it needs one. Returns notes for the user.

    Args:
        model: the policy, before training.
        adapter: adapter of the policy.
        parallel: processes and devices of the run.
        options: options of the run.
        is_padding_free: whether batches are padding-free, which the reference model must then support.
    """
    if not objective.needs_reference:
        return []
    objective.reference, sentences = _reference_of(objective, model, adapter, parallel, options, is_padding_free)
    return sentences


def _reference_of(
    objective: StageObjective, model: nn.Module, adapter: ModelAdapter, parallel: Parallel, options: RunOptions,
    is_padding_free: bool,
) -> tuple[Reference, list[str]]:  # fmt: skip
    if options.ref_model is not None:
        second = SeparateModel(_load_reference_model(objective, model, parallel, options, is_padding_free))
        sentence = f"The reference is {options.ref_model}, a second model in memory."
        if not options.sync_ref_model:
            return second, [sentence]
        refuse_sharded_weights(parallel)
        return _moving_reference(second.beside(model), sentence, options)
    if is_base(options) and not options.sync_ref_model:
        return DisabledAdapter(adapter, model), ["The reference is the model without the adapter."]
    if options.precompute_ref_log_probs:
        return UnchangedModel(), [
            "The reference is the initial model of this run, evaluated on every example before the first step."
        ]
    what = "the adapter's" if not adapter.saves_whole_model else "the model's"
    sentence = f"The reference is {what} initial weights of this run; a copy is kept in memory."
    if isinstance(adapter, LoraAdapter) and adapter.to_continue is not None:
        sentence += " To use the model without the adapter (as in LLaMA-Factory), set ref_model to the base model."
    if not options.sync_ref_model:
        return ShardedInitialWeights(parallel) if parallel.shards_weights else InitialWeights(model), [sentence]
    refuse_sharded_weights(parallel)
    return _moving_reference(InitialWeights(model), sentence, options)


def _moving_reference(
    start: InitialWeights | SeparateModel, sentence: str, options: RunOptions
) -> tuple[MovingReference, list[str]]:
    every, share = options.ref_model_sync_steps, options.ref_model_mixup_alpha
    return MovingReference(start, every, share), [
        f"{sentence} It is updated towards the policy {_how_often(every)}, with weight {share:g}."
    ]


def _how_often(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def add_reference_columns(prepared: Prepared, options: RunOptions) -> Prepared:
    """Return the rows with a place for precomputed reference log-probabilities, if the options ask for them."""
    if not (options.precompute_ref_log_probs and prepared.objective.needs_reference):
        return prepared
    rows: Any = RowsWithReference(prepared.rows)
    sample = rows if prepared.sample is prepared.rows else prepared.sample
    evals: Any = {name: RowsWithReference(some) for name, some in prepared.eval_rows.items()}
    return replace(prepared, rows=rows, sample=sample, eval_rows=evals)


def add_mismatched_responses(prepared: Prepared, options: RunOptions) -> Prepared:
    """Return the training rows with mismatched completions from their own step, if the options ask for them."""
    if prepared.objective.mismatched_responses(options) != "step":
        return prepared
    rows: Any = RowsWithMismatched(prepared.rows, options.cutoff_len)
    return replace(prepared, rows=rows, sample=rows if prepared.sample is prepared.rows else prepared.sample)


def precompute(run: Loop, prepared: Prepared, options: RunOptions) -> list[str]:
    """Precompute reference log-probabilities. Returns notes. A reference model that takes memory is released."""
    objective: Any = run.objective
    train_rows: list[Any] = [prepared.rows] if trains(options) else []
    needed = [rows for rows in (*train_rows, *prepared.eval_rows.values()) if isinstance(rows, RowsWithReference)]
    size, notes = options.per_device_eval_batch_size, list[str]()
    for rows in needed:
        notes += fill(rows, objective, run.model, run.parallel, size, ignores_cache=options.overwrite_cache)
    if isinstance(prepared.rows, RowsWithReference) and not isinstance(objective.reference, DisabledAdapter):
        objective.reference = None
    return notes


def is_base(options: RunOptions) -> bool:
    """Return whether the model without its adapter equals the start of the run.

    This is the case for a new adapter, except with PiSSA.
    """
    continues = options.adapter_name_or_path and not options.create_new_adapter
    return options.finetuning_type == "lora" and not continues and not options.pissa_init


def planned_reference(options: RunOptions, sizes: Sizes, formats: Formats) -> str:
    """Describe the reference model and its cost, before any weight is read."""
    is_precomputed = options.precompute_ref_log_probs
    passes = f"one forward pass without gradients per {'example' if is_precomputed else 'micro-batch'}"
    if options.ref_model is not None:
        size = shown_bytes(sizes.base * formats.compute)
        return f"{options.ref_model}, a second frozen model; costs about {size} of memory and {passes}"
    if is_base(options) and not options.sync_ref_model:
        return f"the model without its adapter; needs no additional memory, but {passes}"
    if options.precompute_ref_log_probs:
        return f"the initial weights, evaluated before the first step; needs no additional memory, but {passes}"
    size = shown_bytes(sizes.trained * formats.trained)
    moves = f"; updated {_how_often(options.ref_model_sync_steps)}" if options.sync_ref_model else ""
    return f"a copy of the initial trainable weights; costs {size} of memory and {passes}{moves}"


def _load_reference_model(
    objective: StageObjective, model: nn.Module, parallel: Parallel, options: RunOptions, is_padding_free: bool
) -> nn.Module:
    model_options = reference_options(options)
    config = load_config(model_options, names=REFERENCE_MODEL)
    dtype, device = (
        load_dtype(options, config, is_frozen=True),
        parallel.device if model_options.quantization_bit else None,
    )
    second: Any = load_model(model_options, dtype=dtype, device=device, config=config, names=REFERENCE_MODEL)
    for folder in adapter_folders(model_options):
        load_adapter(second, folder)
        merge_into_base(second)
    refuse_other_vocabulary(model, second)
    second.to(parallel.device)
    patch_vision_model(second)
    if not options.torch_compile:
        patch_forwards(second, options)
    if is_padding_free and not _supports_same_batches(model, second, options):
        raise UserError(
            f'"ref_model" {options.ref_model} does not support the padding-free batches of the policy: '
            "it cannot separate concatenated sequences.",
            remedy="Set padding_free: false.",
            option="ref_model",
        )
    return objective.module_of_reference(second)


def _supports_same_batches(model: nn.Module, second: nn.Module, options: RunOptions) -> bool:
    """Return whether the second model supports padding-free rows, and prefix sharing if the policy uses it."""
    own_attention = requested_attention(options) is None and allows_patch(options, PADDING_FREE)
    is_padding_free = make_padding_free(second, own_attention=own_attention).is_padding_free
    return is_padding_free and (not shares_prefixes(model) or shares_prefixes(second))


def refuse_other_vocabulary(model: nn.Module, second: nn.Module) -> None:
    """Raise UserError if the vocabulary sizes of reference and policy differ."""
    policy_size, reference_size = (unwrap_peft(one).get_input_embeddings().weight.shape[0] for one in (model, second))
    if policy_size != reference_size:
        raise UserError(other_vocabulary(policy_size, reference_size))
