"""``GRPOConfig`` and ``RLOOConfig``: the fields of TRL 1.16 with name, type and default, each mapped to an option of
burnish (``rollouts/options.py``).

Out: the config, and the options for the objective. Errors contain the names that the script uses. Options of engines
that burnish does not use are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from burnish.config.conversion import members
from burnish.config.errors import Problem, UserError, did_you_mean, rename_options
from burnish.config.options import RawValue, build, option, raise_if, specs
from burnish.losses.preference_options import ReferenceSyncFields
from burnish.losses.rollouts.options import LOSSES, OPTION_NAMES, ClipFields, GrpoLossFields
from burnish.models.generate import SamplingFields
from burnish.models.generation_settings import setting_problems
from burnish.rollouts.options import (
    CompletionFields,
    GenerationLossChoices,
    check_loss,
    check_sizes,
    check_weights,
    without_effect,
)
from burnish.rollouts.prompts import ObjectiveChoices
from burnish.trainer.arguments.training import for_argument_parser
from burnish.trainer.arguments.trl import TrlArguments
from burnish.trainer.arguments.values import plain_options
from burnish.trainer.trl.preferences.config import Choices

NO_VLLM = "Completions are generated in the training process. Remove use_vllm and vllm_*."
_NO_VLLM_EFFECT = "completions are generated in the training process."
SETTABLE_FIELDS = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Arguments of a generation that a script may change during training."""
_SAMPLING_FIELDS = ("temperature", *SETTABLE_FIELDS)
LIMIT_FIELDS = ("eos_token_id", "max_new_tokens")
"""Arguments of a generation that end a completion."""
UNUSED_TOKENS = ("pad_token_id", "bos_token_id")
"""Arguments of a generation that have no effect: completions are not padded, and prompts are complete."""
_OF_BEAMS = ("length_penalty", "early_stopping")
"""Arguments of beam search in transformers, which have no effect on sampling."""
_EXAMPLES = {"generation_kwargs": '{"top_k": 50}', "chat_template_kwargs": '{"enable_thinking": False}'}
_FIELD_NAMES = {name: word for word, name in OPTION_NAMES.items()}
"""burnish's option -> the field of a config."""
_FIXED_GENERATION_ARGUMENTS = (("do_sample", True), ("num_beams", 1), ("use_cache", True))


@dataclass
class RolloutChoices(ObjectiveChoices, GenerationLossChoices, Choices):
    """The options that the objective reads, under burnish's names."""

    stage: str = "grpo"
    seed: int = 42
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    use_cpu: bool = False


@dataclass
class RolloutConfig(CompletionFields, ClipFields, SamplingFields, ReferenceSyncFields, TrlArguments):
    """Fields that both configs have."""

    stage: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {
        "use_liger_loss": "use_liger_kernel", "wandb_log_unique_prompts": "log_unique_prompts",
    }  # fmt: skip
    without_effect: ClassVar[Mapping[str, str]] = {
        "cast_lm_head_to_fp32": "log-probabilities are computed in float32.",
        "cache_implementation": "burnish has its own KV cache.",
        "use_transformers_continuous_batching": "generation always uses continuous batching.",
        "transformers_continuous_batching_config": "generation always uses continuous batching.",
        "use_transformers_paged": "generation always uses continuous batching.",
        "log_multimodal": "images are not shown in logs.",
        "max_prompt_length": "prompts are not truncated. Prompts that are too long are dropped and counted.",
        **dict.fromkeys(
            (
                "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
                "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
                "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length",
                "vllm_tensor_parallel_size", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
                "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
                "vllm_importance_sampling_cap", "vllm_guided_decoding_regex", "vllm_device", "vllm_dtype",
                "vllm_enable_prefix_caching", "vllm_max_model_len",
            ),
            _NO_VLLM_EFFECT,
        ),
    }  # fmt: skip
    refused: ClassVar[Mapping[str, str]] = {
        "log_completions_hub_repo": "Upload completions.jsonl from output_dir after training: "
        "hf upload <name> completions.jsonl.",
    }

    # --- defaults that differ from those of TrainingArguments
    learning_rate: float = 1e-6
    remove_unused_columns: bool | None = option(  # type: ignore[assignment]
        False, "No effect: the columns of the dataset are arguments of the reward functions."
    )
    disable_dropout: bool = option(
        True, "Disable dropout, so that sampling and training use the same policy. TRL's default is false."
    )

    # --- completions
    num_generations: int = option(8, "Number of completions per prompt.", ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generation_kwargs: dict[str, Any] | str | None = option(
        None, f"Additional options of the generation: {', '.join((*_SAMPLING_FIELDS, *LIMIT_FIELDS))}."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(None, "Arguments of the chat template.")
    shuffle_dataset: bool | None = option(True, "Shuffle the prompts.")
    ds3_gather_for_generation: bool = option(True, "Gather the full weights for generation with ZeRO-3. Must be True.")
    use_vllm: bool = option(False, "Must be False: completions are generated in the training process.")

    # --- rewards and the loss
    beta: float = option(0.0, "Coefficient of the KL divergence from the reference model.", ge=0)
    max_tool_calling_iterations: int | None = option(
        None, "Maximum number of rounds of tool calls per completion. Default: no limit. 0: tools are not called.", ge=0
    )

    # --- logging, and burnish's own
    log_completions: bool = False
    num_completions_to_print: int | None = None
    drop_zero_variance_groups: str = option(
        "false", "What to do with groups whose rewards are all equal: keep them (false), drop them from the step "
        "(drop), or replace them with additional prompts, at most three times as many (refill).",
        choices=("false", "drop", "refill"),
    )  # fmt: skip

    def _derive(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # the loss of a rollout does not measure its quality
        super()._derive()

    def __post_init__(self) -> None:
        value: Any = self.drop_zero_variance_groups
        if value is False:
            self.drop_zero_variance_groups = "false"
        super().__post_init__()
        if self.use_vllm:
            raise UserError("`use_vllm` must be False. Received: True.", remedy=NO_VLLM, option="use_vllm")
        if not self.ds3_gather_for_generation:
            what = (
                "`ds3_gather_for_generation` must be True: otherwise, sharded weights would be gathered for each token."
            )
            raise UserError(what, remedy="Remove it.", option="ds3_gather_for_generation")
        if self.auto_find_batch_size:
            what = "`auto_find_batch_size` is not supported: a generation batch must consist of whole groups."
            raise UserError(what, remedy="Lower per_device_train_batch_size.", option="auto_find_batch_size")
        choices = self.choices()
        steps = choices.steps_per_generation or self.gradient_accumulation_steps
        of_all = self.per_device_train_batch_size * self.world_size
        if choices.generation_batch_size is not None:
            steps = choices.generation_batch_size // of_all
        self.steps_per_generation, self.generation_batch_size = steps, steps * of_all

    def _read_json_texts(self) -> None:
        super()._read_json_texts()
        for name, example in _EXAMPLES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                what = f"`{name}` must be a dictionary, or its JSON text. Received: {value!r}."
                raise UserError(what, remedy=f"For example, {name}={example}.", option=name)

    def choices(self) -> RolloutChoices:
        """The options that the objective reads. Raises UserError with all their problems."""
        known, plain = specs(RolloutChoices), plain_options(self)
        names = {one.name: OPTION_NAMES.get(one.name, one.name) for one in fields(self)}
        values = {name: getattr(plain, word) for word, name in names.items() if name in known}
        if values.get("steps_per_generation") and values.get("generation_batch_size") == (
            values["steps_per_generation"] * self.per_device_train_batch_size * self.world_size
        ):
            values["generation_batch_size"] = None  # both, as they were completed before
        values |= self._sampling()
        set_here = {n: v for n, v in values.items() if v is not None or type(None) in members(known[n].type)}
        built, problems = build(RolloutChoices, {name: RawValue(value) for name, value in set_here.items()})
        built.stage = self.stage
        raise_if(map(_with_field_names, [*problems, *check_sizes(built), *check_loss(built), *check_weights(built)]))
        return built

    def _sampling(self) -> dict[str, Any]:
        """Return the sampling options of ``generation_kwargs``."""
        kwargs: Mapping[str, Any] = self.generation_kwargs or {}  # type: ignore[assignment]
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if (name, value) not in _FIXED_GENERATION_ARGUMENTS and name not in (*_OF_BEAMS, *UNUSED_TOKENS)
        }
        limits = {name: value for name in LIMIT_FIELDS if (value := kwargs.pop(name, None)) is not None}
        raise_if(setting_problems(limits, "generation_kwargs", remedy=""))
        if unknown := [str(name) for name in kwargs if name not in _SAMPLING_FIELDS]:
            available = (*_SAMPLING_FIELDS, *LIMIT_FIELDS)
            what = f'`generation_kwargs` does not accept "{unknown[0]}".{did_you_mean(unknown[0], available)}'
            remedy = f"Available: {', '.join(available)}."
            raise UserError(Problem(what, remedy=remedy, option="generation_kwargs"))
        return dict(kwargs)

    def notes(self) -> list[str]:
        """Notes on arguments that have no effect with the others."""
        changed = {one.name for one in fields(self) if one.init and getattr(self, one.name) != one.default}
        reasons = ((_FIELD_NAMES.get(name, name), why) for name, why in without_effect(self.choices()).items())
        found = [(name, why) for name, why in reasons if name in changed]
        of_beams = [name for name in self.generation_kwargs or () if name in _OF_BEAMS]
        found += [(f"generation_kwargs.{name}", "beam search is not used") for name in of_beams]
        if self.train_sampling_strategy != "random":
            found.append(("train_sampling_strategy", "shuffle_dataset selects the order of prompts"))
        return [f'"{name}" has no effect: {why}.' for name, why in found]


def _with_field_names(problem: Problem) -> Problem:
    """Replace burnish's option names in problems by the names of the config's fields."""
    what, remedy = (rename_options(text, _FIELD_NAMES) for text in (problem.what, problem.remedy))
    return replace(problem, what=what, remedy=remedy)


@dataclass
class GRPOConfig(GrpoLossFields, RolloutConfig):
    """The arguments of a ``GRPOTrainer``, as in TRL 1."""

    stage: ClassVar[str] = "grpo"

    loss_type: str = option("dapo", "Loss type.", choices=LOSSES)
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Order of summing and normalizing several rewards; normalize_then_sum is GDPO.",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )  # fmt: skip
    scale_rewards: str = option(
        "group",
        "Divide the advantages by the standard deviation of the rewards of each group (group) or of the whole "
        "generation batch (batch), or do not scale them (none).",
        choices=("group", "batch", "none"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        value: Any = self.scale_rewards
        if isinstance(value, bool):
            self.scale_rewards = "group" if value else "none"
        super().__post_init__()


@dataclass
class RLOOConfig(RolloutConfig):
    """The arguments of an ``RLOOTrainer``, as in TRL 1."""

    stage: ClassVar[str] = "rloo"

    num_generations: int = 2
    beta: float = 0.05
    reward_clip_range: tuple[float, float] | None = option(None, "Lower and upper bound of the reward of a completion.")
    normalize_advantages: bool = option(
        False, "Normalize the advantages of a generation batch to mean 0 and standard deviation 1."
    )


for _kind in (GRPOConfig, RLOOConfig):
    for_argument_parser(_kind)
