"""Attributes of ``GRPOTrainer`` and ``RLOOTrainer`` that a script reads or sets: those of TRL, from the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from transformers import GenerationConfig

from burnish.config.errors import UserError
from burnish.config.options import raise_if
from burnish.models.generation_settings import setting_problems
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.prompts import ObjectiveChoices
from burnish.trainer.trl.base import argument
from burnish.trainer.trl.preferences.scripted import OverridableTrainer
from burnish.trainer.trl.rollouts.config import LIMIT_FIELDS, SETTABLE_FIELDS, UNUSED_TOKENS, RolloutConfig


def _derived(read: Callable[[RolloutConfig], Any]) -> argument:
    """Return an attribute that is computed from the arguments, whose names are type-checked."""
    return argument(read)


def _setting(name: str) -> Callable[[RolloutAttributes, Any], None]:
    """Return a function that changes a sampling option, from the next generation on."""

    def write(trainer: RolloutAttributes, value: Any) -> None:
        for options in (trainer.args, trainer.objective.choices):
            setattr(options, name, value)
        vars(trainer).pop("generation_config", None)

    return write


def _set_beta(trainer: RolloutAttributes, value: float) -> None:
    """Change the coefficient of the KL divergence, from the next step on."""
    if value and not trainer.objective.needs_reference:
        raise UserError(
            f"`beta` was 0 when the trainer was created, so there is no reference model. Received: {value!r}.",
            remedy=f"Set {type(trainer.args).__name__}(beta=...) to a positive number.",
        )
    args: RolloutConfig = trainer.args
    choices: ObjectiveChoices = trainer.objective.choices
    args.beta = choices.rl_beta = value


class RolloutAttributes(OverridableTrainer):
    """Base class with the attributes of TRL's trainers. Sampling options may be set during training."""

    args: RolloutConfig
    objective: RolloutObjective
    _tokenizer: Any

    beta = argument(write=_set_beta)
    chat_template_kwargs = _derived(lambda args: args.chat_template_kwargs or {})
    epsilon_high = _derived(lambda args: args.epsilon if args.epsilon_high is None else args.epsilon_high)
    epsilon_low = _derived(lambda args: args.epsilon)
    generation_kwargs = _derived(lambda args: args.generation_kwargs or {})
    log_completions = argument()
    log_unique_prompts = argument()
    mask_truncated_completions = argument()
    max_completion_length = argument(write=_setting("max_completion_length"))
    max_tool_calling_iterations = argument()
    min_p = argument(write=_setting("min_p"))
    num_completions_to_print = argument()
    num_generations = argument()
    num_generations_eval = _derived(lambda args: args.num_generations_eval or args.num_generations)
    num_iterations = argument()
    pad_to_multiple_of = argument()
    repetition_penalty = argument(write=_setting("repetition_penalty"))
    shuffle_dataset = argument()
    temperature = argument()
    top_k = argument(write=_setting("top_k"))
    top_p = argument(write=_setting("top_p"))
    chat_template = None
    """In TRL, another chat template for training. Here it is always that of the tokenizer."""
    use_vllm = False

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The options of the generation, also for a script that calls ``model.generate``. A script may change those
        that burnish's generation has, which takes them over before the next generation."""
        args, tokenizer, objective = self.args, self._tokenizer, self.objective
        return GenerationConfig(
            max_new_tokens=objective.max_new_tokens or args.max_completion_length, do_sample=True,
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
            repetition_penalty=args.repetition_penalty, pad_token_id=self._pad, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=sorted(objective.template.stop_token_ids()),
        )  # fmt: skip

    def _limit_completions(self, limits: Mapping[str, Any]) -> None:
        """Set the end of completions. Args: limits: ``eos_token_id`` and ``max_new_tokens``, or a part of them."""
        if (ids := limits.get("eos_token_id")) is not None:
            given = [ids] if isinstance(ids, int) else list(ids)
            usual = self._tokenizer.eos_token_id  # TRL cuts completions there in any case
            template: Any = self.objective.template
            template.stops = list(dict.fromkeys([*given, *([] if usual is None else [usual])]))
        if (longest := limits.get("max_new_tokens")) is not None:
            self.objective.max_new_tokens = int(longest)

    def _apply_generation_config(self) -> None:
        """Apply a script's changes of ``generation_config``.

        Raises:
            UserError: if a changed option is not one of burnish's generation, or is also one of the loss.
        """
        given = vars(self).pop("generation_config", None)
        if given is None:
            return
        now, usual = given.to_dict(), self.generation_config.to_dict()
        changed = {
            name: now.get(name) for name in sorted(now.keys() | usual.keys()) if now.get(name) != usual.get(name)
        }
        taken = (*SETTABLE_FIELDS, *LIMIT_FIELDS)
        for name, value in changed.items():
            if name in UNUSED_TOKENS:
                continue
            if value is None or name not in taken:
                what = f"A change of trainer.generation_config has no effect. Received: {name}={value!r}."
                remedy = "Available: " + ", ".join(taken) + "."
                if name == "temperature":
                    remedy = f"The loss depends on it too: set {type(self.args).__name__}(temperature={value!r})."
                raise UserError(what, remedy=remedy)
        raise_if(setting_problems(changed, "trainer.generation_config", remedy=""))
        self._limit_completions(changed)
        for name in SETTABLE_FIELDS:
            if name in changed:
                setattr(self, name, changed[name])
        self.generation_config = given
