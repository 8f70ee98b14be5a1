"""Prompts of objectives that train on completions of the model itself: their records, rows and checks, and the sizes
of a generation batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch

from burnish.config.errors import Problem, UserError
from burnish.kernels.probe import Capabilities
from burnish.loop.types import Batch, Example, Row
from burnish.losses.base import Collate, RowEncoder
from burnish.losses.responses import AnswersObjective, PairChoices
from burnish.losses.rollouts.loss import RolloutLossChoices
from burnish.rollouts.generation import BLANK_PROMPT, GenerationChoices, filters_of, prompt_row
from burnish.rollouts.metrics import PASS_AT_K_VALUES
from burnish.rollouts.options import DefaultsChoices, stage_defaults
from burnish.rollouts.rewards.functions import RewardFunction, load_rewards, missing_columns
from burnish.utils.environment import launcher_number


class ObjectiveChoices(RolloutLossChoices, GenerationChoices, PairChoices):
    """The options of the objective."""

    gradient_accumulation_steps: int
    per_device_train_batch_size: int


class PromptObjective(AnswersObjective):
    """An objective whose rows are prompts. A step batch of the loader becomes a generation batch of completions."""

    records = "prompts"
    record_columns = ("*",)
    row_columns: ClassVar[Mapping[str, Any]] = {"prompt_input_ids": (0,), "record": BLANK_PROMPT}
    logs_rewards = False
    passed_arguments: frozenset[str] | None = frozenset()
    """Arguments of the reward functions besides the columns and those of every run; None if they are not known."""

    def __init__(self, options: ObjectiveChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.choices, self.tokenizer = options, tokenizer
        self.functions: list[RewardFunction] = load_rewards(options.reward_funcs, options.reward_weights)

    @classmethod
    def default_options(cls, choices: DefaultsChoices, /) -> Mapping[str, Any]:
        decides = choices.load_best_model_at_end or choices.save_strategy == "best"
        return {**stage_defaults(choices), **({"metric_for_best_model": "reward"} if decides else {})}

    # --- sizes of a generation ----------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per rank and generation batch. Each is used ``num_iterations`` times."""
        options = self.choices
        if options.generation_batch_size is None:
            return options.steps_per_generation or options.gradient_accumulation_steps
        of_all_ranks = options.per_device_train_batch_size * launcher_number("WORLD_SIZE", 1)
        return max(1, options.generation_batch_size // of_all_ranks)

    @property
    def steps_per_pass(self) -> int:
        """Number of steps that use all completions of a generation batch once."""
        return max(1, self.micro_batches // self.choices.gradient_accumulation_steps)

    @property
    def inner_steps(self) -> int:
        return self.steps_per_pass * self.choices.num_iterations

    @property
    def rows_per_rank(self) -> int:
        """Number of prompts per rank in a step batch of the loader."""
        most = max(self.micro_batches, self.choices.gradient_accumulation_steps)
        return max(1, self.choices.per_device_train_batch_size * most // self.choices.num_generations)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]:
        """Tokenize prompts. Args: truncate: has no effect, because prompts are not truncated."""
        for example in examples:
            refuse_answered(example)
        pairs = zip(examples, self.template.encode_prompts(examples, stats), strict=True)
        return [None if row is None else prompt_row(example, row, stats) for example, row in pairs]

    def inspect(self, rows: Sequence[Row], rows_per_step: int) -> list[str]:
        """Check the columns of the records. Raises UserError if a reward function requires an argument that is not
        passed."""
        if problems := self.inspect_columns(rows, "The data"):
            raise UserError(problems)
        if not self.template.stop_token_ids():
            longest = self.choices.max_completion_length
            what = f"No completion would end before {longest} tokens: template and tokenizer have no end-of-turn token."
            raise UserError(what, remedy="Set a template with an end-of-turn token.", option="template")
        if not (filters := filters_of(self.choices)):
            return []
        names = ", ".join(f"{name} {value:g}" for name, value in filters.items())
        return [
            f"With {names}, the sampling distribution differs from the policy, so the gradient of the expected reward "
            "is biased. The mean difference in log-probability is logged as sampling/logp_difference."
        ]

    def inspect_columns(self, rows: Sequence[Row], source: str) -> list[Problem]:
        if self.passed_arguments is None:
            return []
        columns = {name for row in islice(rows, 100) for name in json.loads(row["record"])["columns"]}
        return list(missing_columns(self.functions, columns, source, self.passed_arguments))

    def sequence_title(self, row: Row, name: str) -> str:
        return f"the prompt, {self.choices.num_generations} completions; "

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        self.collate_samples = collate
        return super().configure(capabilities, collate)

    def _collate(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        """Return the prompts of a micro-batch of the loader without changes; ``items`` is 0 for an empty one."""
        return {"rows": list(rows), "labels": torch.zeros(len(rows), 1), "items": torch.ones(len(rows))}

    @property
    def contents(self) -> Mapping[str, Any]:
        """Return the source code of the reward functions and everything that sampling depends on."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "infer_exact")
        sampling = {name: getattr(self.choices, name, None) for name in names}
        options = self.choices
        world_size = launcher_number("WORLD_SIZE", 1)
        completions = options.per_device_train_batch_size * options.gradient_accumulation_steps * world_size
        functions = {each.name: each.digest for each in self.functions}
        return {"reward functions": functions, "sampling": sampling, "completions per step": completions}

    @property
    def metrics(self) -> list[str]:
        """Return the names of evaluation metrics that do not depend on the reward functions."""
        names = [f"rewards/{function.name}/mean" for function in self.functions]
        lengths = [f"completions/{end}_length" for end in ("mean", "min", "max")]
        return ["loss", "reward", "reward_std", "entropy", *names, *lengths, *(f"pass@{k}" for k in PASS_AT_K_VALUES)]


def prompts_of(rows: Iterable[Row]) -> Iterator[str | list[dict[str, Any]]]:
    """Yield the prompts of rows in the form for reward functions: texts, or lists of messages."""
    for row in rows:
        yield json.loads(row["record"])["prompt"]


def refuse_answered(example: Example) -> None:
    """Reject a prompt that ends with a response. Raises UserError."""
    prompt: Any = example.extra.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and not example.extra.get("completion"):
        what = "a prompt must end with a user message. Received: a prompt that ends with an assistant message."
        raise UserError(f"{example.place}: {what}", remedy="Move the response to a separate column.")
