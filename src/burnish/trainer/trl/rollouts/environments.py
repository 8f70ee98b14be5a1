"""Environments of completions: objects whose public methods are tools, and which may give a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from burnish.config.errors import UserError
from burnish.rollouts.rewards.functions import RewardFunction
from burnish.rollouts.user_functions import TimeLimitReached, call_function
from burnish.trainer.trl.rollouts.tool_functions import Tool, text_of
from burnish.trainer.trl.vision import with_loaded_images


class Environments:
    """Environments of completions: one object for each, reused by later generations.

    Args:
        factories: a callable, or several by the name in the column ``environment`` of a record.
        tools: further functions that every completion may call.
    """

    def __init__(self, factories: Any, tools: Sequence[Tool]) -> None:
        self.is_named = isinstance(factories, Mapping)
        self.factories: dict[Any, Callable[[], Any]] = dict(factories) if self.is_named else {None: factories}
        if not self.factories:
            raise ValueError("`environment_factory` must have at least one entry. Received: an empty dictionary.")
        for factory in self.factories.values():
            if not callable(factory):
                raise TypeError(
                    "`environment_factory` must be a class or function that creates an environment, or a dictionary of "
                    f"them by name. Received: {factory!r:.100}, of type {type(factory).__name__}."
                )
        self.shared = list(tools)
        self.pools: dict[Any, list[Any]] = {name: [self._create(name)] for name in self.factories}
        self.of_completions: list[Any] = []

    def _create(self, name: Any) -> Any:
        environment = self.factories[name]()
        if not callable(getattr(environment, "reset", None)):
            raise ValueError(
                "Each environment instance returned by `environment_factory` must define a callable `reset`."
            )
        if inspect.iscoroutinefunction(environment.reset):
            raise ValueError(f"{type(environment).__name__}.reset must be a function without `async`.")
        return environment

    def tools_of(self, environment: Any) -> list[Tool]:
        """Return the functions that a completion in this environment may call: its public methods, and the common
        ones."""
        names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
        method_names = [n for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]
        return [*self.shared, *(getattr(environment, name) for name in method_names)]

    def every_tool(self) -> list[Tool]:
        """Return the functions of all environments, each name once."""
        by_name = {tool.__name__: tool for pool in self.pools.values() for tool in self.tools_of(pool[0])}
        return list(by_name.values())

    def rewards(self) -> list[RewardFunction]:
        """Return a reward function for each environment class with ``get_reward``."""
        kinds = dict.fromkeys(type(p[0]) for p in self.pools.values() if callable(getattr(p[0], "get_reward", None)))
        return [
            RewardFunction(kind.__name__, _reward_of(kind), 1.0, parameters=frozenset({"environments"}))
            for kind in kinds
        ]

    def reset(
        self, records: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> list[tuple[list[dict[str, Any]], list[Tool]]]:
        """Assign each record an environment, and start its episode.

        Returns:
            The prompt of each record, with the text of ``reset`` appended, and the functions that its completion may
            call.
        """
        used: dict[Any, int] = {}
        self.of_completions = []
        started = []
        for record in records:
            name = self._name_of(record)
            place = used[name] = used.get(name, -1) + 1
            if place == len(self.pools[name]):
                self.pools[name].append(self._create(name))
            environment = self.pools[name][place]
            self.of_completions.append(environment)
            observed = self._reset(environment, record, timeout_s)
            messages = [dict(message) for message in record["prompt"]]
            if observed is not None:
                messages[-1]["content"] = f"{messages[-1].get('content') or ''}{observed}"
            started.append((messages, self.tools_of(environment)))
        return started

    def check_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Raise UserError for a record without an environment of ``environment_factory``."""
        for record in records:
            self._name_of(record)

    def _name_of(self, record: Mapping[str, Any]) -> Any:
        name = record["columns"].get("environment") if self.is_named else None
        if name not in self.pools:
            received = "no column of this name" if name is None else repr(name)
            names = ", ".join(map(str, self.pools))
            what = f'the column "environment" must name an environment ({names}). Received: {received}.'
            raise UserError(what, where=record["place"], option="environment_factory")
        return name

    def _reset(self, environment: Any, record: Mapping[str, Any], timeout_s: float) -> str | None:
        """Start an episode. Returns text for the prompt."""
        name = f"{type(environment).__name__}.reset"
        columns = {
            key: value for key, value in record["columns"].items() if not (self.is_named and key == "environment")
        }
        columns = with_loaded_images(columns)
        try:
            observed = call_function(
                partial(environment.reset, **{"prompt": record["prompt"], **columns}), timeout_s, name
            )
        except KeyboardInterrupt:
            raise
        except TimeLimitReached:
            what = f"{name} has not returned for {timeout_s:g} s (reward_timeout_s)."
            remedy = "Give the function a time limit of its own, or raise reward_timeout_s."
            raise UserError(
                what, where=record["place"], remedy=remedy, option=("reward_timeout_s", "environment_factory")
            ) from None
        except BaseException as error:  # the script's code may raise anything
            what = f"{name} failed: {type(error).__name__}: {text_of(error)}"
            raise UserError(
                f"{what.removesuffix('.')}.", where=record["place"], option="environment_factory"
            ) from error
        if observed is not None and not isinstance(observed, str):
            what = (
                f"{name} must return a string or None. Received: {observed!r:.100}, of type {type(observed).__name__}."
            )
            raise UserError(what, where=record["place"], option="environment_factory")
        return observed


def _reward_of(kind: Any) -> Callable[..., Any]:
    """Return the reward of environments of a class, None for others."""
    if inspect.iscoroutinefunction(kind.get_reward):

        async def get_reward(environments: Sequence[Any]) -> list[Any]:
            return [await each.get_reward() if type(each) is kind else None for each in environments]

        return get_reward
    return lambda environments: [each.get_reward() if type(each) is kind else None for each in environments]
