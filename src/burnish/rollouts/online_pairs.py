"""``stage: dpo`` with ``online: true``: DPO on pairs of the model's own completions.

Each step generates ``num_generations`` completions of each prompt and uses those with the highest and lowest reward as
a pair (https://arxiv.org/abs/2402.04792). The losses are those of ``losses/pairs.py``. A prompt whose completions all
have the same reward gives no pair and is counted.
"""

# C completions of a step, P pairs in a micro-batch

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Part, Stateful
from burnish.kernels.probe import Capabilities
from burnish.kernels.token_logps import LogpRules
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Loss, Row, StepBatch
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder
from burnish.losses.pair_values import PAIR_COLUMNS
from burnish.losses.pairs import PairObjective
from burnish.losses.preference_options import PairOptions, PreferenceOptions, ReferenceOptions, needs_reference
from burnish.losses.responses import AnswersObjective
from burnish.models.generate import GenerationOptions
from burnish.rollouts.generation import reward_metrics, score_metrics, weighted_rewards
from burnish.rollouts.metrics import Counted, as_metrics
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.options import RolloutOptions
from burnish.rollouts.prompts import ObjectiveChoices
from burnish.rollouts.samples import ScoredCompletion, real_rows

_BLANK_PAIR: Row = {name: list(value) for name, value in PAIR_COLUMNS.items()}


@OBJECTIVES.register(
    "online_dpo",
    reads=(RolloutOptions, PairOptions, PreferenceOptions, ReferenceOptions, GenerationOptions, "disable_dropout"),
)
class OnlinePairObjective(RolloutObjective, PairObjective):
    """Pairs of the model's own completions, ranked by reward (online DPO)."""

    row_columns: ClassVar[Mapping[str, Any]] = RolloutObjective.row_columns
    batch_keys = PairObjective.batch_keys
    option_names: ClassVar[dict[str, str]] = {}
    variants: ClassVar[dict[str, str]] = {}
    learning_rates = PairObjective.learning_rates
    logs_rewards = True
    compares_completions = False

    def __init__(self, options: ObjectiveChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.needs_reference = needs_reference(options)

    @classmethod
    def default_options(cls, choices: Any, /) -> Mapping[str, Any]:
        return {**super().default_options(choices), "num_generations": 2, "max_completion_length": 64}

    @property
    def micro_batches(self) -> int:
        return self.choices.gradient_accumulation_steps

    @property
    def inner_steps(self) -> int:
        return 1

    @property
    def rows_per_rank(self) -> int:
        return self.choices.per_device_train_batch_size * self.choices.gradient_accumulation_steps

    @property
    def metrics(self) -> list[str]:
        return [*PairObjective.metrics.__get__(self), "reward"]

    @property
    def parts(self) -> Mapping[str, Stateful | Part]:
        found: Mapping[str, Stateful | Part] = PairObjective.parts.__get__(self)
        return found

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        self.collate_pairs = partial(PairObjective._collate, self, collate)
        return super().configure(capabilities, collate)

    @property
    def rules(self) -> LogpRules:
        found: LogpRules = AnswersObjective.rules.__get__(self)
        return found

    # --- completions -> pairs -----------------------------------------------------------------------------------------

    def _compute_logps(self, module: nn.Module, samples: Sequence[ScoredCompletion], parallel: Parallel) -> None:
        """Do nothing: ``prepare_step`` computes the log-probabilities of the reference."""

    def set_advantages(self, samples: Sequence[ScoredCompletion], is_eval: bool = False) -> dict[str, float]:
        tied = sum(not pair for pair in self._pairs_of(samples, self.count(is_eval)))
        return {
            **score_metrics(self._scores(samples)),
            "frac_reward_zero_std": tied * self.count(is_eval) / len(samples),
            **reward_metrics(samples, [function.name for function in self.functions]),
        }  # fmt: skip

    def _scores(self, samples: Sequence[ScoredCompletion]) -> Tensor:
        return weighted_rewards(samples, self.functions, self.choices.missing_eos_penalty)

    def _pairs_of(self, samples: Sequence[ScoredCompletion], count: int) -> Iterator[Row | None]:
        """Yield a row for each prompt: its best and its worst completion with a score; None if their rewards are
        equal."""
        scores = self._scores(samples).tolist()
        for at in range(0, len(samples), count):
            numbers = [number for number in range(at, at + count) if samples[number].is_scored] or [at]
            best, worst = max(numbers, key=scores.__getitem__), min(numbers, key=scores.__getitem__)
            if best == worst or scores[best] == scores[worst]:
                yield None
                continue
            row: Row = {}
            for side, sample in (("chosen", samples[best]), ("rejected", samples[worst])):
                row[f"{side}_input_ids"] = [*sample.prompt, *sample.ids]
                row[f"{side}_labels"] = [IGNORE_INDEX] * len(sample.prompt) + sample.ids
            yield {**row, "images": samples[at].images} if samples[at].images else row

    def _step_batches(
        self,
        samples: Sequence[ScoredCompletion],
        metrics: dict[str, Counted],
        source: StepBatch,
        generation: int,
        parallel: Parallel,
    ) -> list[StepBatch]:
        batches = self._micro_batches(samples, metrics, self.count(), parallel)
        rows = [row for batch in batches for row in batch["pairs"]]
        tokens = sum(len(row["chosen_input_ids"]) + len(row["rejected_input_ids"]) for row in rows)
        return [replace(source, batches=batches, num_rows=len(rows), num_tokens=tokens)]

    def _micro_batches(
        self, samples: Sequence[ScoredCompletion], metrics: dict[str, Counted], count: int, parallel: Parallel
    ) -> list[Batch]:
        """Return the pairs of this rank in micro-batches, the same number on all ranks; one without pairs is empty."""
        pairs = [row for row in self._pairs_of(samples, count) if row is not None]
        size, world = self.choices.per_device_train_batch_size, parallel.world_size
        own = pairs[len(pairs) * parallel.rank // world : len(pairs) * (parallel.rank + 1) // world]
        most = max(1, -(-len(pairs) // (size * world)))
        found: list[Batch] = [{"pairs": own[at * size : (at + 1) * size], "metrics": {}} for at in range(most)]
        found[0]["metrics"] = metrics
        return found

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        collated = [parallel.to_device(self._collated_pairs(batch["pairs"])) for batch in batches]
        prepared = PairObjective.prepare_step(self, module, collated, parallel)
        return [{**each, "metrics": batch["metrics"]} for each, batch in zip(prepared, batches, strict=True)]

    def _collated_pairs(self, pairs: Sequence[Row]) -> Batch:
        if pairs:
            return self.collate_pairs(pairs)
        batch = self.collate_pairs([_BLANK_PAIR])
        return {**batch, "items": torch.zeros_like(batch["items"])}

    def num_items(self, batch: Batch) -> Tensor:
        return PairObjective.num_items(self, batch)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        batch = dict(batch)
        numbers = batch.pop("metrics")
        loss = PairObjective.loss(self, module, batch)
        return replace(loss, sums={**loss.sums, **as_metrics(numbers, loss.total.device)})

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        every, numbers = self.evaluation(module, [row for batch in batches for row in real_rows(batch)], parallel)
        for batch in self._micro_batches(every, numbers, self.count(is_eval=True), parallel):
            yield from self.prepare_step(module, [batch], parallel)
