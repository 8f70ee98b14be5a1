"""Inputs of objectives that train on the model's own completions: the completion source, and rows with their index."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from burnish.adapters.lora_model import merge_temporarily
from burnish.checkpoint.checkpoint import output_folder
from burnish.config.options import raise_if
from burnish.data.images.sources import MediaReader
from burnish.data.rows.row_set import RowsOver
from burnish.loop.protocols import Parallel
from burnish.loop.types import Row
from burnish.losses.base import StageObjective
from burnish.models.load import context_length
from burnish.models.patches.packed import packing
from burnish.parallel.memory import total_memory
from burnish.rollouts.completions import SLOTS_CPU, SLOTS_GPU, SlotSource
from burnish.rollouts.journal import CompletionsCallback, RolloutNotesCallback
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.prompts import prompts_of
from burnish.rollouts.rewards.functions import RewardFunction, with_unique_names
from burnish.rollouts.rewards.models import RewardModel, RewardServer, check_conversations, reward_model_of
from burnish.run.images.batches import has_images
from burnish.run.plan.memory import DecoderShape
from burnish.run.plan.options import RunOptions
from burnish.run.prepare import Prepared

_LONGEST = 1 << 20
_SHARE = 0.25
"""Fraction of device memory for the KV cache, with keys and values in float32."""


class NumberedRows(RowsOver):
    """Rows with an additional column ``row``: their index in the dataset."""

    def item(self, index: int) -> Row | None:
        row: Any = self.rows[index]
        return None if row is None else {**row, "row": index}


def setup_completions(prepared: Prepared, model: Any, parallel: Parallel, options: RunOptions) -> None:
    """Set the completion source of the objective to the trained model, unless it already has one."""
    objective = prepared.objective
    if not isinstance(objective, RolloutObjective) or objective.source is not None:
        return
    if options.reward_model is not None:
        function = reward_model_function(options, parallel)
        if isinstance(function.call, RewardModel):  # one that had to be downloaded is not checked yet
            raise_if(check_conversations(function.call.tokenizer, function.name, prompts_of(prepared.sample)))
        objective.functions = with_unique_names([*objective.functions, function])
    if prepared.family is not None and has_images(prepared):
        from burnish.inference.images.reading import ImageReader

        collate: Any = objective.collate_samples
        prepare = collate.images.prepare  # which already decodes the images of the next prompts
        objective.images = ImageReader(model, prepared.family, MediaReader(), getattr(prepare, "pixels", prepare))
    context, longest = context_length(model.config) or _LONGEST, longest_of(options, model.config)
    seats = slots_of(objective, parallel.device, model.config, longest)
    objective.source = SlotSource(
        model,
        seats,
        context,
        parallel.precision,
        options.infer_exact,
        merging(model, parallel),
        packing(model, options.torch_compile, options),
    )


def merging(model: Any, parallel: Parallel) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which a trained adapter is merged into the weights, or, with sharded weights, applied
    unmerged."""
    return nullcontext if parallel.shards_weights else partial(merge_temporarily, model)


def rollout_callbacks(objective: StageObjective, options: RunOptions) -> list[Any]:
    """Return the callbacks of a run with rollouts: the completions file, printed completions, and notes."""
    if not isinstance(objective, RolloutObjective):
        return []
    has_advantages = objective.compares_completions
    folder = output_folder(options) if options.log_completions else None
    callback = CompletionsCallback(options, folder, has_advantages)
    objective.on_generation = callback.add
    notes = RolloutNotesCallback(options, has_advantages)
    return [objective.times, *([callback] if options.log_completions else []), notes]


def longest_of(options: RunOptions, config: Any) -> int:
    """Return the maximum length of a prompt with its completion, as limited by the options and the model."""
    return min(context_length(config) or _LONGEST, options.cutoff_len + options.max_completion_length)


def slots_of(objective: RolloutObjective, device: torch.device, config: Any, longest: int) -> int:
    """Return the number of completions that are generated concurrently.

    Default: the generation batch, up to ``SLOTS_CPU`` or ``SLOTS_GPU``, and up to a KV cache of ``_SHARE`` of the
    device's total memory. The number affects rounding, so it must not depend on the free memory: a resumed run needs
    the same number.

    Args:
        longest: maximum length of prompt and completion together, in tokens.
    """
    choices = objective.choices
    if choices.max_concurrent_completions:
        return choices.max_concurrent_completions
    of_a_generation = objective.rows_per_rank * choices.num_generations
    shape = DecoderShape.of(config.get_text_config())
    num_bytes = 4 * 2 * shape.layers * shape.keys * longest
    fitting = int(_SHARE * total_memory(device)) // max(num_bytes, 1)
    return max(1, min(SLOTS_CPU if device.type == "cpu" else SLOTS_GPU, of_a_generation, fitting))


def reward_model_function(options: RunOptions, parallel: Parallel) -> RewardFunction:
    """Return the reward model of a run as a reward function; it comes after the other functions."""
    name, weights, place = options.reward_model or "", options.reward_weights, len(options.reward_funcs or [])
    call: Any = RewardServer(name)
    if options.reward_model_type != "api":
        bits = options.reward_model_quantization_bit
        call = reward_model_of(name, options.reward_model_adapters or (), bits, options).to(parallel.device)
    weight = 1.0 if weights is None else weights[place]
    return RewardFunction(call.__name__, call, weight, name, reads_texts=isinstance(call, RewardServer))


def with_numbers(prepared: Prepared) -> Prepared:
    """Return the rows with their index in the dataset, from which random numbers are derived."""
    if not isinstance(prepared.objective, RolloutObjective):
        return prepared
    rows: Any = NumberedRows(prepared.rows)
    evals: Any = {name: NumberedRows(some) for name, some in prepared.eval_rows.items()}
    return replace(prepared, rows=rows, eval_rows=evals)
