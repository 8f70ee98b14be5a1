"""Training with overridden methods of ``GRPOTrainer`` and ``RLOOTrainer``, called as in TRL: with padded batches of
completions and the model itself.

If a subclass overrides ``compute_loss`` or another method with a batch or the model as argument, the backend wraps the
bare model, and the completions of a micro-batch are padded. What depends on the whole step is computed as without the
override. So an override that only calls the original method changes nothing.
"""

# S completions in a micro-batch, P and T padded lengths of prompts and completions, N tokens of completions

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from burnish.config.errors import UserError
from burnish.inference.types import SHUFFLE
from burnish.kernels.philox import permutation
from burnish.kernels.token_logps import LogpRules, plain_token_logps
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Loss, Row, StepBatch
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.samples import (
    ScoredCompletion,
    collate_pack,
    pack_samples,
    partition_samples,
    real_rows,
    step_batch_of,
    unpack_samples,
)
from burnish.trainer.data.torch_loader import PaddingBatch
from burnish.trainer.trl.preferences.scripted import PaddedObjective, ScriptedBatch
from burnish.trainer.trl.vision import with_loaded_images

_NUMBERS = {
    "old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps", "sampler_logps": "sampling_per_token_logps",
}  # fmt: skip
"""Values per token of a sample -> TRL's key of a padded batch."""


UNKNOWN_ROW = -1
"""Number of a prompt that is not known."""
_REQUIRED_TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
"""Keys that the loss reads of every batch of completions."""


class RolloutBatch(ScriptedBatch):
    """TRL's padded batch.

    Attributes:
        sizes: number of tokens of each completion.
        rows: number of the prompt of each completion in the dataset.
    """

    sizes: list[int]
    rows: list[int]

    @classmethod
    def of(cls, values: Mapping[str, Any], ready: Batch, samples: Sequence[ScoredCompletion]) -> RolloutBatch:
        batch = (cls if samples else PaddingRolloutBatch)(values, ready)
        batch.sizes = [len(sample.ids) for sample in samples]
        batch.rows = [sample.row for sample in samples]
        return batch


class PaddingRolloutBatch(RolloutBatch, PaddingBatch):
    """A batch without completions, for a rank that has no more of them: one padded row with the weight 0."""


class RecordsOfBatch(list[dict[str, Any]]):
    """The record of each completion of a micro-batch, which TRL passes to ``training_step``, ``prediction_step`` and
    ``_prepare_inputs``. ``batch`` is the padded batch of the completions."""

    def __init__(self, records: Iterable[dict[str, Any]], batch: RolloutBatch) -> None:
        super().__init__(records)
        self.batch = batch


def record_of(row: Row) -> dict[str, Any]:
    """The record of a row of prompts: its prompt and its columns, with images loaded."""
    record = json.loads(row["record"])
    return {"prompt": record["prompt"], **with_loaded_images(record["columns"])}


def padded_batch(samples: Sequence[ScoredCompletion], pad: int, sums_old_logps: bool) -> dict[str, Tensor]:
    """TRL's batch of completions.

    Args:
        samples: the completions of a micro-batch. Without any, the batch has a single row of padding.
        pad: id of the padding token.
        sums_old_logps: whether ``old_logps`` (S,) is a sum over each completion, as for RLOO.

    Returns:
        ``prompt_ids`` and ``prompt_mask`` (S, P), padded on the left; ``completion_ids`` and ``completion_mask``
        (S, T), padded on the right, the mask 0 for a truncated completion that is left out; ``advantages`` (S,);
        ``tool_mask`` (S, T) if tokens of tools are among them; and (S, T) ``old_per_token_logps`` and
        ``ref_per_token_logps`` if they are known.
    """
    samples = samples or [ScoredCompletion(0, 0, "", [pad], [pad], [0], True)]
    found = {
        "prompt_ids": _pad_values([s.prompt for s in samples], pad, "left"),
        "prompt_mask": _pad_values([[1] * len(s.prompt) for s in samples], 0, "left"),
        "completion_ids": _pad_values([s.ids for s in samples], pad),
        "completion_mask": _pad_values([[int(any(s.mask))] * len(s.ids) for s in samples], 0),
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float32),
    }
    if any(0 in s.mask and any(s.mask) for s in samples):
        found["tool_mask"] = _pad_values([s.mask if any(s.mask) else [1] * len(s.ids) for s in samples], 1)
    for name, theirs in _NUMBERS.items():
        if all(getattr(s, name) is not None for s in samples):
            found[theirs] = _pad_values([getattr(s, name) for s in samples], 0.0)
    if sums_old_logps and "old_per_token_logps" in found:
        found["old_logps"] = (found.pop("old_per_token_logps") * found["completion_mask"]).sum(1)
    return found


def _pad_values(rows: Sequence[Sequence[Any]], value: float, side: str = "right") -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, value, side)


def samples_of(batch: Mapping[str, Any], sizes: Sequence[int] | None) -> list[ScoredCompletion]:
    """The completions of a padded batch that a script has changed.

    Args:
        sizes: number of tokens of each completion; None: up to the last one that counts.
    """
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    if sizes is None or len(sizes) != len(mask):
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        sizes = (batch["completion_mask"].ne(0) * places).amax(1).clamp(min=1).tolist()
    assert sizes is not None
    samples = []
    for at, size in enumerate(min(size, mask.shape[1]) for size in sizes):
        numbers: dict[str, Any] = {
            name: batch[theirs][at, :size].tolist() for name, theirs in _NUMBERS.items() if theirs in batch
        }
        prompt = batch["prompt_ids"][at][batch["prompt_mask"][at] != 0].tolist()
        ids, counted = batch["completion_ids"][at, :size].tolist(), mask[at, :size].int().tolist()
        if "old_logps" in batch:  # RLOO: a sum over the completion, and the loss only depends on it
            share = float(batch["old_logps"][at]) / max(sum(counted), 1)
            numbers["old_logps"] = [share * value for value in counted]
        given = batch["advantages"][at]
        if given.ndim:  # one per token
            numbers["token_advantages"] = given[:size].tolist()
        advantage = float(given[:size].mean() if given.ndim else given)
        samples.append(ScoredCompletion(0, 0, "", prompt, ids, counted, True, advantage=advantage, **numbers))
    return samples


class ScriptedRollouts(PaddedObjective):
    """An objective of rollouts.

    Args:
        pad: id of the padding token.
        token_values: (model, padded batch) -> (S, T) log-probabilities and entropies, and () the router's loss or
            None, of a script. None: the objective's module computes them.
        generate: a script's method that takes the record of each completion and returns TRL's padded batch. None: the
            objective generates.
    """

    objective: RolloutObjective

    def __init__(
        self, objective: RolloutObjective, over: Callable[[nn.Module], nn.Module], pad: int, parallel: Parallel,
        token_values: Callable[[nn.Module, Mapping[str, Any]], tuple[Tensor, Tensor | None, Tensor | None]] | None,
        generate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(objective, over, parallel)
        self.pad, self.token_values, self.generate = pad, token_values, generate
        self._request: _GenerationRequest | None = None
        objective.keeps_old_logps = objective.leaves_one_out
        self._prepared: list[RolloutBatch] = []  # micro-batches of the step whose loss was not computed yet

    # --- as without an override ---

    @property
    def inner_steps(self) -> int:
        return self.objective.inner_steps

    @property
    def rows_per_rank(self) -> int | None:
        return self.objective.rows_per_rank

    @property
    def redistribute(self) -> Callable[[Sequence[StepBatch], int, int], StepBatch]:
        return self.objective.redistribute

    def rollout(
        self, module: nn.Module, step_batch: StepBatch, parallel: Parallel, step: int,
        more: Iterator[StepBatch] | None = None,
    ) -> Sequence[StepBatch]:  # fmt: skip
        if self.generate is None:
            return self.objective.rollout(self.over(module), step_batch, parallel, step, more)
        rows = [row for batch in step_batch.batches for row in real_rows(batch)]
        module.train()
        request = _GenerationRequest(
            rows,
            self.objective.count(),
            lambda: self.objective.generation(self.over(module), step_batch, parallel, step, more),
        )
        values = self._of_script(request)
        size, num_steps = self.objective.choices.per_device_train_batch_size, self.objective.steps_per_pass
        found, generation = [], step // self.inner_steps
        for _ in range(self.inner_steps // num_steps):
            order = permutation(num_rows(values), (self.objective.choices.seed, SHUFFLE), generation)
            steps = partition_samples(request.places(num_rows(values)), order, num_steps, size, 0, 1)
            found += [self._step_batch(step_batch, request, values, parts) for parts in steps]
        found[0].batches[0]["metrics"] = request.metrics
        return found

    # --- completions of a script ---

    def _of_script(self, request: _GenerationRequest) -> dict[str, Any]:
        """Return the padded batch that the script generates, without entries that are None."""
        assert self.generate is not None
        self._request = request
        values = self.generate(request.records())
        missing = [name for name in _REQUIRED_TENSORS if not isinstance(values.get(name), Tensor)]
        if missing:
            what = f"_generate_and_score_completions must return the tensors {', '.join(_REQUIRED_TENSORS)}. Missing: "
            remedy = "Return them, or change the result of the original method."
            raise UserError(f"{what}{', '.join(missing)}.", remedy=remedy)
        return {name: value for name, value in values.items() if value is not None and name != "num_items_in_batch"}

    def generate_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The objective's completions of the records that a script passes on, as TRL's padded batch.

        Raises:
            UserError: if the script has changed the records.
        """
        request = self._request
        assert request is not None, "called outside of a rollout"
        if inputs != request.records():
            what = "_generate_and_score_completions must pass on its inputs unchanged. Received: other records."
            raise UserError(what, remedy="Change the dataset, or generate the completions with rollout_func.")
        samples, request.metrics, *_ = request.score()
        of_row: dict[int, list[ScoredCompletion]] = {}
        for sample in samples:
            of_row.setdefault(sample.row, []).append(sample)
        own = [sample for row in request.rows for sample in of_row.get(row["row"], [])]
        values: dict[str, Any] = padded_batch(own, self.pad, self.objective.leaves_one_out)
        if not self.objective.leaves_one_out:
            values["num_items_in_batch"] = (values["completion_mask"] * values.get("tool_mask", 1)).sum()
        return dict(self.parallel.to_device(values))

    def _step_batch(
        self, source: StepBatch, request: _GenerationRequest, values: Mapping[str, Any], parts: Sequence[Sequence[int]]
    ) -> StepBatch:
        """A step batch of completions of a script's batch. Args: parts: their indices, for each micro-batch."""
        of_parts = [{name: select_completions(value, part) for name, value in values.items()} for part in parts]
        numbers = request.numbers(num_rows(values))
        samples = [
            [replace(sample, row=numbers[at]) for sample, at in zip(samples_of(each, None), part, strict=True)]
            for each, part in zip(of_parts, parts, strict=True)
        ]
        found = step_batch_of(source, samples, None, {})
        for batch, each in zip(found.batches, of_parts, strict=True):
            batch["script"] = each
        return found

    # --- padded batches ---

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        prepared = self.objective.prepare_step(self.over(module), batches, parallel)
        items = parallel.sum(torch.stack([self.objective.num_items(batch) for batch in prepared]).sum())
        # The items of the whole generation, as in TRL, whose loss divides them by the number of steps per generation.
        items = items * self.objective.steps_per_pass
        found = [self._padded(batch, ready, items) for batch, ready in zip(batches, prepared, strict=True)]
        self._prepared = [*found]
        return found

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        for source, ready in self._evaluate(module, batches, parallel):
            batch = self._padded(source, ready, self.objective.num_items(ready) * parallel.world_size)
            self._prepared = [batch]
            yield batch

    def _evaluate(
        self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel
    ) -> Iterator[tuple[Batch, Batch]]:
        if self.generate is None:
            for pack, ready in self.objective.iter_packs(self.over(module), batches, parallel):
                yield {"pack": pack}, ready
            return
        rows = [row for batch in batches for row in real_rows(batch)]
        request = _GenerationRequest(
            rows,
            self.objective.count(is_eval=True),
            lambda: self.objective.evaluation(self.over(module), rows, parallel),
        )
        values, size = self._of_script(request), self.objective.choices.per_device_train_batch_size
        (parts,) = partition_samples(request.places(num_rows(values)), range(num_rows(values)), 1, size, 0, 1)
        of_all = self._step_batch(StepBatch([], None, 0.0), request, values, parts)
        of_all.batches[0]["metrics"] = request.metrics
        for batch in of_all.batches:
            for ready in self.objective.prepare_step(self.over(module), [self.parallel.to_device(batch)], parallel):
                yield batch, ready

    def _padded(self, batch: Batch, ready: Batch, items: Tensor) -> RolloutBatch:
        samples = unpack_samples(batch["pack"])
        values = dict(batch.get("script") or padded_batch(samples, self.pad, self.objective.leaves_one_out))
        if not self.objective.leaves_one_out:
            values["num_items_in_batch"] = items
        return RolloutBatch.of(self.parallel.to_device(values), ready, samples)

    def ready(self, batch: Batch) -> Batch:
        """The objective's micro-batch of a padded one: the prepared one, or a new one if a script has changed it."""
        same = next((each for each in self._prepared if each.is_unchanged_in(batch)), None)
        of_step = same or (batch if isinstance(batch, RolloutBatch) else next(iter(self._prepared), None))
        self._prepared = [each for each in self._prepared if each is not of_step]
        if same is not None:
            return same.ready
        known, sizes = ({}, None) if of_step is None else (of_step.ready, of_step.sizes)
        known_batch = self.parallel.to_device(
            collate_pack(self.objective.collate_samples, pack_samples(samples_of(batch, sizes)))
        )
        loss, owner, count = self.objective.token_loss, known_batch["owner"], len(known_batch["items"])
        known_batch["token_weights"] = loss.token_weights(known_batch["token_mask"], owner, count)
        if loss.has_bonus:
            known_batch["entropy_scale"] = known.get(
                "entropy_scale", loss.num_items(known_batch) / known_batch["token_mask"].sum()
            )
        if (mask := known.get("entropy_mask")) is not None and len(mask) == len(owner):
            known_batch["entropy_mask"] = mask
        return {**known_batch, "metrics": known.get("metrics", {})}

    def num_items(self, batch: Batch) -> Tensor:
        if isinstance(batch, RolloutBatch):
            return self.objective.num_items(batch.ready)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        return self.objective.num_items({"token_mask": mask, "items": torch.ones_like(batch["advantages"])})

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """The loss of a padded batch, a sum over its items."""
        ready = self.ready(batch)
        if self.token_values is None:
            return self.objective.loss(self.over(module), ready)
        logps, entropies, aux = self.token_values(module, batch)
        at = (ready["owner"], place_in_completion(ready))
        entropy = torch.zeros_like(logps) if entropies is None else entropies
        return self.objective.loss_of_tokens(logps[at], entropy[at], aux, ready, module.training)


@dataclass
class _GenerationRequest:
    """The records of a call of a script's ``_generate_and_score_completions``.

    Args:
        rows: prompts of this rank. count: completions of each.
        score: generates completions of all ranks. Returns them, and values for the log.
    """

    rows: Sequence[Row]
    count: int
    score: Callable[[], tuple[Any, ...]]
    metrics: dict[str, Any] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        """The record of each completion, with its prompt."""
        return [record_of(row) for row in self.rows for _ in range(self.count)]

    def numbers(self, count: int) -> list[int]:
        """The number of the prompt of each completion in the dataset; ``UNKNOWN_ROW`` if a script has returned another
        number of completions."""
        numbers = [row["row"] for row in self.rows for _ in range(self.count)]
        return numbers if len(numbers) == count else [UNKNOWN_ROW] * count

    def places(self, count: int) -> list[int]:
        """Return the places of ``count`` completions, ordered by their prompts as without an override."""
        return sorted(range(count), key=self.numbers(count).__getitem__)


def num_rows(values: Mapping[str, Any]) -> int:
    """The number of completions of a padded batch."""
    return len(values["completion_ids"])


def select_completions(value: Any, places: Sequence[int]) -> Any:
    """The values of the completions with these indices; a scalar belongs to all of them."""
    if isinstance(value, Tensor):
        return value[list(places)] if value.ndim else value
    return [value[at] for at in places] if isinstance(value, list) else value


def place_in_completion(ready: Batch) -> Tensor:
    """(N,) the index of each token in its completion, from its index among all tokens of the micro-batch."""
    owner, places = ready["owner"], ready["places"]
    firsts = torch.full((len(ready["items"]),), len(places) + 1, device=places.device, dtype=places.dtype)
    place: Tensor = places - firsts.scatter_reduce(0, owner, places, "amin")[owner]
    return place


def token_values_of(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, num_kept: int, rules: LogpRules, router: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities and entropies (S, T) of the last ``num_kept`` tokens of padded rows, from all logits; () the
    router's loss, if ``router``."""
    router_arguments = {"output_router_logits": True} if router else {}
    output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **router_arguments)
    logits, targets = output.logits[:, -num_kept - 1 : -1], input_ids[:, -num_kept:]
    values = plain_token_logps(logits.flatten(0, 1), targets.flatten(), replace(rules, softcap=None))
    shape = targets.shape
    return values.logps.view(shape), values.entropy.view(shape), output.aux_loss if router else None
