"""The first section of ``burnish explain``: the model, what of it trains, its formats, the patches to its code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from burnish.adapters.base import ADAPTERS
from burnish.app.checks import trains
from burnish.app.explain_view import Line, Section
from burnish.app.options import RunOptions
from burnish.app.patches import patched_shapes, tried_patches
from burnish.app.plan import Plan
from burnish.app.prepare import Prepared
from burnish.app.references import needs_reference, planned_reference
from burnish.app.resources import compute_dtype, formats_in_words, held_dtype, loaded_dtype, trained_dtype
from burnish.core.patching import patches_of, summary
from burnish.engine.options import device_of
from burnish.models.load import context_length
from burnish.models.quantize import is_quantised


def model_section(plan: Plan, prepared: Prepared) -> Section:
    options, config, sizes = plan.options, prepared.config, prepared.sizes
    begin = "random weights" if options.train_from_scratch else options.model_name_or_path
    device = device_of(options)
    formats = f"forward passes in {_name(compute_dtype(options, config))}"
    context = context_length(config)
    if trains(options):
        moved = torch.float32 if sizes.turns else trained_dtype(options, config)  # of a copy of what has its turn
        formats += f", updates in {_name(moved)}"
        share, method = f"{100 * sizes.trained / sizes.total:.3g} %", ADAPTERS.get(options.finetuning_type).summary
        trained = Line(
            "trained",
            f"{sizes.trained:,} of {sizes.total:,} ({share}): {options.finetuning_type}. {method}",
            plan.where("finetuning_type"),
        )
    else:
        trained = Line("trained", "nothing: the run only evaluates or predicts", plan.where("do_train"))
    turns = sizes.turns.lines if sizes.turns else ()
    lines = [
        Line("model", f"{sizes.class_name}, {sizes.base:,} parameters, from {begin}", plan.where("model_name_or_path")),
        trained,
        *(Line(label, text, plan.where("use_badam")) for label, text in turns),
        Line("context", f"{context:,} tokens" if context else "without a limit"),
        Line("device", f"{device}, {formats}"),
        *(Line("formats", text) for text in _formats(options, prepared)),
        *_reference(plan, prepared),
    ]
    return Section("Model", [*lines, *_patches(plan, prepared)])


def _formats(options: RunOptions, prepared: Prepared) -> list[str]:
    """The formats of the weights, where the run changes them."""
    config, saves = prepared.config, trains(options) and prepared.sizes.saves_whole_model
    if is_quantised(options, config):
        return []
    held, moved = held_dtype(options, config), trained_dtype(options, config)
    frozen = moved if prepared.sizes.total == prepared.sizes.trained or prepared.sizes.turns else held
    return [
        text.removeprefix("Formats: ")
        for text in formats_in_words(
            loaded_dtype(config), frozen, moved if trains(options) else None, held if saves else None
        )
    ]


def _patches(plan: Plan, prepared: Prepared) -> Iterator[Line]:
    """The patches that the run will make to the model's code."""
    model = patched_shapes(plan.options, prepared.config, prepared.tokenizer)
    for sentence in summary(model) or ["nothing"]:
        yield Line("patched", sentence, plan.where("patches"))
    for why in dict.fromkeys(done.why for done in patches_of(model)):
        yield Line("why", f"{why.kind}: {why.why}")
    for why in tried_patches(plan.options, prepared.config):
        yield Line("tried", f"{why.kind}: {why.why}; kept if the model says the same")


def _reference(plan: Plan, prepared: Prepared) -> list[Line]:
    """Lines about the reference model: the one that the policy is compared with, and its cost."""
    if not needs_reference(prepared.objective):
        return []
    text = planned_reference(plan.options, prepared.sizes, prepared.formats)
    return [Line("reference", text, plan.where("ref_model"))]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
