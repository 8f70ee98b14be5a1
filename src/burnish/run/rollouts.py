"""What a run gives an objective that learns from completions of the model: who writes them, and numbered rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from burnish.checkpoint.checkpoint import output_folder
from burnish.data.rows.numbered import NumberedRows
from burnish.loop.protocols import Engine
from burnish.losses.base import StageObjective
from burnish.models.load import context_length
from burnish.rollouts.completions import SEATS_CPU, SEATS_GPU, SlotSource
from burnish.rollouts.journal import CompletionsCallback, RolloutNotesCallback
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.rewards.functions import RewardFunction
from burnish.rollouts.rewards.models import RewardServer, reward_model_of
from burnish.run.plan.options import RunOptions
from burnish.run.prepare import Prepared

_LONGEST = 1 << 20


def begin_completions(objective: StageObjective, model: Any, engine: Engine, options: RunOptions) -> None:
    """Give the objective its source of completions: the model that trains, unless it has one."""
    if not isinstance(objective, RolloutObjective) or objective.source is not None:
        return
    if options.reward_model is not None:
        objective.functions.append(reward_model_function(options, engine))
    objective.source = SlotSource(
        model, seats_of(objective, options, engine.device.type), context_length(model.config) or _LONGEST,
        engine.precision, options.infer_exact,
    )  # fmt: skip


def rollout_callbacks(objective: StageObjective, options: RunOptions) -> list[Any]:
    """Callbacks of a run that learns from completions: their file, their table, and notes."""
    if not isinstance(objective, RolloutObjective):
        return []
    seen = CompletionsCallback(options, output_folder(options) if options.log_completions else None)
    objective.on_generation = seen.add
    return [*([seen] if options.log_completions else []), RolloutNotesCallback(options)]


def seats_of(objective: RolloutObjective, options: RunOptions, device: str) -> int:
    """Completions side by side: as the options say, else those of a generation up to a limit."""
    of_a_generation = objective.rows_per_rank * options.num_generations
    return options.kept_seats or min(SEATS_CPU if device == "cpu" else SEATS_GPU, of_a_generation)


def reward_model_function(options: RunOptions, engine: Engine) -> RewardFunction:
    """The reward model of a run, as one more reward function behind the others."""
    name, weights, place = options.reward_model or "", options.reward_weights, len(options.reward_funcs or [])
    call: Any = RewardServer(name)
    if options.reward_model_type != "api":
        bits = options.reward_model_quantization_bit
        call = reward_model_of(name, options.reward_model_adapters or (), bits).to(engine.device)
    return RewardFunction(call.__name__, call, 1.0 if weights is None else weights[place], name)


def with_numbers(prepared: Prepared) -> Prepared:
    """The rows with their numbers in the set, which random numbers depend on."""
    if not isinstance(prepared.objective, RolloutObjective):
        return prepared
    rows: Any = NumberedRows(prepared.rows)
    evals: Any = {name: NumberedRows(some) for name, some in prepared.eval_rows.items()}
    return replace(prepared, rows=rows, eval_rows=evals)
