"""Samples: completions with rewards (``ScoredCompletion``), as tensors for the buffer, divided over steps and ranks.

A checkpoint within a generation batch stores packed samples: token ids, masks, advantages and log-probabilities, about
16 bytes per token. Everything else that a micro-batch needs is derived from them.
"""

# S completions in a pack, N tokens of completions in it

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from burnish.loop.types import IGNORE_INDEX, Batch, Row, StepBatch
from burnish.losses.base import Collate
from burnish.losses.sequence_logps import collate_sequences

Item = TypeVar("Item")

PLACE_COLUMN = "completion_place"
"""Column of a row with a value per token: its index among the completion tokens of the pack."""
_PER_TOKEN = ("old_logps", "ref_logps", "sampler_logps", "entropies", "old_values", "token_advantages", "returns")


@dataclass
class ScoredCompletion:
    """One completion with its rewards.

    Args:
        row: number of its prompt in the dataset.
        number: index among the completions of the prompt.
        place: its record, for display: ``train.jsonl, record 12``.
        mask: 1 for a token that is trained, 0 for a token of a tool result or of a masked completion.
        rewards: rewards of each function; None if it does not apply.
        extra: columns of the completion source, and values that reward functions passed to ``log_extra``.
        messages: the completion as messages, if it has tool calls.
        images: the images of the prompt, as in the column ``images`` of a row.
        is_compared: whether the completions of its prompt differ in reward.
        old_logps, ref_logps, entropies: per token, in nats, if they are needed.
        sampler_logps: per token, in nats, under the sampling distribution, if it is not the policy's.
        old_values, token_advantages, returns: per token, with a value head.
    """

    row: int
    number: int
    place: str
    prompt: list[int]
    ids: list[int]
    mask: list[int]
    is_ended: bool
    prompt_text: str = ""
    text: str = ""
    rewards: list[float | None] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    advantage: float = 0.0
    is_compared: bool = True
    old_logps: list[float] | None = None
    ref_logps: list[float] | None = None
    sampler_logps: list[float] | None = None
    entropies: list[float] | None = None
    old_values: list[float] | None = None
    token_advantages: list[float] | None = None
    returns: list[float] | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[dict[str, Any]] | None = None

    @property
    def is_scored(self) -> bool:
        """Whether any reward function applies to the completion."""
        return any(reward is not None for reward in self.rewards)


def columns_of(samples: Sequence[ScoredCompletion]) -> list[str]:
    """Return the names of the values per token that all samples have, and "images" if any sample has images."""
    found = [name for name in _PER_TOKEN if samples and all(getattr(s, name) is not None for s in samples)]
    return [*found, *(["images"] if any(sample.images for sample in samples) else [])]


def pack_samples(samples: Sequence[ScoredCompletion], columns: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Convert samples to tensors. The inverse of ``rows_of``, with token and completion counts.

    Args:
        columns: names of values per token; None for those of the samples. A pack without samples has them too, so that
            the micro-batches of all ranks have the same keys.
    """
    found = {
        "ids": torch.tensor([token for s in samples for token in (*s.prompt, *s.ids)], dtype=torch.int32),
        "prompts": torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32),
        "completions": torch.tensor([len(s.ids) for s in samples], dtype=torch.int32),
        "mask": torch.tensor([value for s in samples for value in s.mask], dtype=torch.uint8),
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float64),
        "rows": torch.tensor([s.row for s in samples], dtype=torch.int64),
    }
    names = columns_of(samples) if columns is None else columns
    if "images" in names:
        text = json.dumps([sample.images or [] for sample in samples])
        found["images"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for name in (name for name in names if name in _PER_TOKEN):
        found[name] = torch.tensor([value for s in samples for value in getattr(s, name)], dtype=torch.float32)
    return found


def unpack_samples(pack: dict[str, Tensor]) -> list[ScoredCompletion]:
    """Return the samples of a pack."""
    ids, prompts, completions, mask = (pack[name].tolist() for name in ("ids", "prompts", "completions", "mask"))
    numbers = {name: pack[name].tolist() for name in _PER_TOKEN if name in pack}
    samples, begin, first = [], 0, 0
    rows = pack["rows"].tolist() if "rows" in pack else [0] * len(prompts)  # checkpoints of earlier versions
    of_each = zip(prompts, completions, pack["advantages"].tolist(), rows, _images_of_pack(pack), strict=True)
    for prompt, length, advantage, row, images in of_each:
        middle, end, last = begin + prompt, begin + prompt + length, first + length
        of_tokens: dict[str, Any] = {name: values[first:last] for name, values in numbers.items()}
        sample = ScoredCompletion(row, 0, "", ids[begin:middle], ids[middle:end], mask[first:last], True, **of_tokens)
        sample.advantage, sample.images = advantage, images
        samples.append(sample)
        begin, first = end, last
    return samples


def _images_of_pack(pack: dict[str, Tensor]) -> list[list[dict[str, Any]] | None]:
    """Return the images of each completion of a pack, None if it has none."""
    if "images" not in pack:
        return [None] * len(pack["prompts"])
    return [images or None for images in json.loads(bytes(pack["images"].tolist()))]


def step_batch_of(
    source: StepBatch,
    micro_batches: Sequence[Sequence[ScoredCompletion]],
    columns: Sequence[str] | None,
    metrics: dict[str, Any],
) -> StepBatch:
    """Return a step batch of completions.

    Args:
        source: has epoch, cursor and items.
        columns: names of values per token, as in ``pack_samples``.
        metrics: values for the log.
    """
    batches: list[Batch] = [{"pack": pack_samples(part, columns)} for part in micro_batches]
    batches[0]["metrics"] = metrics
    used = [sample for part in micro_batches for sample in part]
    num_tokens = sum(len(sample.prompt) + len(sample.ids) for sample in used)
    return replace(source, batches=batches, num_rows=len(used), num_tokens=num_tokens)


def rows_of(pack: dict[str, Tensor]) -> list[Row]:
    """Return a row for each completion of a pack: its prompt, which is not trained, and its tokens."""
    ids, prompts, completions = (pack[name].tolist() for name in ("ids", "prompts", "completions"))
    rows: list[Row] = []
    begin = 0
    firsts = accumulate(completions, initial=0)
    for prompt, length, first, images in zip(prompts, completions, firsts, _images_of_pack(pack), strict=False):
        whole = ids[begin : begin + prompt + length]
        begin += prompt + length
        labels = [IGNORE_INDEX] * prompt + whole[prompt:]
        places = [0] * prompt + [*range(first, first + length)]
        row: Row = {"input_ids": whole, "labels": labels, PLACE_COLUMN: places}
        rows.append({**row, "images": images} if images else row)
    return rows


def collate_pack(collate: Collate, pack: dict[str, Tensor]) -> Batch:
    """Return the micro-batch of a pack.

    Returns:
        The keys of ``collate_sequences``, and ``items`` (S,), ``advantages`` (S,), ``token_mask`` (N,), ``places`` (N,)
        of each token in the pack, and (N,) ``old_logps``, ``ref_logps`` and ``entropies`` if the pack has them. For an
        empty pack, a micro-batch whose ``items`` and ``token_mask`` are 0.
    """
    rows = rows_of(pack)
    if not rows:
        blank: Row = {"input_ids": [0, 0], "labels": [IGNORE_INDEX, 0], PLACE_COLUMN: [0, 0]}
        batch = collate_sequences(collate, [blank])
        places, zero = batch.pop(PLACE_COLUMN), torch.zeros(1)
        none = {name: zero for name in _PER_TOKEN if name in pack}
        return {**batch, **none, "items": zero, "advantages": zero, "token_mask": zero, "places": places.flatten()[1:]}
    batch = collate_sequences(collate, rows)
    places = batch.pop(PLACE_COLUMN).flatten()[batch["target_positions"] + 1]
    batch |= {"items": torch.ones(len(rows)), "advantages": pack["advantages"].float(), "places": places}
    batch["token_mask"] = pack["mask"][places].float()
    return batch | {name: pack[name][places] for name in _PER_TOKEN if name in pack}


def partition_samples(
    samples: Sequence[Item],
    order: Sequence[int],
    num_steps: int,
    micro_batch: int,
    rank: int,
    world_size: int,
) -> list[list[list[Item]]]:
    """Return the micro-batches of this rank for each step.

    Args:
        samples: samples of all ranks, or their places; completions of a prompt are adjacent.
        order: permutation of their indices, which determines the samples of each step. Within a step, completions of a
            prompt are adjacent again, so that their prompt is computed once.

    Returns:
        ``num_steps`` lists of micro-batches of up to ``micro_batch`` samples; the same number on all ranks, some may be
        empty.
    """
    bounds = [round(len(order) * step / num_steps) for step in range(num_steps + 1)]
    steps = []
    for begin, end in pairwise(bounds):
        chosen = sorted(order[begin:end])
        shares = [len(chosen) * at // world_size for at in range(world_size + 1)]
        most = max(1, max(-(-(b - a) // micro_batch) for a, b in pairwise(shares)))
        mine = [samples[at] for at in chosen[shares[rank] : shares[rank + 1]]]
        steps.append([mine[at * micro_batch : (at + 1) * micro_batch] for at in range(most)])
    return steps


def informative_samples(samples: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
    """Completions of the groups whose rewards differ."""
    return [sample for sample in samples if sample.is_compared]


def groups_of(samples: Sequence[ScoredCompletion], count: int) -> Tensor:
    """(C,) the group of each completion: those of one prompt, in the order of ``samples``."""
    return torch.arange(len(samples)) // count


def real_rows(batch: Batch) -> list[Row]:
    """Return the rows of a loader micro-batch that are prompts: none for a padding micro-batch."""
    return [row for row, item in zip(batch["rows"], batch["items"].tolist(), strict=True) if item]
