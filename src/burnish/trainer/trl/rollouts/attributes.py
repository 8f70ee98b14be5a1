"""Attributes of ``GRPOTrainer`` and ``RLOOTrainer`` that a script reads or sets: those of TRL, from the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from transformers import GenerationConfig

from burnish.config.errors import UserError
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.prompts import ObjectiveChoices
from burnish.trainer.trl.base import argument
from burnish.trainer.trl.preferences.scripted import OverridableTrainer
from burnish.trainer.trl.rollouts.config import RolloutConfig


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

    beta = argument(RolloutConfig, lambda args: args.beta, _set_beta)
    chat_template_kwargs = argument(RolloutConfig, lambda args: args.chat_template_kwargs or {})
    epsilon_low = argument(RolloutConfig, lambda args: args.epsilon)
    generation_kwargs = argument(RolloutConfig, lambda args: args.generation_kwargs or {})
    log_completions = argument(RolloutConfig, lambda args: args.log_completions)
    log_unique_prompts = argument(RolloutConfig, lambda args: args.log_unique_prompts)
    mask_truncated_completions = argument(RolloutConfig, lambda args: args.mask_truncated_completions)
    max_completion_length = argument(
        RolloutConfig, lambda args: args.max_completion_length, _setting("max_completion_length")
    )
    max_tool_calling_iterations = argument(RolloutConfig, lambda args: args.max_tool_calling_iterations)
    min_p = argument(RolloutConfig, lambda args: args.min_p, _setting("min_p"))
    num_completions_to_print = argument(RolloutConfig, lambda args: args.num_completions_to_print)
    num_generations = argument(RolloutConfig, lambda args: args.num_generations)
    num_generations_eval = argument(RolloutConfig, lambda args: args.num_generations_eval or args.num_generations)
    num_iterations = argument(RolloutConfig, lambda args: args.num_iterations)
    pad_to_multiple_of = argument(RolloutConfig, lambda args: args.pad_to_multiple_of)
    repetition_penalty = argument(RolloutConfig, lambda args: args.repetition_penalty, _setting("repetition_penalty"))
    shuffle_dataset = argument(RolloutConfig, lambda args: args.shuffle_dataset)
    temperature = argument(RolloutConfig, lambda args: args.temperature)
    top_k = argument(RolloutConfig, lambda args: args.top_k, _setting("top_k"))
    top_p = argument(RolloutConfig, lambda args: args.top_p, _setting("top_p"))
    chat_template = None
    """In TRL, another chat template for training. Here it is always that of the tokenizer."""
    use_vllm = False

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The sampling options, for a script that calls ``model.generate``. burnish's own generation reads the
        attributes of the trainer instead, so a change of this object is refused."""
        args, tokenizer = self.args, self._tokenizer
        return GenerationConfig(
            max_new_tokens=args.max_completion_length, do_sample=True, temperature=args.temperature, top_p=args.top_p,
            top_k=args.top_k, min_p=args.min_p, repetition_penalty=args.repetition_penalty, pad_token_id=self._pad,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=sorted(self.objective.template.stop_token_ids()),
        )  # fmt: skip

    def _refuse_changed_generation_config(self) -> None:
        given = vars(self).pop("generation_config", None)
        if given is None:
            return
        now, usual = given.to_dict(), self.generation_config.to_dict()
        if changed := sorted(name for name in now if now[name] != usual.get(name)):
            what = f"Changes of trainer.generation_config have no effect. Received: {changed[0]}={now[changed[0]]!r}."
            names = "top_p, top_k, min_p, repetition_penalty and max_completion_length"
            raise UserError(what, remedy=f"Set an attribute of the trainer ({names}), or an argument of its config.")
        self.generation_config = given
