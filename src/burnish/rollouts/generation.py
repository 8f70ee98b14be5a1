"""A generation on this rank: prompts -> completions -> texts -> rewards.

Takes rows of prompts, a source of completions and reward functions. Returns a ``ScoredCompletion`` for each completion,
and values for the log. Does not depend on steps or gradients.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from burnish.config.errors import UserError, first_line
from burnish.data.images.image_file import files_of, images_of
from burnish.data.images.in_rows import parts_for_chat_template, without_expansion
from burnish.data.stats import DataStats, keep_reason
from burnish.inference.types import NoiseKey, Sampling
from burnish.loop.protocols import Parallel
from burnish.loop.types import Example, Message, Row
from burnish.losses.sequence_logps import with_images
from burnish.models.generate import GenerationOptions
from burnish.rollouts.completions import CompletionLimits, CompletionSource
from burnish.rollouts.options import RolloutOptions
from burnish.rollouts.rewards.compute import RewardError, RewardTable, compute_rewards
from burnish.rollouts.rewards.functions import PASSED_BY_NAME, RewardFunction
from burnish.rollouts.samples import ScoredCompletion

if TYPE_CHECKING:  # imported late: it loads transformers
    from burnish.inference.images.reading import ImageReader

NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns of a record that are not passed to reward functions, because they are converted to other arguments."""
BLANK_PROMPT = '{"prompt": "", "columns": {}, "place": ""}'
"""Record of a prompt that only fills an empty micro-batch."""
T = TypeVar("T")


class GenerationChoices(RolloutOptions, GenerationOptions):
    """The options of generation."""

    seed: int


_DISABLED_VALUES: dict[str, tuple[float | None, ...]] = {
    "top_p": (1.0,), "top_k": (0,), "min_p": (None, 0.0), "repetition_penalty": (1.0,),
}  # fmt: skip


def filters_of(options: GenerationChoices) -> dict[str, float]:
    """Return the options, with their values, that make the sampling distribution differ from the policy."""
    return {
        name: getattr(options, name)
        for name, neutral in _DISABLED_VALUES.items()
        if getattr(options, name) not in neutral
    }


# --- records -> rows --------------------------------------------------------------------------------------------------


def prompt_row(example: Example, encoded: Row, stats: DataStats) -> Row:
    """Return the row of a prompt: its ids and images, and as JSON the record for reward functions. Values that JSON
    does not have are converted to text, and counted in ``stats``."""
    converted: set[str] = set()

    def text_of(value: Any) -> str:
        converted.add(type(value).__name__)
        return str(value)

    columns = {name: value for name, value in example.extra.items() if name not in NOT_COLUMNS}
    if (answer := example.response.text if example.response else example.completion) is not None:
        columns.setdefault("answer", answer)
        columns.setdefault("solution", answer)
    if all(columns.get(name) is None for name in ("image", "images")) and (images := files_of(encoded)):
        columns["images"] = [image.path for image in images]  # of message parts, or of a column of another name
    record = {"prompt": shown_prompt(example), "columns": columns, "place": example.place}
    row: Row = {"prompt_input_ids": encoded["input_ids"], **with_images(encoded)}
    row["record"] = json.dumps(record, ensure_ascii=False, default=text_of)
    for kind in sorted(converted):
        stats.add(keep_reason(f"values of type {kind} are converted to strings for reward functions"), example)
    return row


def shown_prompt(example: Example) -> str | list[dict[str, Any]]:
    """Return the prompt in the form for reward functions: text, or messages without the response."""
    if not example.messages:
        return example.text or example.prompt or ""
    system = [Message("system", example.system)] if example.system else []
    return [dict(message.raw or _as_record(message)) for message in (*system, *example.request)]


def _as_record(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI: its content is a text, or parts if it has images."""
    role = {"function": "assistant", "observation": "tool"}.get(message.role, message.role)
    return {"role": role, "content": parts_for_chat_template(message.parts) if message.images else message.text}


# --- rows -> samples --------------------------------------------------------------------------------------------------


@dataclass
class Generator:
    """Generates completions and their rewards.

    Args:
        generating: context in which the source may use the trained weights.
        compute_rewards: calls the reward functions, like ``compute_rewards``.
        max_new_tokens: length limit of a completion, if it is not ``max_completion_length``.
        images: reads the images of prompts; None for a text model.
    """

    options: GenerationChoices
    source: CompletionSource
    functions: Sequence[RewardFunction]
    tokenizer: Any
    stop_ids: frozenset[int]
    generating: Callable[[], AbstractContextManager[Any]]
    compute_rewards: Callable[..., RewardTable] = compute_rewards
    max_new_tokens: int | None = None
    images: ImageReader | None = None

    def sampling(self, is_eval: bool = False) -> Sampling:
        """Return the sampling parameters."""
        options = self.options
        temperature = options.eval_temperature if is_eval else None
        # A placeholder in a completion would need an image of its own when the completion is trained.
        placeholders = () if self.images is None else self.images.family.placeholder_ids
        return Sampling(
            options.temperature if temperature is None else temperature, options.top_k, options.top_p,
            options.min_p or 0.0, options.repetition_penalty, bias=dict.fromkeys(placeholders, -math.inf),
        )  # fmt: skip

    def samples(
        self, rows: Sequence[Row], count: int, key: NoiseKey, parallel: Parallel, step: int, is_eval: bool = False
    ) -> tuple[list[ScoredCompletion], RewardTable, dict[str, float]]:
        """Return ``count`` completions of each prompt with their rewards, and the seconds of each phase. Collective.

        Args:
            rows: rows of this rank, with ``row``, their number in the dataset.
            key: noise key; its row and sample are set here.
        """
        seconds = {}
        start = time.perf_counter()
        samples = _on_all_ranks(parallel, lambda: self._generate(rows, count, key, is_eval))
        seconds["generate"], start = time.perf_counter() - start, time.perf_counter()
        table = self._compute_rewards(rows, count, samples, parallel, step)
        seconds["reward"] = time.perf_counter() - start
        return samples, table, seconds

    def _generate(self, rows: Sequence[Row], count: int, key: NoiseKey, is_eval: bool) -> list[ScoredCompletion]:
        sampling = self.sampling(is_eval)
        wants = not is_eval and bool(filters_of(self.options))
        longest = self.max_new_tokens or self.options.max_completion_length
        limits = CompletionLimits(longest, self.stop_ids, sampling, wants)
        seen: dict[int, int] = {}
        keys, prompts, images = [], [], []
        for row in rows:
            first = seen.get(row["row"], 0)  # a record that is repeated gets different completions
            seen[row["row"]] = first + count
            keys += [replace(key, row=row["row"], sample=first + at) for at in range(count)]
            prompts += [list(row["prompt_input_ids"])] * count
            images += [self._prompt_images(row)] * count
        records = [json.loads(row["record"]) for row in rows for _ in range(count)]
        self.source.set_records(records)
        if any(images):
            self.source.set_images(images)
        with self.generating():
            completions = self.source.complete(prompts, keys, limits) if prompts else []
        self.source.free()
        columns = [row.get("images") for row in rows for _ in range(count)]
        samples = []
        for at, (each, noise) in enumerate(zip(completions, keys, strict=True)):
            is_masked = self.options.mask_truncated_completions and not each.is_ended
            mask = [0] * len(each.ids) if is_masked else each.mask or [1] * len(each.ids)
            prompt = prompts[at] if each.prompt is None else each.prompt
            text = self.tokenizer.decode(each.ids, skip_special_tokens=True)
            prompt_text = self.tokenizer.decode(self._shown_ids(prompt, columns[at]), skip_special_tokens=False)
            samples.append(
                ScoredCompletion(
                    noise.row, noise.sample, records[at]["place"], prompt, each.ids, mask, each.is_ended, prompt_text,
                    text, extra=dict(each.columns), messages=each.messages, sampler_logps=each.logps,
                    images=columns[at],
                )
            )  # fmt: skip
        return samples

    def _prompt_images(self, row: Row) -> Mapping[str, Any]:
        """Return the request fields of the images of a prompt."""
        if self.images is None:
            return {}
        return self.images.of({"input_ids": row["prompt_input_ids"], **with_images(row)})

    def _shown_ids(self, prompt: list[int], images: Any) -> list[int]:
        """Return a prompt with one placeholder per image."""
        if self.images is None or not images:
            return prompt
        return without_expansion(prompt, images_of({"images": images}), self.images.family.mark_id)

    def _compute_rewards(
        self, rows: Sequence[Row], count: int, samples: list[ScoredCompletion], parallel: Parallel, step: int
    ) -> RewardTable:
        """Call the reward functions. An error on one rank, and a generation batch without any score, is raised on all
        ranks."""
        names = [function.name for function in self.functions]
        empty = RewardTable(torch.zeros(0, len(names), dtype=torch.float64), names)
        try:
            table = _on_all_ranks(
                parallel, lambda: self._call_reward_functions(rows, count, samples, step) if samples else empty
            )
        except UserError as error:
            raise RewardError(error.problems) from error
        if names and not parallel.any(bool((~table.values.isnan()).any())):
            what = f"No completion of step {step} has a score: {', '.join(names)} returned None for all of them."
            remedy = "Return a number for at least one completion per step. None means that a function does not apply."
            raise RewardError(what, remedy=remedy, option="reward_funcs")
        for sample, values in zip(samples, table.values.tolist(), strict=True):
            sample.rewards = [None if value != value else value for value in values]
        for name, values in table.extra.items():
            for sample, value in zip(samples, values, strict=False):
                sample.extra[name] = value
        return table

    def _call_reward_functions(
        self, rows: Sequence[Row], count: int, samples: Sequence[ScoredCompletion], step: int
    ) -> RewardTable:
        records = [json.loads(row["record"]) for row in rows for _ in range(count)]
        columns = {name: None for record in records for name in record["columns"]}
        # A column that other records of the dataset have is None here.
        columns |= {name: None for each in self.functions for name in sorted(each.required - PASSED_BY_NAME)}
        completions = [
            sample.text
            if isinstance(record["prompt"], str)
            else sample.messages or [{"role": "assistant", "content": sample.text}]
            for sample, record in zip(samples, records, strict=True)
        ]
        reads_texts = any(function.reads_texts for function in self.functions)
        texts = [self.tokenizer.decode([*s.prompt, *s.ids], skip_special_tokens=False) for s in samples if reads_texts]
        added = {name: [sample.extra.get(name) for sample in samples] for name in (samples[0].extra if samples else ())}
        return self.compute_rewards(
            self.functions, [record["prompt"] for record in records], completions, [s.ids for s in samples],
            {name: [record["columns"].get(name) for record in records] for name in columns} | added,
            places=[f"record {place.rpartition(' ')[2]}" for place in (s.place for s in samples)],
            **({"texts": texts} if texts else {}), timeout_s=self.options.reward_timeout_s, step=step,
        )  # fmt: skip


def _on_all_ranks(parallel: Parallel, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on this rank. Collective: after an error on one rank no rank continues.

    Raises:
        Exception: the rank's own error.
        UserError: the problems of another rank.
        RuntimeError: the message of another rank's error that the user's input did not cause.
    """
    if parallel.world_size == 1:
        return work()
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as error:  # user code may raise anything
        failure = error
    cause: Any = f"{type(failure).__name__}: {first_line(failure)}" if failure is not None else None
    if isinstance(failure, UserError):
        cause = failure.problems
    own = None if failure is None else (parallel.rank, cause)
    failures = [each for each in parallel.gather_objects(own) if each is not None]
    if failure is not None:
        raise failure
    for rank, cause in failures:
        raise RuntimeError(f"Rank {rank} failed. {cause}") if isinstance(cause, str) else UserError(cause)
    return results[0]


def length_metrics(samples: Sequence[ScoredCompletion]) -> dict[str, float]:
    """Return the lengths of completions in tokens, of all and of finished ones, and the share of truncated ones."""
    lengths = [len(sample.ids) for sample in samples]
    ended = [len(sample.ids) for sample in samples if sample.is_ended] or [0]
    found: dict[str, float] = {}
    for name, values in (("length", lengths), ("terminated_length", ended)):
        found |= {
            f"completions/mean_{name}": sum(values) / len(values),
            f"completions/min_{name}": min(values),
            f"completions/max_{name}": max(values),
        }
    return found | {"completions/clipped_ratio": 1 - sum(s.is_ended for s in samples) / len(samples)}


def weighted_rewards(
    samples: Sequence[ScoredCompletion], functions: Sequence[RewardFunction], eos_penalty: float | None = None
) -> torch.Tensor:
    """Return (C,) float64, the weighted sum of the rewards of each completion that apply, minus ``eos_penalty`` if it
    was truncated. NaN for a completion without a score."""
    weights = [function.weight for function in functions]
    sums = [
        sum(w * (r or 0.0) for w, r in zip(weights, s.rewards, strict=True)) if s.is_scored else math.nan
        for s in samples
    ]
    cut = [0.0 if s.is_ended else eos_penalty or 0.0 for s in samples]
    return torch.tensor(sums, dtype=torch.float64) - torch.tensor(cut, dtype=torch.float64)


def score_metrics(scores: torch.Tensor) -> dict[str, float]:
    """Return ``reward`` and ``reward_std`` for the log. Args: scores: (C,), NaN for a completion without a score."""
    known = scores[~scores.isnan()]
    return {"reward": float(known.mean()), "reward_std": float(known.std()) if len(known) > 1 else 0.0}


def reward_metrics(samples: Sequence[ScoredCompletion], names: Sequence[str]) -> dict[str, float]:
    """Return the mean and the standard deviation of the rewards of each function over all completions."""
    values = [[float("nan") if value is None else value for value in sample.rewards] for sample in samples]
    return RewardTable(torch.tensor(values, dtype=torch.float64), list(names)).summary()


def metrics_of(tables: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the means of the values that reward functions passed to ``log_metric`` on each rank."""
    names = dict.fromkeys(name for table in tables for name in table)
    joined = {name: [value for table in tables for value in table.get(name, ())] for name in names}
    return {name: sum(values) / len(values) for name, values in joined.items() if values}
