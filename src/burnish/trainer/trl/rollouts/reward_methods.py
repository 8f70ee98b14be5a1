"""Rewards of ``GRPOTrainer`` and ``RLOOTrainer``: the methods of TRL that a script may override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.data.images.family import Family
from burnish.rollouts.rewards.compute import RewardTable, compute_rewards
from burnish.rollouts.rewards.functions import RewardFunction, load_rewards, with_unique_names
from burnish.rollouts.rewards.models import RewardModel
from burnish.trainer.trl.rollouts.attributes import RolloutAttributes
from burnish.trainer.trl.rollouts.environments import Environments
from burnish.trainer.trl.rollouts.tools import ToolSource
from burnish.trainer.trl.vision import with_loaded_images


class RewardMethods(RolloutAttributes):
    """Base class that computes rewards with ``_calculate_rewards``, which a script may override."""

    environments: Environments | None
    family: Family | None
    reward_funcs: list[Any]
    _log_request: dict[str, Any]
    _logged_extra: dict[str, list[Any]]
    _logged_metrics: dict[str, list[float]]

    @property
    def reward_func_names(self) -> list[str]:
        """Names of the reward functions in the log."""
        return [function.name for function in self.objective.functions]

    @property
    def reward_weights(self) -> Tensor:
        """(K,) weights of the reward functions."""
        return torch.tensor([function.weight for function in self.objective.functions])

    def _functions(self) -> list[RewardFunction]:
        weights = self.objective.choices.reward_weights
        if weights is not None and len(weights) != len(self.reward_funcs):
            raise ValueError(
                f"The number of reward weights ({len(weights)}) must match the number of reward functions "
                f"({len(self.reward_funcs)})."
            )
        functions = load_rewards(self.reward_funcs, weights)
        functions += self.environments.rewards() if self.environments is not None else []
        if not functions:
            raise ValueError(
                "No reward source provided. Pass `reward_funcs`, or an `environment_factory` whose environment defines "
                "a `get_reward` method."
            )
        return with_unique_names(functions)

    def _compute_rewards(
        self, functions: Sequence[RewardFunction], prompts: Sequence[Any], completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]], **request: Any,
    ) -> RewardTable:  # fmt: skip
        """Return the rewards of this rank's completions, using the method that a script may override."""
        columns = with_loaded_images(columns)
        inputs = [
            {"prompt": prompt, **{name: values[at] for name, values in columns.items()}}
            for at, prompt in enumerate(prompts)
        ]
        self._log_request, self._logged_extra, self._logged_metrics = request, {}, {}
        values = self._calculate_rewards(
            inputs, list(prompts), list(completions), [list(ids) for ids in completion_ids]
        )
        values = torch.as_tensor(values, dtype=torch.float64).cpu()
        count, first = len(prompts), self._parallel.rank * len(prompts)
        values = values[first : first + count] if len(values) > count else values
        if values.shape != (count, len(functions)):
            expected = f"({count}, {len(functions)})"
            what = f"_calculate_rewards must return a tensor of shape {expected} (completions, reward functions)."
            raise UserError(f"{what} Received: {tuple(values.shape)}.")
        metrics = {**self._logged_metrics, **self._tool_metrics(count)}
        return RewardTable(values, self.reward_func_names, self._logged_extra, metrics)

    def _tool_metrics(self, count: int) -> dict[str, list[float]]:
        """Return calls per completion and failures per call. Args: count: number of completions."""
        source = self.objective.source
        if not isinstance(source, ToolSource):
            return {}
        failed = source.num_failures / source.num_calls if source.num_calls else 0.0
        return {"tools/call_frequency": [source.num_calls / max(count, 1)], "tools/failure_frequency": [failed]}

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """Return (C, K) float64 rewards of this rank's completions, NaN if a function does not apply. May be
        overridden.

        Args:
            inputs: record of each completion, with its prompt. prompts, completions: texts, or lists of messages.
            completion_ids_list: ids of each completion, including its end token.
        """
        for function in self.objective.functions:
            if isinstance(function.call, RewardModel):
                function.call.to(self._parallel.device)
        names = dict.fromkeys(name for record in inputs for name in record if name != "prompt")
        columns = {name: [record.get(name) for record in inputs] for name in names}
        more: dict[str, Any] = {"trainer_state": self.state}
        if self.environments is not None:
            more["environments"] = self.environments.of_completions
        table = compute_rewards(
            self.objective.functions, prompts, completions, completion_ids_list, columns, extra_arguments=more,
            **self._log_request,
        )  # fmt: skip
        self._logged_extra, self._logged_metrics = table.extra, table.metrics
        return table.values
