"""Options of stages that train on the model's own completions, and their validation before data is read.

Names and defaults are those of TRL 1.16's ``GRPOConfig`` and ``RLOOConfig``, and LLaMA-Factory's where it has the
option. The other sampling options (``temperature``, ``top_p``, ``top_k``, ``repetition_penalty``) are declared with
generation, and the reference model with preference learning; ``stage_defaults`` has their defaults under these stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from burnish.adapters.base import FinetuningOptions
from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.checks import check, notes
from burnish.config.errors import OptionText, Problem
from burnish.config.options import changed_options, option, shared_options, specs
from burnish.inference.options import InferOptions
from burnish.loop.events import IntervalOptions
from burnish.losses.base import OBJECTIVES, options_of
from burnish.losses.preference_options import ReferenceOptions
from burnish.losses.rollouts.options import CLIPPED_LOSSES, RolloutLossOptions
from burnish.models.generate import GenerationOptions
from burnish.rollouts.rewards.builtin import FACTORIES, FUNCTIONS, missing_libraries
from burnish.utils.environment import launcher_number

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"rl_loss_type": "grpo", "rl_beta": 0.04},
    "dapo": {"rl_loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    "dr_grpo": {"rl_loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {
        "rl_loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
    },
    "cispo": {"rl_loss_type": "cispo", "epsilon_high": 5.0},
}  # fmt: skip
"""Values of each preset. An option that is set takes precedence."""


@shared_options
@dataclass
class CompletionFields:
    """Options of stages that generate completions, and of TRL's ``GRPOConfig`` and ``RLOOConfig``."""

    num_generations_eval: int | None = option(
        None, "Number of completions per prompt in an evaluation. Default: num_generations.", ge=1
    )
    max_completion_length: int = option(
        512, "Maximum number of tokens of a completion.", ge=1, unit="tokens", aliases=("response_length",)
    )
    generation_batch_size: int | None = option(
        None, "Number of completions per generation batch, over all processes. Default: the number for one step.", ge=1
    )
    steps_per_generation: int | None = option(
        None, "Number of micro-batches per generation batch. Default: gradient_accumulation_steps.",
        ge=1, unit="micro-batches",
    )  # fmt: skip
    num_iterations: int = option(1, "Number of training passes over each generation batch.", ge=1)
    min_p: float | None = option(
        None, "Sample only tokens with at least this fraction of the probability of the most likely token.", ge=0, le=1
    )
    eval_temperature: float | None = option(None, "Sampling temperature of an evaluation. Default: temperature.", ge=0)
    mask_truncated_completions: bool = option(
        False, "Exclude completions truncated at max_completion_length from the loss."
    )
    max_concurrent_completions: int | None = option(
        None, "Maximum number of completions generated concurrently. Default: the generation batch, limited to 64 on a "
        "CPU, to 256 on a GPU, and to a KV cache of a quarter of the memory.", ge=1, aliases=("kept_seats",),
    )  # fmt: skip
    log_completions: bool = option(True, "Print completions with their rewards, and write them to completions.jsonl.")
    num_completions_to_print: int | None = option(
        2, "Number of completions to print. none: all completions of the generation batch.", ge=0
    )
    log_unique_prompts: bool = option(False, "Print one completion of each prompt only.")
    reward_weights: list[float] | None = option(None, "Weights of the reward functions. Default: 1 each.")
    reward_timeout_s: float = option(
        120.0, "Time limit for each call of a reward function or tool. A reward function that exceeds it ends the run; "
        "a tool returns an error.", gt=0, unit="s",
    )  # fmt: skip


@dataclass
class RolloutOptions(CompletionFields, RolloutLossOptions):
    """Learning from the model's own completions."""

    online: bool = option(
        False, "With stage: dpo, learn from pairs of the model's own completions: the best and the worst by reward."
    )
    # --- rewards ---
    reward_funcs: list[Any] | None = option(
        None, "Reward functions: a built-in, file.py:name, package.module.name, or {name: {arguments}}.",
        names_place=True, risky="it runs Python code", harmless=FUNCTIONS,
    )  # fmt: skip
    on_changed_reward: str = option(
        "stop",
        "What to do if the reward functions have changed since the checkpoint: stop with an error, or resume with the "
        "new ones (accept).",
        choices=("stop", "accept"),
    )
    reward_model: str | None = option(
        None,
        "Reward model: a model or adapter of stage: rm, a sequence classifier, or a URL with reward_model_type: api.",
        names_place=True,
    )  # fmt: skip
    reward_model_type: str = option(
        "full", "Kind of the reward model: a model (full), an adapter (lora, oft), or an HTTP server (api).",
        choices=("lora", "oft", "full", "api"),
    )  # fmt: skip
    reward_model_adapters: list[str] | None = option(
        None, "Adapters to merge into the reward model, in order.", names_place=True
    )
    reward_model_quantization_bit: int | None = option(
        None, "Number of bits to quantize the reward model to.", choices=(4, 8)
    )
    # --- advantages ---
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Order of summing and normalizing several rewards; normalize_then_sum is GDPO.",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )  # fmt: skip
    scale_rewards: bool | str = option(
        "group", "Divide the advantages by the standard deviation of the rewards of the group (group) or of the whole "
        "generation batch (batch). true: group; false: none.", choices=("group", "batch", "none", True, False),
    )  # fmt: skip
    normalize_advantages: bool = option(
        False, "Normalize the advantages of a generation batch to mean 0 and standard deviation 1 (RLOO)."
    )
    reward_clip_range: list[float] | None = option(None, "Lower and upper bound of the reward of a completion (RLOO).")
    missing_eos_penalty: float | None = option(
        None, "Penalty on the reward of a completion without an EOS token (PPO and online DPO).", ge=0
    )
    drop_zero_variance_groups: bool | str = option(
        False, "What to do with groups whose rewards are all equal: keep them (false), drop them from the step (drop), "
        "or replace them with additional prompts, at most three times as many (refill).",
        choices=(False, "drop", "refill"),
    )  # fmt: skip
    # --- completions ---
    rl_preset: str | None = option(
        None, "Preset of a published method; each of its options can be overridden.", choices=tuple(PRESETS)
    )
    num_generations: int = option(8, "Number of completions per prompt. Default with stage: rloo: 2.", ge=1)


class DefaultsChoices(RolloutOptions, CheckpointOptions, GenerationOptions, IntervalOptions):
    """Options that determine the defaults of others."""

    stage: str


def stage_defaults(options: DefaultsChoices) -> dict[str, Any]:
    """Defaults of options that differ under ``stage: grpo`` or ``stage: rloo``, including those of a preset."""
    found: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "rl_beta": 0.0}
    if options.stage == "rloo":
        found |= {"rl_beta": 0.05, "num_generations": 2}
    return found | preset_of(options.stage, options.rl_preset)


def preset_of(stage: str, name: str | None) -> dict[str, Any]:
    """Return the options that ``rl_preset`` sets. Empty for stages other than ``grpo``."""
    return PRESETS.get(name or "", {}) if stage == "grpo" else {}


def preset_in_words(options: RolloutOptions, preset: Mapping[str, Any]) -> str:
    """Return what a preset sets, and the options that are set and take precedence, as a clause."""
    used = {name: getattr(options, name) for name in preset}
    applied = ", ".join(f"{name}: {value}" for name, value in preset.items() if used[name] == value)
    others = ", ".join(f"{name}: {used[name]}" for name, value in preset.items() if used[name] != value)
    parts = [f"sets {applied}"] * bool(applied) + [f"does not change options that are set: {others}"] * bool(others)
    return "; it ".join(parts)


class GenerationLossChoices(RolloutOptions, GenerationOptions, ReferenceOptions):
    """Options that define a generation and its loss."""

    gradient_accumulation_steps: int
    per_device_train_batch_size: int
    stage: str


class RolloutStageChoices(GenerationLossChoices, FinetuningOptions, InferOptions):
    """Options that this module reads."""

    learning_rate: float
    streaming: bool


_OTHER_ENGINES = ("vllm", "sglang")
_SFT_ONLY_OPTIONS = (
    "train_on_prompt", "mask_history", "neat_packing", "packing", "eval_packing", "predict_with_generate",
    "precompute_ref_log_probs", "max_tokens_per_batch",
)  # fmt: skip
_RLOO_OPTIONS = ("normalize_advantages", "reward_clip_range")
_GROUP_OPTIONS = (
    "num_iterations", "generation_batch_size", "steps_per_generation", "epsilon",
    "epsilon_high", "drop_zero_variance_groups",
)  # fmt: skip
_GRPO_OPTIONS = (
    "rl_loss_type", "delta", "importance_sampling_level", "multi_objective_aggregation", "scale_rewards",
    "use_bias_correction_kl", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "rl_preset",
    "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos",
    "vespo_lambda_neg",
)  # fmt: skip


def draws_completions(stage: str) -> bool:
    """Return whether a stage trains on the model's own completions, according to the records that it declares."""
    return stage in OBJECTIVES and OBJECTIVES[stage].records == "prompts"


def compares_completions(stage: str) -> bool:
    """Return whether a stage compares completions of the same prompt with each other."""
    return draws_completions(stage) and getattr(OBJECTIVES[stage], "compares_completions", False)


@check
def check_rollouts(options: RolloutStageChoices) -> Iterator[Problem]:
    """Yield problems that can be found without data."""
    if not draws_completions(options.stage):
        return
    if not compares_completions(options.stage) and options.temperature == 0:
        what, remedy = '"temperature" must be greater than 0. Received: 0.', "Set a low temperature, such as 0.1."
        yield Problem(what, remedy=remedy, option="temperature")
        return
    of_groups = (
        [*check_sizes(options), *check_loss(options)]
        if compares_completions(options.stage)
        else _check_num_generations(options)
    )
    yield from _rewards(options)
    yield from check_weights(options)
    yield from of_groups
    yield from _generation_problems(options)


def _rewards(options: RolloutStageChoices) -> Iterator[Problem]:
    functions = options.reward_funcs or []
    if not functions and options.reward_model is None:
        what = f"stage: {options.stage} needs a reward."
        remedy = (
            "Set reward_funcs: [my_rewards.py:exact], a built-in (accuracy_reward, think_format_reward, "
            "exact_match_reward, ...), or reward_model: <folder>."
        )
        yield Problem(what, remedy=remedy, option="reward_funcs")
        return
    names = [str(next(iter(entry), "")) if isinstance(entry, dict) else str(entry) for entry in functions]
    yield from (problem for name in names for problem in missing_libraries({**FUNCTIONS, **FACTORIES}.get(name), name))
    yield from _check_reward_server(options)
    count, weights = len(functions) + (options.reward_model is not None), options.reward_weights
    if weights is not None and len(weights) != count:
        what = f"reward_weights must have one weight for each reward. Received: {len(weights)} for {count}."
        yield Problem(what, option="reward_weights")


def check_weights(options: RolloutOptions) -> list[Problem]:
    infinite = [weight for weight in options.reward_weights or () if not isfinite(weight)]
    what = f"reward_weights must be finite numbers. Received: {options.reward_weights}."
    return [Problem(what, option="reward_weights")] * bool(infinite)


def _check_reward_server(options: RolloutStageChoices) -> Iterator[Problem]:
    """A problem if a reward model is a URL and the type is not ``api``, or the reverse."""
    name, kind = options.reward_model, options.reward_model_type
    if name is None or name.startswith(("http://", "https://")) == (kind == "api"):
        return
    if kind == "api":
        what = f"reward_model must be a URL that starts with http:// or https://. Received: {name}."
        remedy = "Set it to the URL of the server, or remove reward_model_type: api."
        yield Problem(what, remedy=remedy, option="reward_model")
        return
    what = f"reward_model is a URL, but reward_model_type is {kind}. Received: {name}."
    yield Problem(what, remedy="Set reward_model_type: api.", option=("reward_model_type", "reward_model"))


def _check_num_generations(options: RolloutStageChoices) -> Iterator[Problem]:
    """For stages that do not compare all completions of a prompt."""
    least, count = getattr(OBJECTIVES[options.stage], "min_generations", 1), options.num_generations
    if count == 1 < least or count > 1 == least:
        expected = "1" if least == 1 else f"at least {least}"
        what = f'"num_generations" must be {expected} with stage: {options.stage}. Received: {count}.'
        yield Problem(what, option="num_generations")
    elif options.num_generations_eval is not None and options.num_generations_eval < least:
        what = f'"num_generations_eval" must be at least {least} with stage: {options.stage}. '
        yield Problem(f"{what}Received: {options.num_generations_eval}.", option="num_generations_eval")


def check_sizes(options: GenerationLossChoices) -> Iterator[Problem]:
    group = options.num_generations
    if group < 2:
        what = f"num_generations must be at least 2: completions of a prompt are compared. Received: {group}."
        yield Problem(what, option="num_generations")
    if options.generation_batch_size is not None and options.steps_per_generation is not None:
        names = ("generation_batch_size", "steps_per_generation")
        what = '"generation_batch_size" and "steps_per_generation" set the same number.'
        yield Problem(what, remedy="Set only one of them.", option=names)
        return
    per_device, world = options.per_device_train_batch_size, launcher_number("WORLD_SIZE", 1)
    if options.generation_batch_size is not None:
        size, part = options.generation_batch_size, per_device * world
        if size % part:
            what = (
                f"generation_batch_size {size} is not a multiple of per_device_train_batch_size × processes = {part}."
            )
            yield Problem(what, remedy=_nearest_multiples(size, part), option="generation_batch_size")
            return
        steps = size // part
    else:
        steps = options.steps_per_generation or options.gradient_accumulation_steps
    accumulated = options.gradient_accumulation_steps
    if accumulated % steps and steps % accumulated:
        what = (
            f"A generation batch of {steps} micro-batches does not fit "
            f"into steps of gradient_accumulation_steps {accumulated}: one must be a multiple of the other."
        )
        yield Problem(what, option=("steps_per_generation", "gradient_accumulation_steps"))
    own = per_device * steps
    if group >= 2 and own % group:
        of_process = " and process" if world > 1 else ""
        what = (
            f"{per_device} × {steps} = {own} completions per generation batch{of_process} are not a multiple of "
            f"num_generations {group}."
        )
        why = "One process generates all completions of a prompt" if world > 1 else ""
        remedy = _nearest_multiples(own, group)
        names = ("num_generations", "per_device_train_batch_size")
        yield Problem(what, why=why, remedy=remedy, option=names)


def _nearest_multiples(number: int, factor: int) -> str:
    near = [value for value in (number // factor * factor, -(-number // factor) * factor) if value]
    return f"Nearest: {', '.join(map(str, near))}."


def check_loss(options: GenerationLossChoices) -> Iterator[Problem]:
    if options.temperature == 0:
        what = "with temperature 0, all completions of a prompt are identical and nothing is learned."
        yield Problem(what, remedy="Remove it; the default is 1.", option="temperature")
    if options.stage != "rloo" and options.rl_loss_type == "cispo" and options.epsilon_high is None:
        what = OptionText("{rl_loss_type} cispo requires {epsilon_high}, the maximum probability ratio.")
        yield Problem(what, remedy="The paper uses epsilon_high: 5.0.", option=("rl_loss_type",))
    if options.entropy_coef_min > options.entropy_coef_max:
        low, high = options.entropy_coef_min, options.entropy_coef_max
        what = f"entropy_coef_min {low:g} is above entropy_coef_max {high:g}."
        yield Problem(what, option=("entropy_coef_min", "entropy_coef_max"))
    if options.sync_ref_model and not options.rl_beta:
        what = OptionText("{rl_beta} is 0: there is no reference model to update.")
        remedy = OptionText("Set {rl_beta}, or remove {sync_ref_model}.")
        yield Problem(what, remedy=remedy, option=("sync_ref_model", "rl_beta"))
    bounds = options.reward_clip_range
    if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        what = f"reward_clip_range must be a lower and an upper bound. Received: {bounds}."
        yield Problem(what, option="reward_clip_range")


def _generation_problems(options: RolloutStageChoices) -> Iterator[Problem]:
    if options.infer_backend in _OTHER_ENGINES:
        what = f'"infer_backend" {options.infer_backend} is not supported with stage: {options.stage}.'
        remedy = "Remove infer_backend: completions are generated in the training process."
        yield Problem(what, remedy=remedy, option="infer_backend")
    if options.streaming:
        why = "random numbers depend on the position of a prompt in its dataset."
        what = f'"streaming" is not supported with stage: {options.stage}: {why}'
        yield Problem(what, remedy="Remove it.", option="streaming")
    for name in _SFT_ONLY_OPTIONS:
        if getattr(options, name):
            what = f'"{name}" is not supported with stage: {options.stage}: the model learns from its own completions.'
            yield Problem(what, remedy="Remove it.", option=name)


_SAMPLED = "are sampled token by token, and scored as text"
_UNREAD_GENERATION = {
    "max_new_tokens": "are limited by max_completion_length", "do_sample": _SAMPLED, "num_beams": _SAMPLED,
    "length_penalty": _SAMPLED, "cache_implementation": _SAMPLED, "samples": "are counted by num_generations",
}  # fmt: skip
"""Option of generation that rollouts do not read -> the reason."""
_READ_BY_PPO = ("max_new_tokens",)


def _names_of_other_stages(stage: str) -> Iterator[str]:
    """Yield the options that only other stages with rollouts read."""
    read = options_of(stage)
    for each in OBJECTIVES:
        if each.options and draws_completions(each.name):
            yield from (name for name in specs(each.options) if name not in read)


@notes
def rollout_notes(options: RolloutStageChoices) -> Iterator[str]:
    """Notes on options without effect, on what a preset sets, and on a learning rate of another stage."""
    changed = changed_options(options)
    names = [*_names_of_other_stages(options.stage)]
    names += [] if draws_completions(options.stage) else RolloutOptions.__dataclass_fields__
    yield from (f'"{name}" has no effect: stage is {options.stage}.' for name in names if name in changed)
    if not draws_completions(options.stage):
        return
    yield from (
        f'"{name}" has no effect: completions of stage: {options.stage} {why}.'
        for name, why in _UNREAD_GENERATION.items()
        if name in changed and name not in _READ_BY_PPO * (options.stage == "ppo")
    )
    yield from (
        OptionText(f'"{{{name}}}" has no effect: {{}}.', why)
        for name, why in without_effect(options).items()
        if name in changed
    )
    if preset := preset_of(options.stage, options.rl_preset):
        yield f"rl_preset {options.rl_preset} {preset_in_words(options, preset)}."
    usual, most = ("1e-6 to 5e-6", 2e-5) if options.finetuning_type == "full" else ("1e-5 to 1e-4", 5e-4)
    if options.learning_rate >= most:
        yield (
            f"learning_rate {options.learning_rate:g} is high for reinforcement learning (typically {usual}); the "
            "model may degenerate."
        )


def without_effect(options: GenerationLossChoices) -> Mapping[str, str]:
    """Option -> the reason why it has no effect with the other options."""
    if not compares_completions(options.stage):
        return dict.fromkeys((*_GRPO_OPTIONS, *_RLOO_OPTIONS, *_GROUP_OPTIONS), f"stage is {options.stage}")
    of_reference = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "use_bias_correction_kl")
    unread = {} if options.rl_beta else dict.fromkeys(of_reference, "beta is 0")
    if options.stage == "rloo":
        return unread | dict.fromkeys((*_GRPO_OPTIONS, "missing_eos_penalty"), "stage is rloo")
    loss = options.rl_loss_type
    found = unread | dict.fromkeys((*_RLOO_OPTIONS, "missing_eos_penalty"), "stage is grpo")
    of_losses = {
        "delta": CLIPPED_LOSSES, "epsilon": CLIPPED_LOSSES, "epsilon_high": (*CLIPPED_LOSSES, "cispo"),
        "sapo_temperature_pos": ("sapo",), "sapo_temperature_neg": ("sapo",), "vespo_k_pos": ("vespo",),
        "vespo_k_neg": ("vespo",), "vespo_lambda_pos": ("vespo",), "vespo_lambda_neg": ("vespo",),
    }  # fmt: skip
    found |= {name: f"loss_type is {loss}" for name, losses in of_losses.items() if loss not in losses}
    if not options.use_adaptive_entropy:
        names = ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta")
        found |= dict.fromkeys(names, "use_adaptive_entropy is false")
    if options.multi_objective_aggregation == "normalize_then_sum":
        found["scale_rewards"] = "multi_objective_aggregation is normalize_then_sum"
    return found
