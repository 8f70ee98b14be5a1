"""The first section of ``burnish explain``: the model, its trained parts, dtypes, and patches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from burnish.adapters.base import ADAPTERS, is_frozen
from burnish.adapters.lora_model import frozen_matches
from burnish.explain.view import Line, Section
from burnish.kernels.last_layer import LAST_LAYER
from burnish.kernels.model_parts import PartName, has_vision_tower, part_at, parts_of
from burnish.kernels.probe import unwrap_peft
from burnish.kernels.tied import TIED
from burnish.losses.base import options_of
from burnish.losses.neftune import EmbeddingNoise
from burnish.models.load import SAMPLING, context_length, meta_model, samples_without_sampling
from burnish.models.patches.attention import PADDING_FREE
from burnish.models.patches.fused import patch_forwards
from burnish.models.patches.liger import LIGER, takes_liger
from burnish.models.quantization.quantize import UNTOUCHED, quantization_of
from burnish.models.source import adapter_folders
from burnish.models.tokens import resized_meta_model
from burnish.parallel.checkpointing import checkpoint_activations
from burnish.parallel.precision import device_in_words, loaded_dtype, name_of
from burnish.parallel.selection import device_of
from burnish.run.build import takes_own_attention, wants_padding_free, wants_prefix_sharing
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.plan.resources import compute_dtype, formats_in_words, storage_dtype, trained_dtype
from burnish.run.prepare import Prepared
from burnish.run.references import planned_reference
from burnish.utils.patching import Reason, allows_patch, patch, patch_summary, patches_of

CHECKED_AT_START = "enabled if it reproduces the model's output (checked at start)"


def model_section(plan: Plan, prepared: Prepared) -> Section:
    options, config, sizes = plan.options, prepared.config, prepared.sizes
    begin = "random weights" if options.train_from_scratch else options.model_name_or_path
    device = device_of(options)
    formats = f"forward passes in {name_of(compute_dtype(options, config))}"
    context = context_length(config)
    if trains(options):
        updated = torch.float32 if sizes.turns else trained_dtype(options, config)  # dtype of the active copy
        formats += f", updates in {name_of(updated)}"
        share, method = f"{100 * sizes.trained / sizes.total:.3g}%", ADAPTERS.get(options.finetuning_type).summary
        trained = Line(
            "trained",
            f"{sizes.trained:,} of {sizes.total:,} ({share}): {options.finetuning_type}. {method}",
            plan.where("finetuning_type"),
        )
    else:
        trained = Line("trained", "none: the run only evaluates or predicts", plan.where("do_train"))
    turns = sizes.turns.lines if sizes.turns else ()
    lines = [
        Line("model", f"{sizes.class_name}, {sizes.base:,} parameters, from {begin}", plan.where("model_name_or_path")),
        trained,
        *(Line(label, text, plan.where("use_badam")) for label, text in turns),
        Line("context", f"{context:,} tokens" if context else "no limit"),
        Line("device", f"{device_in_words(device)}, {formats}"),
        *(Line("formats", text) for text in _formats(options, prepared)),
        *_reference(plan, prepared),
    ]
    model = patched_shapes(options, config, prepared.tokenizer)
    of_parts = [*_parts(plan, model), *_frozen_targets(plan, model)] if trains(options) else []
    return Section("Model", [*lines[:2], *of_parts, *lines[2:], *_patches(plan, prepared, model)])


def _parts(plan: Plan, model: nn.Module) -> Iterator[Line]:
    """Yield the numbers of frozen and trained parameters of the parts of a vision model."""
    if not has_vision_tower(model):
        return
    parts = parts_of(model)
    frozen, trained = Counter[PartName](), Counter[PartName]()
    for path, parameter in model.named_parameters():
        counts = trained if parameter.requires_grad else frozen
        counts[part_at(path, parts)] += parameter.numel()
    for part, (label, option) in _PARTS.items():
        if frozen[part] or trained[part]:
            yield Line(label, f"{frozen[part]:,} parameters frozen, {trained[part]:,} trained", plan.where(option))


def _frozen_targets(plan: Plan, model: nn.Module) -> Iterator[Line]:
    """Yield the entries of ``lora_target`` that also match layers of frozen parts."""
    options = plan.options
    if options.finetuning_type != "lora" or not has_vision_tower(model):
        return
    for name, paths in frozen_matches(model, options.lora_target, is_frozen(model, options)).items():
        layers = f"{len(paths):,} layers" if len(paths) > 1 else "a layer"
        text = f'"{name}" also matches {layers} of frozen parts; freeze_vision_tower: false or '
        text += "freeze_multi_modal_projector: false would train them"
        yield Line("lora_target", text, plan.where("lora_target"))


_PARTS: Mapping[PartName, tuple[str, str]] = {
    "vision_tower": ("vision tower", "freeze_vision_tower"),
    "multi_modal_projector": ("projector", "freeze_multi_modal_projector"),
    "language_model": ("language model", "freeze_language_model"),
}
"""Part of a vision model -> its label, and the option that freezes it."""


def _formats(options: RunOptions, prepared: Prepared) -> list[str]:
    """The dtypes of the weights, if the run changes them."""
    config, saves = prepared.config, trains(options) and prepared.sizes.saves_whole_model
    if quantization_of(options, config):
        return []
    stored, updated = storage_dtype(options, config), trained_dtype(options, config)
    frozen = updated if prepared.sizes.total == prepared.sizes.trained or prepared.sizes.turns else stored
    return [
        text.removeprefix("Formats: ")
        for text in formats_in_words(
            loaded_dtype(config), frozen, updated if trains(options) else None, stored if saves else None
        )
    ]


def _patches(plan: Plan, prepared: Prepared, model: nn.Module) -> Iterator[Line]:
    """The patches that the run will make to the model."""
    for sentence in patch_summary(model) or ["none"]:
        yield Line("patched", sentence, plan.where("patches"))
    for why in dict.fromkeys(done.why for done in patches_of(model)):
        yield Line("patch", f"{why.kind}: {why.why}")
    for why in tried_patches(plan.options, prepared.config, skips_tokens(prepared, plan.options)):
        yield Line("patch", f"{why.kind}: {why.why}; {CHECKED_AT_START}")


def patched_shapes(options: RunOptions, config: Any, tokenizer: Any) -> nn.Module:
    """The model without weights, with its adapter and all patches that only depend on its structure. Uses the same
    functions as the run.
    """
    with torch.device("meta"):
        model = ADAPTERS[options.finetuning_type](options, adapter_folders(options)).attach(
            resized_meta_model(config, tokenizer, options)
        )
    if samples_without_sampling(model):
        patch(model, "generation_config.do_sample", True, SAMPLING)
    if not options.torch_compile:
        patch_forwards(model, options, device_of(options))
    if options.neftune_noise_alpha and "neftune_noise_alpha" in options_of(options.stage):
        EmbeddingNoise(unwrap_peft(model).get_input_embeddings(), options.neftune_noise_alpha)
    if options.gradient_checkpointing:
        checkpoint_activations(model, options.gradient_checkpointing_kwargs)
    return model


def skips_tokens(prepared: Prepared, options: RunOptions) -> bool:
    """Whether the run skips tokens that do not affect the loss, if the loaded model allows it."""
    shapes = meta_model(prepared.config, options.trust_remote_code)
    return wants_padding_free(options) and wants_prefix_sharing(prepared.objective, shapes, options, device_of(options))


def tried_patches(options: RunOptions, config: Any, is_skipping: bool) -> list[Reason]:
    """Patches that the run tries on the loaded model, and keeps if the model's results do not change.

    Args:
        is_skipping: see ``skips_tokens``.
    """
    wanted = {
        PADDING_FREE: wants_padding_free(options) and takes_own_attention(options),
        # transformers ties by the config of the whole model; that of its language model may lack the setting.
        TIED: options.fused_loss is not False and getattr(config, "tie_word_embeddings", False),
        LIGER: takes_liger(options, device_of(options)),
        LAST_LAYER: is_skipping and not options.torch_compile,
    }
    found = [why for why, is_wanted in wanted.items() if is_wanted and allows_patch(options, why)]
    return [*found, UNTOUCHED] if options.quantization_bit == 4 else found


def _reference(plan: Plan, prepared: Prepared) -> list[Line]:
    """Lines about the reference model and its cost."""
    if not prepared.objective.needs_reference:
        return []
    text = planned_reference(plan.options, prepared.sizes, prepared.formats)
    return [Line("reference", text, plan.where("ref_model"))]
