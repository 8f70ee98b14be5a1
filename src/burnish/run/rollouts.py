"""Inputs of an objective that trains on completions of the model: the source of completions, and numbered rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from burnish.adapters.lora_model import merged
from burnish.checkpoint.checkpoint import output_folder
from burnish.data.rows.numbered import NumberedRows
from burnish.loop.protocols import Parallel
from burnish.losses.base import StageObjective
from burnish.models.load import context_length
from burnish.parallel.memory import total_memory
from burnish.rollouts.completions import SLOTS_CPU, SLOTS_GPU, SlotSource
from burnish.rollouts.journal import CompletionsCallback, RolloutNotesCallback
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.rewards.functions import RewardFunction
from burnish.rollouts.rewards.models import RewardServer, reward_model_of
from burnish.run.plan.memory import DecoderShape
from burnish.run.plan.options import RunOptions
from burnish.run.prepare import Prepared

_LONGEST = 1 << 20
_SHARE = 0.25
"""Of a device's memory, for keys and values in float32."""


def setup_completions(objective: StageObjective, model: Any, parallel: Parallel, options: RunOptions) -> None:
    """Give the objective its source of completions: the model that trains, unless it has one."""
    if not isinstance(objective, RolloutObjective) or objective.source is not None:
        return
    if options.reward_model is not None:
        objective.functions.append(reward_model_function(options, parallel))
    context, longest = context_length(model.config) or _LONGEST, longest_of(options, model.config)
    seats = slots_of(objective, parallel.device, model.config, longest)
    objective.source = SlotSource(
        model, seats, context, parallel.precision, options.infer_exact, merging(model, parallel)
    )


def merging(model: Any, parallel: Parallel) -> Callable[[], AbstractContextManager[None]]:
    """The context in which a trained adapter is part of the weights; where ranks hold pieces, it is applied instead."""
    return nullcontext if parallel.splits_weights else partial(merged, model)


def rollout_callbacks(objective: StageObjective, options: RunOptions) -> list[Any]:
    """Callbacks of a run that learns from completions: their file, their table, and notes."""
    if not isinstance(objective, RolloutObjective):
        return []
    callback = CompletionsCallback(options, output_folder(options) if options.log_completions else None)
    objective.on_generation = callback.add
    return [objective.times, *([callback] if options.log_completions else []), RolloutNotesCallback(options)]


def longest_of(options: RunOptions, config: Any) -> int:
    """Tokens of the longest prompt with its completion, as far as the options and the model tell."""
    return min(context_length(config) or _LONGEST, options.cutoff_len + options.max_completion_length)


def slots_of(objective: RolloutObjective, device: torch.device, config: Any, longest: int) -> int:
    """Completions side by side: as the options say, else those of a generation up to a limit, as far as their keys and
    values fit into a share of the device's memory. The share is of all memory, not of what is free: it decides how sums
    round, so a resumed run needs the same number.

    Args:
        longest: tokens of prompt and completion together.
    """
    choices = objective.choices
    if choices.kept_seats:
        return choices.kept_seats
    of_a_generation = objective.rows_per_rank * choices.num_generations
    shape = DecoderShape.of(config.get_text_config())
    num_bytes = 4 * 2 * shape.layers * shape.keys * longest
    fitting = int(_SHARE * total_memory(device)) // max(num_bytes, 1)
    return max(1, min(SLOTS_CPU if device.type == "cpu" else SLOTS_GPU, of_a_generation, fitting))


def reward_model_function(options: RunOptions, parallel: Parallel) -> RewardFunction:
    """The reward model of a run, as one more reward function behind the others."""
    name, weights, place = options.reward_model or "", options.reward_weights, len(options.reward_funcs or [])
    call: Any = RewardServer(name)
    if options.reward_model_type != "api":
        bits = options.reward_model_quantization_bit
        call = reward_model_of(name, options.reward_model_adapters or (), bits).to(parallel.device)
    return RewardFunction(call.__name__, call, 1.0 if weights is None else weights[place], name)


def with_numbers(prepared: Prepared) -> Prepared:
    """The rows with their numbers in the set, which random numbers depend on."""
    if not isinstance(prepared.objective, RolloutObjective):
        return prepared
    rows: Any = NumberedRows(prepared.rows)
    evals: Any = {name: NumberedRows(some) for name, some in prepared.eval_rows.items()}
    return replace(prepared, rows=rows, eval_rows=evals)
