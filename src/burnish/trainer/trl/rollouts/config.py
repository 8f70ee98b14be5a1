"""``GRPOConfig`` and ``RLOOConfig``: the fields of TRL 1.16 by name, type and default, each a name of one of burnish's
options (``rollouts/options.py``).

Out: the config, and the options as the objective reads them. Refused, in the names that the script uses: what those
refuse, and what belongs to engines that burnish does not use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from burnish.config.conversion import members
from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.options import RawValue, build, option, raise_if, specs
from burnish.losses.rollouts.options import LOSSES, OPTION_NAMES
from burnish.models.generate import GenerationOptions
from burnish.rollouts.options import RolloutOptions, check_loss, check_sizes, without_effect
from burnish.trainer.arguments.training import for_argument_parser
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.trl.preferences.config import Choices

NO_VLLM = "Completions are generated in this process, by the weights that train. Leave use_vllm and vllm_* out."
_OF_VLLM = "completions are generated in this process, by the weights that train."
_NO_PADDING = "completions are not padded."
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_BEAMS = ("length_penalty", "early_stopping")
"""Arguments of beam search in transformers, without effect on samples."""
_WHY_BEAMS = "completions are sampled, not searched with beams"
_USUAL = (("do_sample", True), ("num_beams", 1), ("use_cache", True))


@dataclass
class RolloutChoices(RolloutOptions, GenerationOptions, Choices):
    """The options that the objective reads, in burnish's words."""

    stage: str = "grpo"
    seed: int = 42
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    use_cpu: bool = False


@dataclass
class RolloutConfig(TrlArguments):
    """Fields that both configs have."""

    stage: ClassVar[str]
    without_effect: ClassVar[Mapping[str, str]] = {
        "cast_lm_head_to_fp32": "log-probabilities are computed in float32.",
        "cache_implementation": "keys and values of completions have a cache of their own.",
        "use_transformers_continuous_batching": "completions that have ended are replaced by others always.",
        "transformers_continuous_batching_config": "completions that have ended are replaced by others always.",
        "use_transformers_paged": "completions that have ended are replaced by others always.",
        "log_multimodal": "models are trained on text.",
        "max_prompt_length": "no prompt is cut; one that is too long is left out, and counted.",
        **dict.fromkeys(
            (
                "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
                "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
                "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length",
                "vllm_tensor_parallel_size", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
                "vllm_importance_sampling_cap", "vllm_guided_decoding_regex",
            ),
            _OF_VLLM,
        ),
    }  # fmt: skip
    refused: ClassVar[Mapping[str, str]] = {
        "log_completions_hub_repo": "completions.jsonl lies in output_dir; upload it with: hf upload.",
    }

    # --- defaults that differ from those of TrainingArguments
    learning_rate: float = option(1e-6, "Peak learning rate.", ge=0, lt=math.inf)
    remove_unused_columns: bool | None = option(  # type: ignore[assignment]
        False, "Without effect: columns of the records are arguments of the reward functions."
    )
    disable_dropout: bool = option(
        True, "Disable dropout, so that completions are drawn and trained under the same model. TRL's default is false."
    )

    # --- completions
    num_generations: int = option(8, "Number of completions per prompt.", ge=1)
    num_generations_eval: int | None = option(
        None, "Number of completions per prompt in an evaluation. Default: num_generations.", ge=1
    )
    max_completion_length: int = option(512, "Maximum number of tokens of a completion.", ge=1, unit="tokens")
    generation_batch_size: int | None = option(
        None, "Number of completions that are drawn at once, over all processes. Default: those of one step.", ge=1
    )
    steps_per_generation: int | None = option(
        None, "Number of micro-batches that the completions drawn at once make. Default: gradient_accumulation_steps.",
        ge=1,
    )  # fmt: skip
    num_iterations: int = option(1, "Number of times that the completions of a generation are trained on.", ge=1)
    temperature: float = option(1.0, "Sampling temperature.", ge=0)
    top_p: float = option(
        1.0, "Sample from the smallest set of most likely tokens whose probabilities sum up to this value.", gt=0, le=1
    )
    top_k: int = option(0, "Sample from the k most likely tokens. 0: no limit.", ge=0)
    min_p: float | None = option(
        None, "Sample only tokens with at least this share of the probability of the most likely token.", ge=0, le=1
    )
    repetition_penalty: float = option(1.0, "Repetition penalty. 1: no penalty.", gt=0)
    generation_kwargs: dict[str, Any] | str | None = option(
        None, f"Further options of sampling, by name: {', '.join(_OF_SAMPLING)}."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(None, "Arguments of the chat template.")
    shuffle_dataset: bool | None = option(True, "Shuffle the prompts.")
    ds3_gather_for_generation: bool = option(
        True, "Under ZeRO-3: gather whole weights for the generation. Must be true."
    )
    use_vllm: bool = option(False, "Must be false: completions are generated in this process.")

    # --- rewards and the loss
    beta: float = option(0.0, "Coefficient of the KL divergence from the reference model.", ge=0)
    epsilon: float = option(0.2, "Clip range of the probability ratio: the lower bound is 1 - epsilon.", gt=0, lt=1)
    epsilon_high: float | None = option(
        None, "The upper bound of the ratio is 1 + epsilon_high. Default: epsilon. For cispo: the largest ratio.", gt=0
    )
    reward_weights: list[float] | None = option(None, "Weights of the reward functions. Default: 1 each.")
    mask_truncated_completions: bool = option(
        False, "Leave completions that were cut at max_completion_length out of the loss."
    )
    sync_ref_model: bool = option(False, "Update the reference model towards the policy.")
    ref_model_mixup_alpha: float = option(
        0.6, "Weight of the policy in each update of the reference model.", gt=0, le=1
    )
    ref_model_sync_steps: int = option(
        512, "Number of steps between updates of the reference model.", ge=1, unit="steps"
    )
    max_tool_calling_iterations: int | None = option(
        None, "Most rounds of tool calls in a completion. Default: no limit. 0: calls are not run.", ge=0
    )

    # --- logging, and burnish's own
    log_completions: bool = option(False, "Print completions with their rewards, and write them to files.")
    num_completions_to_print: int | None = option(None, "Number of completions to print. Default: all.", ge=0)
    log_unique_prompts: bool = option(False, "Print one completion of each prompt only.")
    reward_timeout_s: float = option(
        120.0, "The run stops if a reward function has not returned after this time.", gt=0, unit="s"
    )
    eval_temperature: float | None = option(None, "Sampling temperature of an evaluation. Default: temperature.", ge=0)
    kept_seats: int | None = option(
        None, "Number of completions that are generated side by side. Default: as many as fit.", ge=1
    )
    drop_zero_variance_groups: str = option(
        "false", "Groups in which all rewards are equal: keep them (false), leave them out of the step (drop), or draw "
        "further prompts in their place, at most three times as many (refill).", choices=("false", "drop", "refill"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        given: Any = self.drop_zero_variance_groups
        if given is False:
            self.drop_zero_variance_groups = "false"
        super().__post_init__()
        if self.use_vllm:
            raise UserError('"use_vllm" must be false. Received: True.', remedy=NO_VLLM, option="use_vllm")
        if not self.ds3_gather_for_generation:
            what = '"ds3_gather_for_generation" must be true: weights in pieces would be gathered for each token.'
            raise UserError(what, remedy="Leave it out.", option="ds3_gather_for_generation")
        if self.auto_find_batch_size:
            what = '"auto_find_batch_size" is not supported: a generation must hold whole groups of completions.'
            raise UserError(what, remedy="Lower per_device_train_batch_size.", option="auto_find_batch_size")
        choices = self.choices()
        steps = choices.steps_per_generation or self.gradient_accumulation_steps
        of_all = self.per_device_train_batch_size * self.world_size
        if choices.generation_batch_size is not None:
            steps = choices.generation_batch_size // of_all
        self.steps_per_generation, self.generation_batch_size = steps, steps * of_all

    def _read_json_texts(self) -> None:
        super()._read_json_texts()
        for name in ("generation_kwargs", "chat_template_kwargs"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, json.loads(value))

    def choices(self) -> RolloutChoices:
        """The options that the objective reads. Raises UserError with all that is wrong with them."""
        known = specs(RolloutChoices)
        names = {one.name: OPTION_NAMES.get(one.name, one.name) for one in fields(self)}
        given = {name: _plain(getattr(self, word)) for word, name in names.items() if name in known}
        if given.get("steps_per_generation") and given.get("generation_batch_size") == (
            given["steps_per_generation"] * self.per_device_train_batch_size * self.world_size
        ):
            given["generation_batch_size"] = None  # both, as they were completed before
        given |= self._sampling()
        set_here = {n: v for n, v in given.items() if v is not None or type(None) in members(known[n].type)}
        made, problems = build(RolloutChoices, {name: RawValue(value) for name, value in set_here.items()})
        made.stage = self.stage
        raise_if(map(_in_own_words, [*problems, *check_sizes(made), *check_loss(made)]))
        return made

    def _sampling(self) -> dict[str, Any]:
        """What ``generation_kwargs`` says."""
        given: Mapping[str, Any] = self.generation_kwargs or {}  # type: ignore[assignment]
        given = {name: value for name, value in given.items() if (name, value) not in _USUAL and name not in _OF_BEAMS}
        if unknown := [name for name in given if name not in _OF_SAMPLING]:
            what = f'"generation_kwargs" has no "{unknown[0]}".{did_you_mean(unknown[0], _OF_SAMPLING)}'
            remedy = f"Known: {', '.join(_OF_SAMPLING)}."
            raise UserError(Problem(what, remedy=remedy, option="generation_kwargs"))
        return dict(given)

    def notes(self) -> list[str]:
        """Sentences on what has no effect beside the other arguments."""
        choices, words = self.choices(), {name: word for word, name in OPTION_NAMES.items()}
        changed = {one.name for one in fields(self) if one.init and getattr(self, one.name) != one.default}
        found = ((words.get(name, name), why) for name, why in without_effect(choices).items())
        of_beams = [
            (f"generation_kwargs.{name}", _WHY_BEAMS) for name in self.generation_kwargs or () if name in _OF_BEAMS
        ]
        return [
            f'"{name}" has no effect: {why}.' for name, why in [*((n, w) for n, w in found if n in changed), *of_beams]
        ]


def _in_own_words(problem: Problem) -> Problem:
    """With the names of fields in place of burnish's."""
    what = problem.what
    for word, name in OPTION_NAMES.items():
        what = what.replace(f'"{name}"', f'"{word}"')
    return replace(problem, what=what)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


@dataclass
class GRPOConfig(RolloutConfig):
    """The arguments of a ``GRPOTrainer``, as in TRL 1."""

    stage: ClassVar[str] = "grpo"

    loss_type: str = option("dapo", "The loss.", choices=LOSSES)
    delta: float | None = option(
        None, "Upper bound of the ratio of completions with a negative advantage (two-sided clipping).", gt=1
    )
    importance_sampling_level: str = option(
        "token", "Whether the probability ratio is one of each token, or of the whole completion (GSPO).",
        choices=("token", "sequence"),
    )  # fmt: skip
    sapo_temperature_neg: float = option(1.05, "Temperature of SAPO for other advantages.", gt=0)
    sapo_temperature_pos: float = option(1.0, "Temperature of SAPO for positive advantages.", gt=0)
    vespo_k_pos: float = option(2.0, "Exponent k of VESPO for advantages of at least 0.", ge=0)
    vespo_lambda_pos: float = option(3.0, "Decay λ of VESPO for advantages of at least 0.", ge=0)
    vespo_k_neg: float = option(3.0, "Exponent k of VESPO for negative advantages.", ge=0)
    vespo_lambda_neg: float = option(2.0, "Decay λ of VESPO for negative advantages.", ge=0)
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Whether rewards are summed before they are normalized, or after (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )  # fmt: skip
    scale_rewards: str = option(
        "group", "What the advantages are divided by: the standard deviation of a group or of a batch, or none.",
        choices=("group", "batch", "none"),
    )  # fmt: skip
    top_entropy_quantile: float = option(
        1.0, "Share of the tokens, those with the highest entropy, that the policy loss uses.", gt=0, le=1
    )
    entropy_coef: float = option(0.0, "Coefficient of the entropy bonus.", ge=0)
    use_adaptive_entropy: bool = option(False, "Adapt entropy_coef after each step, to keep the entropy at its target.")
    entropy_coef_min: float = option(0.0, "Lower bound of an adaptive entropy_coef.", ge=0)
    entropy_coef_max: float = option(1.0, "Upper bound of an adaptive entropy_coef.", ge=0)
    entropy_coef_delta: float = option(0.005, "Change of an adaptive entropy_coef per step.", gt=0)
    entropy_target: float = option(0.2, "Entropy per token that an adaptive entropy_coef aims at.", ge=0, unit="nats")
    off_policy_mask_threshold: float | None = option(
        None, "Leave completions with a negative advantage out once their mean log-ratio exceeds this value.", ge=0
    )
    use_bias_correction_kl: bool = option(True, "Multiply the KL divergence by the probability ratio.")

    def __post_init__(self) -> None:
        given: Any = self.scale_rewards
        if isinstance(given, bool):
            self.scale_rewards = "group" if given else "none"
        super().__post_init__()


@dataclass
class RLOOConfig(RolloutConfig):
    """The arguments of an ``RLOOTrainer``, as in TRL 1."""

    stage: ClassVar[str] = "rloo"

    num_generations: int = option(2, "Number of completions per prompt.", ge=1)
    beta: float = option(0.05, "Coefficient of the KL divergence from the reference model.", ge=0)
    reward_clip_range: tuple[float, float] | None = option(None, "Lower and upper bound of the reward of a completion.")
    normalize_advantages: bool = option(False, "Normalize the advantages of a generation to mean 0 and deviation 1.")


for _kind in (GRPOConfig, RLOOConfig):
    for_argument_parser(_kind)
