"""Options of preference learning, and their checks.

Names and defaults are LLaMA-Factory's if it has the option, else TRL's. TRL's name is an alias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from burnish.config.checks import check, notes
from burnish.config.errors import OptionText, Problem
from burnish.config.options import changed_options, ineffective_option_notes, option, shared_options, specs
from burnish.losses.base import OBJECTIVES, options_of
from burnish.losses.preference_losses import PAIR_LOSSES

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
SFT_LOSSES = {"nll": "", "dft": "For TRL's dft, set use_dft_loss: true."}
REMOVED_LOSSES = {
    "kto_pair": OptionText("{pref_loss}: kto_pair was removed; use {stage=kto}, or {pref_loss}: bco_pair.")
}
_SFT_ONLY_OPTIONS = ("train_on_prompt", "mask_history", "neat_packing", "eval_packing", "predict_with_generate")
_PAPER_BETA = 1.0
_MAX_USUAL_RATE = 2e-5


@shared_options
@dataclass
class ReferenceSyncFields:
    """Options of a reference that follows the policy, also of TRL's configs."""

    sync_ref_model: bool = option(
        False, "Update the reference model towards the policy every ref_model_sync_steps steps (TR-DPO)."
    )
    ref_model_mixup_alpha: float = option(
        0.6, "Weight of the policy in each update of the reference model.", gt=0, le=1
    )
    ref_model_sync_steps: int = option(
        512, "Number of steps between updates of the reference model.", ge=1, unit="steps"
    )


@shared_options
@dataclass
class PrecomputeFields:
    """The option of a reference that is evaluated beforehand, also of TRL's configs."""

    precompute_ref_log_probs: bool = option(
        False,
        "Compute the reference log-probabilities of all examples once before training. Steps are faster, "
        "and full fine-tuning keeps no copy of the initial weights.",
    )  # fmt: skip


@shared_options
@dataclass
class DpoFields:
    """Options of losses of pairs, also of TRL's ``DPOConfig``."""

    ld_alpha: float | None = option(
        None, "Weight of the tokens beyond the length of the shorter response (LD-DPO).", ge=0, le=1
    )
    discopop_tau: float = option(0.05, "Temperature of the DiscoPOP loss.", gt=0)
    f_divergence_type: str = option("reverse_kl", "f-divergence used in place of the reverse KL.", choices=DIVERGENCES)
    f_alpha_divergence_coef: float = option(0.5, "Coefficient of alpha_divergence.")
    use_weighting: bool = option(False, "Weight each pair by its probability under the policy (WPO).")


@dataclass
class PreferenceOptions:
    """Preference optimization."""

    pref_beta: float = option(
        0.1, "β of the preference loss. A larger β keeps the policy closer to the reference model.", gt=0,
        aliases=("beta", "dpo_beta", "orpo_beta"),
    )  # fmt: skip
    pref_ftx: float = option(
        0.0, "Weight of an additional supervised loss on the chosen responses (mean over tokens).", ge=0,
        aliases=("dpo_ftx", "rpo_alpha"),
    )  # fmt: skip
    disable_dropout: bool = option(True, "Disable dropout in preference training, including LoRA dropout.")


@dataclass
class ReferenceOptions(PrecomputeFields, ReferenceSyncFields):
    """Reference model."""

    ref_model: str | None = option(
        None,
        "Reference model: a folder or a model ID on the Hub. Default: the model before training.",
        names_place=True,
    )
    ref_model_adapters: list[str] | None = option(
        None, "Adapters to merge into the reference model, in order.", names_place=True
    )
    ref_model_quantization_bit: int | None = option(
        None, "Number of bits to quantize the reference model to.", choices=(4, 8)
    )


@dataclass
class PairOptions(DpoFields):
    """Losses of preference pairs."""

    pref_loss: list[str] = option(
        ["sigmoid"], "Preference loss. Several losses are summed.", choices=tuple(PAIR_LOSSES),
        refused=lambda: (*REMOVED_LOSSES, "nll", "dft"),
        aliases=("loss_type", "dpo_loss"),
    )  # fmt: skip
    pref_loss_weights: list[float] | None = option(
        None, "Weights of several preference losses. Default: 1 each.", aliases=("loss_weights",)
    )
    dpo_label_smoothing: float = option(
        0.0, "Assumed fraction of pairs with swapped labels; for sigmoid, robust, exo_pair, aot, aot_unpaired, dpop, "
        "simpo and cpo.", ge=0, lt=0.5, aliases=("label_smoothing",),
    )  # fmt: skip
    pref_bco_weight: float = option(0.0, "Weight of an additional BCO loss.", ge=0)
    simpo_gamma: float = option(0.5, "Target reward margin of SimPO.", ge=0)
    cpo_alpha: float = option(
        0.0, "Weight of the supervised loss on chosen responses in CPO (mean over the tokens of the step).", ge=0
    )
    alphapo_alpha: float = option(0.0, "Alpha of AlphaPO, for losses without a reference model. 0: off.")
    dpop_lambda: float = option(50.0, "Weight of DPOP's penalty for chosen responses that become less likely.", ge=0)


class PairLossChoices(PairOptions, PreferenceOptions):
    """Options that determine the loss of a pair."""


class PreferenceChoices(PairLossChoices, ReferenceOptions):
    """Options that this module reads."""

    finetuning_type: str
    learning_rate: float
    packing: bool | None
    stage: str
    streaming: bool


@check
def check_preferences(options: PreferenceChoices) -> Iterator[Problem]:
    """Report options that contradict each other or require rows of another stage."""
    if not _trains_on_preferences(options.stage):
        if "dft" not in options.pref_loss:
            return
        what = '"loss_type" must be a preference loss. Received: dft.'
        yield Problem(what, remedy=SFT_LOSSES["dft"], option="pref_loss")
        return
    for name in _SFT_ONLY_OPTIONS:
        if getattr(options, name):
            what = f'"{name}" is for stage: sft; preference losses apply to the responses only.'
            yield Problem(what, remedy="Remove it.", option=name)
    if options.packing:
        yield Problem(
            '"packing" is true. Pairs cannot be packed; their batches are padding-free instead.',
            remedy="Remove packing.",
            option="packing",
        )
    yield from check_reference(options, options.streaming)


def _trains_on_preferences(stage: str) -> bool:
    """Whether a stage learns from preferences: pairs, or labelled responses."""
    return OBJECTIVES[stage].records in ("pairs", "unpaired")


def check_reference(options: ReferenceOptions, streams: bool) -> Iterator[Problem]:
    """Report precomputed reference values that would become invalid. ``streams``: rows are encoded on demand."""
    if not options.precompute_ref_log_probs:
        return
    if options.sync_ref_model:
        what = (
            '"precompute_ref_log_probs" computes the reference log-probabilities once, but "sync_ref_model" updates '
            "the reference model."
        )
        both = ("precompute_ref_log_probs", "sync_ref_model")
        yield Problem(what, remedy="Remove one of them.", option=both)
    if streams:
        what = (
            '"precompute_ref_log_probs" requires all examples before the first step, but "streaming" loads them '
            "during training."
        )
        yield Problem(what, remedy="Remove one of them.", option=("precompute_ref_log_probs", "streaming"))


@check
def check_pair_losses(options: PreferenceChoices) -> Iterable[Problem]:
    """Check the losses of pairs in the stages that use them."""
    return check_pairs(options) if "pref_loss" in options_of(options.stage) else ()


def check_pairs(options: PairLossChoices) -> Iterator[Problem]:
    names, weights = options.pref_loss, options.pref_loss_weights
    yield from (Problem(REMOVED_LOSSES[name], option="pref_loss") for name in names if name in REMOVED_LOSSES)
    losses = [PAIR_LOSSES[name] for name in names if name in PAIR_LOSSES]
    if weights is not None and len(weights) != len(names):
        what = OptionText(
            "{pref_loss_weights} must have one weight for each loss. Received: {} for {}.", len(weights), len(names)
        )
        yield Problem(what, option="pref_loss_weights")
    if not names:
        yield Problem(
            OptionText("{pref_loss} is empty."), remedy=f"Available: {', '.join(PAIR_LOSSES)}.", option="pref_loss"
        )
    smoothing = options.dpo_label_smoothing
    if smoothing and losses and not any(loss.smooths_labels for loss in losses):
        known = ", ".join(name for name, loss in PAIR_LOSSES.items() if loss.smooths_labels)
        what = OptionText(
            '"{dpo_label_smoothing}" applies to {} only. Received: {pref_loss} {}.', known, ", ".join(names)
        )
        yield Problem(
            what,
            remedy=OptionText("Remove it, or set {pref_loss} to one of these."),
            option=("dpo_label_smoothing", "pref_loss"),
        )
    if "exo_pair" in names and not smoothing:
        what = OptionText("{pref_loss}: exo_pair uses smoothed labels, so {dpo_label_smoothing} must be above 0.")
        yield Problem(
            what, remedy=OptionText("Set {dpo_label_smoothing}: 0.001."), option=("pref_loss", "dpo_label_smoothing")
        )
    if options.f_divergence_type != "reverse_kl" and not all(loss.takes_divergence for loss in losses):
        known = ", ".join(name for name, loss in PAIR_LOSSES.items() if loss.takes_divergence)
        yield Problem(
            OptionText('"{f_divergence_type}" {} applies to {} only.', options.f_divergence_type, known),
            option="f_divergence_type",
        )
    if options.use_weighting and any(loss.sorts_pairs for loss in losses):
        yield Problem(
            OptionText('"{use_weighting}" weights individual pairs, but aot compares across pairs.'),
            remedy="Keep one.",
            option="use_weighting",
        )


_SWITCHES = {
    "ref_model_adapters": "ref_model", "ref_model_quantization_bit": "ref_model",
    "ref_model_mixup_alpha": "sync_ref_model", "ref_model_sync_steps": "sync_ref_model",
}  # fmt: skip
"""Option -> the option without which it has no effect."""


@notes
def preference_notes(options: PreferenceChoices) -> list[str]:
    """Notes on options without effect, or with a probably unintended value."""
    stage = options.stage
    groups = (
        PreferenceOptions,
        ReferenceOptions,
        *(m.options for m in OBJECTIVES if m.options and _trains_on_preferences(m.name)),
    )
    read = options_of(stage)
    unread = dict.fromkeys(name for group in groups for name in specs(group) if name not in read)
    found = [f'"{name}" has no effect: stage is {stage}.' for name in unread if name in changed_options(options)]
    if "ref_model" in read:
        found += ineffective_option_notes(options, _SWITCHES)
    if not OBJECTIVES[stage].logs_rewards:
        return found
    names = [name for name in options.pref_loss if name in PAIR_LOSSES]
    own = pair_notes(options, names) if "pref_loss" in read else []
    return [*own, *found, *_rate_notes(options, "1e-7 to 5e-6")]


def needs_reference(options: PairLossChoices) -> bool:
    """Return whether the preference loss uses a reference model."""
    return any(PAIR_LOSSES[name].needs_reference for name in options.pref_loss) or bool(options.pref_bco_weight)


def pair_notes(options: PairLossChoices, names: list[str]) -> Iterator[str]:
    losses, changed = [PAIR_LOSSES[name] for name in names], changed_options(options)
    shown = ", ".join(names)
    needs = {
        "simpo_gamma": "simpo" in names,
        "discopop_tau": "discopop" in names,
        "dpop_lambda": "dpop" in names,
        "f_alpha_divergence_coef": options.f_divergence_type == "alpha_divergence",
        "alphapo_alpha": any(not loss.needs_reference for loss in losses),
    }
    yield from (
        OptionText(f'"{{{name}}}" has no effect: {{pref_loss}} is {{}}.', shown)
        for name, read in needs.items()
        if name in changed and not read
    )
    if not needs_reference(options):
        set_options = [name for name in specs(ReferenceOptions) if name in changed]
        yield from (
            OptionText(f'{{pref_loss}}: {{}} is reference-free; "{{{name}}}" has no effect.', shown)
            for name in set_options
        )
    if "robust" in names and not options.dpo_label_smoothing:
        text = "{pref_loss}: robust equals sigmoid without {dpo_label_smoothing}, the fraction of swapped pairs."
        yield OptionText(text)
    if "simpo" in names and options.pref_beta < _PAPER_BETA:
        yield OptionText("{pref_beta} {:g} is too low for SimPO; the paper uses 2.0 to 2.5.", options.pref_beta)


def _rate_notes(options: PreferenceChoices, usual: str) -> Iterator[str]:
    if options.finetuning_type != "full" or options.learning_rate < _MAX_USUAL_RATE:
        return
    yield (
        f"learning_rate {options.learning_rate:g} is high for preference optimization (typically "
        f"{usual}); the model may degenerate."
    )
