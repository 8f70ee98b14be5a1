"""``stage: grpo`` and ``stage: rloo``: training on completions that the model generates itself.

Input: prompts (``prompts.py``), with columns for reward functions. A step batch of prompts becomes a generation batch:
several completions of each prompt, with rewards and advantages (``rollout``). It is divided into one or several step
batches of completions, which may be trained on several times. The loss is ``losses/rollouts`` over the entire step.

A generation batch is stored in checkpoints until its last step batch has been used, so a run that is interrupted within
it continues with the same completions.
"""

# C completions of a generation, S completions in a micro-batch, N tokens of completions in it

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Part, Stateful
from burnish.inference.types import EVALUATION, ROLLOUT, SHUFFLE, NoiseKey
from burnish.kernels.philox import permutation
from burnish.kernels.token_logps import LogpRules
from burnish.loop.modes import evaluating
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Loss, Row, StepBatch
from burnish.losses.base import OBJECTIVES, RowEncoder
from burnish.losses.preference_options import ReferenceOptions
from burnish.losses.responses import scoring
from burnish.losses.rollouts.loss import BATCH_KEYS, RolloutLoss
from burnish.losses.rollouts.options import OPTION_NAMES
from burnish.models.generate import GenerationOptions
from burnish.rollouts.advantages import advantages
from burnish.rollouts.completions import CompletionSource
from burnish.rollouts.generation import Generator, length_metrics, metrics_of, reward_metrics
from burnish.rollouts.metrics import (
    Counted,
    PhaseTimes,
    as_metrics,
    logp_difference,
    pass_at_k,
    with_counts,
    with_terminated_lengths,
)
from burnish.rollouts.options import RolloutOptions
from burnish.rollouts.prompts import ObjectiveChoices, PromptObjective
from burnish.rollouts.rewards.compute import RewardTable, compute_rewards
from burnish.rollouts.samples import (
    PLACE_COLUMN,
    ScoredCompletion,
    collate_pack,
    columns_of,
    groups_of,
    informative_samples,
    pack_samples,
    partition_samples,
    real_rows,
    step_batch_of,
    unpack_samples,
)
from burnish.rollouts.token_values import token_values

if TYPE_CHECKING:  # imported late: it loads transformers
    from burnish.inference.images.reading import ImageReader

MAX_PROMPT_BATCHES = 3
"""Maximum number of step batches of prompts per generation with ``drop_zero_variance_groups: refill``."""


@dataclass
class _GenerationResult:
    """Completions of all ranks, ordered by group; metrics of each call of the reward functions; and the seconds of each
    phase on this rank."""

    samples: list[ScoredCompletion]
    tables: list[Mapping[str, Sequence[float]]]
    seconds: dict[str, float]

    def add(self, other: _GenerationResult) -> None:
        self.samples += other.samples
        self.tables += other.tables
        self.seconds = {name: value + other.seconds[name] for name, value in self.seconds.items()}


@OBJECTIVES.register("grpo", reads=(RolloutOptions, ReferenceOptions, GenerationOptions, "disable_dropout"))
class RolloutObjective(PromptObjective):
    """Training on completions of the model itself, compared with others of the same prompt (GRPO and variants)."""

    token_columns: ClassVar[Mapping[str, float]] = {PLACE_COLUMN: 0}
    batch_keys = BATCH_KEYS | {"places", "entropies"}
    option_names = OPTION_NAMES
    learning_rates = (1e-6, 1e-5)
    leaves_one_out = False
    compares_completions = True
    """Whether the advantage of a completion depends on others of the same prompt."""
    min_generations = 2
    keeps_old_logps: bool = False
    """Whether ``old_logps`` are always computed, for a script that reads them."""
    logs_clipping_of_evaluations: bool = False

    def __init__(self, options: ObjectiveChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.token_loss = RolloutLoss(options, self.leaves_one_out)
        self.needs_reference = bool(options.rl_beta)
        self.source: CompletionSource | None = None
        self.compute_rewards: Callable[..., RewardTable] = compute_rewards
        self.max_new_tokens: int | None = None
        self.images: ImageReader | None = None
        self.before_generation: Callable[[], None] = lambda: None
        self.times = PhaseTimes()
        self.on_generation: Callable[[Sequence[ScoredCompletion], Sequence[str], int, int], None] | None = None

    @property
    def needs_old_logps(self) -> bool:
        """Whether log-probabilities at generation differ from those of the step, or are requested."""
        has_dropout = not self.choices.disable_dropout
        asks_kl_reward = self.leaves_one_out and self.needs_reference
        return self.inner_steps > 1 or has_dropout or asks_kl_reward or self.keeps_old_logps

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> LogpRules:
        temperature, has_bonus = self.choices.temperature, self.token_loss.has_bonus
        return LogpRules(entropy=True, temperature=temperature, entropy_gradient=has_bonus)

    @property
    def parts(self) -> Mapping[str, Stateful | Part]:
        own = {"controllers": Part(self.token_loss.entropy, "controllers", on_each_rank=True)}
        return {**super().parts, **(own if self.choices.use_adaptive_entropy else {})}

    # --- a generation -------------------------------------------------------------------------------------------------

    def rollout(
        self,
        module: nn.Module,
        step_batch: StepBatch,
        parallel: Parallel,
        step: int,
        more: Iterator[StepBatch] | None = None,
    ) -> Sequence[StepBatch]:
        used, numbers, source = self.generation(module, step_batch, parallel, step, more)
        return self._step_batches(used, numbers, source, step // self.inner_steps, parallel)

    def generation(
        self,
        module: nn.Module,
        step_batch: StepBatch,
        parallel: Parallel,
        step: int,
        more: Iterator[StepBatch] | None = None,
    ) -> tuple[list[ScoredCompletion], dict[str, Counted], StepBatch]:
        """Return the completions of all ranks that are trained, with their advantages; values for the log; and the
        step batch of prompts. Collective. The arguments are those of ``rollout``."""
        drops = self.choices.drop_zero_variance_groups
        generated = self._generate(module, step_batch, parallel, step)
        metrics = self.set_advantages(generated.samples)
        num_samples, batches = len(generated.samples), 1
        while (
            drops == "refill"
            and more is not None
            and batches < MAX_PROMPT_BATCHES
            and num_samples > len(informative_samples(generated.samples))
        ):
            further = next(more, None)
            if further is None:
                break
            generated.add(self._generate(module, further, parallel, step))
            metrics = self.set_advantages(generated.samples)
            step_batch, batches = replace(further, indices=[*step_batch.indices, *further.indices]), batches + 1
        every, names = generated.samples, [function.name for function in self.functions]
        metrics |= metrics_of(generated.tables) | length_metrics(every)
        metrics |= {f"time/{name}": value for name, value in generated.seconds.items()}
        self.times.generating_s += sum(generated.seconds.values())
        if self.on_generation is not None and parallel.rank == 0:
            self.on_generation(every, names, step + 1, step // self.inner_steps)
        used = every
        if drops in ("drop", "refill"):
            used = informative_samples(every)
            metrics["frac_groups_dropped"] = 1 - len(used) / max(len(every), 1)
        return used[:num_samples], with_counts(metrics, every, names, self.count()), step_batch

    def _generate(self, module: nn.Module, step_batch: StepBatch, parallel: Parallel, step: int) -> _GenerationResult:
        """Generate the completions of a step batch of prompts on all ranks, with rewards and log-probabilities.
        Collective."""
        rows = [row for batch in step_batch.batches for row in real_rows(batch)]
        key = NoiseKey(self.choices.seed, ROLLOUT, step // self.inner_steps)
        generator = self.generator(module, parallel)
        own, table, seconds = generator.samples(rows, self.choices.num_generations, key, parallel, step + 1)
        start = time.perf_counter()
        self._compute_logps(module, own, parallel)
        seconds["logps"] = time.perf_counter() - start
        found = parallel.gather_objects((own, table.metrics))
        every = sorted((sample for samples, _ in found for sample in samples), key=lambda s: (s.row, s.number))
        return _GenerationResult(every, [logged for _, logged in found], seconds)

    def count(self, is_eval: bool = False) -> int:
        """Return the number of completions per prompt."""
        options = self.choices
        return (options.num_generations_eval if is_eval else None) or options.num_generations

    def generator(self, module: nn.Module, parallel: Parallel) -> Generator:
        assert self.source is not None, "the source of completions must be set before training"
        self.before_generation()

        @contextmanager
        def generating() -> Iterator[None]:
            with evaluating(module), parallel.generating(module):
                yield

        stops = frozenset(self.template.stop_token_ids())
        return Generator(
            self.choices, self.source, self.functions, self.tokenizer, stops, generating, self.compute_rewards,
            self.max_new_tokens, self.images,
        )  # fmt: skip

    def set_advantages(self, samples: Sequence[ScoredCompletion], is_eval: bool = False) -> dict[str, float]:
        """Set the advantage of each completion of a generation batch. Returns values for the log."""
        groups = groups_of(samples, self.count(is_eval))
        weights = [function.weight for function in self.functions]
        values = torch.tensor(
            [[float("nan") if r is None else r for r in s.rewards] for s in samples], dtype=torch.float64
        )
        found = advantages(
            values.view(len(samples), -1), weights, groups, self.choices, self.leaves_one_out,
            self._penalties(samples),
        )  # fmt: skip
        spread = found.has_variance[found.groups].tolist()
        for sample, advantage, is_compared in zip(samples, found.values.tolist(), spread, strict=True):
            sample.advantage, sample.is_compared = advantage, is_compared
        return found.metrics | reward_metrics(samples, [function.name for function in self.functions])

    def _penalties(self, samples: Sequence[ScoredCompletion]) -> Tensor | None:
        """Return (C,) β Σ m (π_old - ρ), which RLOO subtracts from the reward. Identical completions of a prompt have
        the same value: their log-probabilities differ by rounding, which must not look like different rewards."""
        if not (self.leaves_one_out and self.needs_reference):
            return None
        sums: dict[tuple[Any, ...], float] = {}
        keys = [(s.row, *s.prompt, None, *s.ids) for s in samples]
        for key, s in zip(keys, samples, strict=True):
            each = zip(s.mask, s.old_logps or (), s.ref_logps or (), strict=True)
            sums.setdefault(key, sum(m * (old - ref) for m, old, ref in each))
        return (self.choices.rl_beta or 0.0) * torch.tensor([sums[key] for key in keys], dtype=torch.float64)

    def shuffle_number(self, generation: int, number_of_pass: int) -> int:
        """Return the number from which the order of completions in a pass is derived: the same for all passes, as in
        TRL."""
        return generation

    def _step_batches(
        self,
        samples: Sequence[ScoredCompletion],
        metrics: dict[str, Counted],
        source: StepBatch,
        generation: int,
        parallel: Parallel,
    ) -> list[StepBatch]:
        passes = []
        for number in range(self.inner_steps // self.steps_per_pass):
            order = permutation(len(samples), (self.choices.seed, SHUFFLE), self.shuffle_number(generation, number))
            size = self.choices.per_device_train_batch_size
            passes += partition_samples(samples, order, self.steps_per_pass, size, parallel.rank, parallel.world_size)
        step_batches, columns = [], self._columns(samples)
        for number, micro_batches in enumerate(passes):
            step_batches.append(step_batch_of(source, micro_batches, columns, metrics if number == 0 else {}))
        return step_batches

    def _columns(self, samples: Sequence[ScoredCompletion]) -> list[str]:
        """Return the names of the values per token in the packs of a step. If all groups were dropped, there are no
        samples, and these are the values that the loss reads."""
        is_read = {
            "old_logps": self.needs_old_logps,
            "ref_logps": self.needs_reference,
            "entropies": self.token_loss.masks_entropy,
        }
        return columns_of(samples) if samples else [name for name, read in is_read.items() if read]

    @property
    def redistribute(self) -> Callable[[Sequence[StepBatch], int, int], StepBatch]:
        return self._redistribute

    def _redistribute(self, parts: Sequence[StepBatch], rank: int, world_size: int) -> StepBatch:
        packs = [batch["pack"] for part in parts for batch in part.batches]
        samples = [sample for pack in packs for sample in unpack_samples(pack)]
        size, columns = self.choices.per_device_train_batch_size, self._columns(samples)
        (micro_batches,) = partition_samples(samples, range(len(samples)), 1, size, rank, world_size)
        return step_batch_of(parts[0], micro_batches, columns, parts[0].batches[0]["metrics"])

    # --- passes without a gradient ------------------------------------------------------------------------------------

    def _compute_logps(self, module: nn.Module, samples: Sequence[ScoredCompletion], parallel: Parallel) -> None:
        """Compute log-probabilities of the completions under policy and reference, if they are needed."""
        size = self.choices.per_device_train_batch_size
        if self.needs_old_logps or self.token_loss.masks_entropy:
            with scoring(module, parallel):
                each = token_values(module, samples, self.collate_samples, size, parallel)
                for sample, (logps, entropies, *values) in each:
                    sample.old_logps = logps if self.needs_old_logps else None
                    sample.entropies = entropies if self.token_loss.masks_entropy else None
                    sample.old_values = values[0] if values else None
        if self.needs_reference:
            assert self.reference is not None
            with self.reference.answering(module) as answering, parallel.other_modules(), scoring(answering, parallel):
                each = token_values(answering, samples, self.collate_samples, size, parallel)
                for sample, (logps, *_) in each:
                    sample.ref_logps = logps

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        prepared = []
        for batch in batches:
            found = parallel.to_device(collate_pack(self.collate_samples, batch["pack"]))
            weights = self.token_loss.token_weights(found["token_mask"], found["owner"], len(found["items"]))
            prepared.append({**found, "token_weights": weights, "metrics": batch.get("metrics", {})})
        entropies = [batch["entropies"] for batch in prepared] if self.token_loss.masks_entropy else None
        return self.token_loss.prepare_step(prepared, parallel, entropies)

    def num_items(self, batch: Batch) -> Tensor:
        return self.token_loss.num_items(batch)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        values = module({name: value for name, value in batch.items() if name != "metrics"})
        return self.loss_of_tokens(values.token_logps, values.token_entropy, values.aux, batch, module.training)

    def loss_of_tokens(
        self, logps: Tensor, entropy: Tensor, aux: Tensor | None, batch: Batch, is_training: bool
    ) -> Loss:
        """Return the loss of a micro-batch from values of its tokens.

        Args:
            logps, entropy: (N,) of the policy, in nats. aux: () router loss, a mean over tokens.
        """
        loss = self.token_loss(logps, entropy, batch, is_training)
        logs_clipping = is_training or self.logs_clipping_of_evaluations
        sums = {name: value for name, value in loss.sums.items() if logs_clipping or "clip" not in name}
        metrics = as_metrics(batch["metrics"], loss.total.device) | logp_difference(logps, batch)
        total = loss.total
        if aux is not None:
            weighted = aux * self.num_items(batch)
            sums["aux_loss"] = weighted.detach()
            total = total + self.aux_coefficient * weighted
        return replace(loss, total=total, sums={**sums, **metrics})

    def report(self, values: dict[str, float]) -> dict[str, float]:
        """Return the values for the log, with the times of the steps since the last log."""
        values = with_terminated_lengths(values)
        return {**values, **self.times.read()} if "grad_norm" in values else values

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        for _, batch in self.iter_packs(module, batches, parallel):
            yield batch

    def iter_packs(
        self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel
    ) -> Iterator[tuple[dict[str, Tensor], Batch]]:
        """Generate completions of the prompts of the dataset, with the same noise each time. Yields packs of samples,
        each with its prepared micro-batch."""
        every, numbers = self.evaluation(module, [row for batch in batches for row in real_rows(batch)], parallel)
        size, columns = self.choices.per_device_train_batch_size, self._columns(every)
        steps = partition_samples(every, range(len(every)), 1, size, parallel.rank, parallel.world_size)
        for number, part in enumerate(steps[0]):
            batch: Batch = {"pack": pack_samples(part, columns), "metrics": numbers if number == 0 else {}}
            for prepared in self.prepare_step(module, [batch], parallel):
                yield batch["pack"], prepared

    def evaluation(
        self, module: nn.Module, rows: Sequence[Row], parallel: Parallel
    ) -> tuple[list[ScoredCompletion], dict[str, Counted]]:
        """Return the completions of the prompts of all ranks, with their advantages, and values for the log.
        Collective."""
        count = self.count(is_eval=True)
        generator = self.generator(module, parallel)
        key = NoiseKey(self.choices.seed, EVALUATION)
        own, table, _ = generator.samples(rows, count, key, parallel, 0, is_eval=True)
        self._compute_logps(module, own, parallel)
        found = parallel.gather_objects((own, table.metrics))
        every = sorted((sample for samples, _ in found for sample in samples), key=lambda s: (s.row, s.number))
        metrics = self.set_advantages(every, is_eval=True) | metrics_of([logged for _, logged in found])
        metrics |= length_metrics(every) | pass_at_k(every, count)
        return every, with_counts(metrics, every, table.names, count)


@OBJECTIVES.register("rloo", reads=(RolloutOptions, ReferenceOptions, GenerationOptions, "disable_dropout"))
class LeaveOneOutObjective(RolloutObjective):
    """Training on completions of the model itself, each compared with the mean of the others of its prompt (RLOO)."""

    leaves_one_out = True
