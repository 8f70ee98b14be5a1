"""Call the reward functions of a run on the completions of a generation batch.

Functions get prompts, completions, ids and columns with one value per completion. The result is a ``RewardTable``. A
wrong number of scores, an infinite score, an exception and a timeout are errors.
"""

# C completions, K reward functions

from __future__ import annotations

import inspect
import json
import math
import reprlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import burnish
from burnish.config.errors import UserError, first_line
from burnish.loop.state import RATES
from burnish.rollouts.rewards.functions import PASSED_BY_NAME, RewardFunction
from burnish.rollouts.user_functions import TimeLimitReached, call_function, run_coroutines

_SEARCH_S = 10.0
"""Seconds of the search for the completion on which a function fails."""
_SHOWN = 80
_PACKAGE = str(Path(burnish.__file__).parent)
_RESERVED_METRICS = frozenset(
    {
        "loss", "reward", "reward_std", "frac_reward_zero_std", "frac_groups_dropped", "kl", "kl_coef", "entropy",
        "entropy_coef", "policy_loss", "aux_loss", "cispo_clip_ratio", "vespo/phi_seq_mean", "grad_norm",
        "learning_rate", "epoch", "step", "step_time", "num_tokens", "sampling/logp_difference", "total_flos",
        "tools/call_frequency", "tools/failure_frequency", "waiting", "skipped_steps", "num_input_tokens_seen",
        *RATES,
    }
)  # fmt: skip
_RESERVED_PREFIXES = ("completions/", "clip_ratio/", "time/", "ppo/", "objective/", "pass@")
"""Names of values of the log, which ``log_metric`` must not replace, and how further ones begin."""


class RewardError(UserError):
    """Raised if the rewards of a generation batch cannot be computed, on all ranks."""


@dataclass
class RewardTable:
    """The rewards of a generation batch.

    Args:
        values: (C, K) float64, NaN if a function returned no score.
        names: names of the K functions.
        extra: column -> a value per completion, from ``log_extra``.
        metrics: name -> values, from ``log_metric``.
    """

    values: Tensor
    names: list[str]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Return values for the log: mean and standard deviation of the scores of each function, the number of missing
        ones, and the means of ``log_metric``."""
        found: dict[str, float] = {}
        for name, column in zip(self.names, self.values.unbind(1), strict=True):
            known = column[~column.isnan()]
            if len(known):
                found[f"rewards/{name}/mean"] = float(known.mean())
                found[f"rewards/{name}/std"] = float(known.std()) if len(known) > 1 else 0.0
            found[f"rewards/{name}/none"] = float(len(column) - len(known))
        return found | {name: sum(values) / len(values) for name, values in self.metrics.items() if values}


def compute_rewards(
    functions: Sequence[RewardFunction], prompts: Sequence[Any], completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]], *,
    places: Sequence[str] = (), texts: Sequence[str] = (), timeout_s: float = 120.0, step: int = 0,
    extra_arguments: Mapping[str, Any] | None = None,
) -> RewardTable:  # fmt: skip
    """Call every function once on the C completions.

    Args:
        prompts, completions: texts, or lists of messages; completions of a prompt are adjacent.
        completion_ids: ids of each completion, including its end token.
        columns: other columns of the records, repeated for each completion.
        places: name of the record of each completion in error messages: ``record 12``.
        texts: prompt and completion of each completion as one text, if a function reads texts.
        timeout_s: time limit of each function.
        step: step that the completions are for, in messages.
        extra_arguments: further arguments: ``trainer_state``, ``environments``.

    Raises:
        UserError: if a function fails or its result is invalid, with the name and the location of the function.
    """
    table = RewardTable(torch.full((len(completions), len(functions)), torch.nan, dtype=torch.float64),
                        [function.name for function in functions])  # fmt: skip
    arguments = {
        **{name: values for name, values in columns.items() if name not in PASSED_BY_NAME},
        "prompts": list(prompts), "completions": list(completions), "completion_ids": [list(c) for c in completion_ids],
        **(extra_arguments or {}),
        **_log_functions(table, len(completions)),
    }  # fmt: skip
    job = _RewardCall(
        arguments, list(places) or [f"completion {at + 1}" for at in range(len(completions))], timeout_s, step, texts
    )
    waiting = {}
    for at, function in enumerate(functions):
        if function.is_async:
            waiting[at] = function
        else:
            table.values[:, at] = job.as_tensor(function, job.call(function))
    for (at, function), scores in zip(waiting.items(), job.run_coroutines(list(waiting.values())), strict=True):
        table.values[:, at] = job.as_tensor(function, scores)
    return table


def _log_functions(table: RewardTable, num_completions: int) -> dict[str, Callable[..., Any]]:
    """Return ``log_extra``, and ``log_metric`` as a function of the reward function that calls it."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != num_completions:
            raise ValueError(f'log_extra("{column}") received {len(values)} values for {num_completions} completions.')
        table.extra[column] = [_as_json(value) for value in values]

    def log_metric_of(function: RewardFunction) -> Callable[[str, float], None]:
        def log_metric(name: str, value: float) -> None:
            if _is_reserved(name, table.names):
                what = (
                    f'{_shown_name(function)} called log_metric("{name}", ...), but a metric with this name is '
                    "already logged."
                )
                raise UserError(what, remedy="Choose a different name.", option="reward_funcs")
            table.metrics.setdefault(name, []).append(float(value))

        return log_metric

    return {"log_extra": log_extra, "log_metric": log_metric_of}


@dataclass
class _RewardCall:
    arguments: dict[str, Any]
    places: list[str]
    timeout_s: float
    step: int
    texts: Sequence[str] = ()

    def call(self, function: RewardFunction) -> Any:
        def scores() -> Any:
            found = function.call(**self._arguments_of(function))
            return list(found) if isinstance(found, Iterator) else found

        try:
            return call_function(scores, self.timeout_s, _shown_name(function))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code may raise anything, such as CancelledError
            raise self._error(function, error) from error

    def run_coroutines(self, functions: Sequence[RewardFunction]) -> list[Any]:
        """Return the results of the coroutines, in order."""
        calls = [partial(function.call, **self._arguments_of(function)) for function in functions]
        results = run_coroutines(calls, [_shown_name(function) for function in functions], self.timeout_s)
        for function, result in zip(functions, results, strict=True):
            if isinstance(result, BaseException):
                raise self._error(function, result) from result
        return results

    def _error(self, function: RewardFunction, error: BaseException) -> UserError:
        if isinstance(error, UserError):
            return error
        return (
            self._timeout_error(function) if isinstance(error, TimeLimitReached) else self._call_error(function, error)
        )

    def as_tensor(self, function: RewardFunction, scores: Any) -> Tensor:
        """Convert the result of a function to (C,) float64."""
        name, expected = _shown_name(function), len(self.places)
        if isinstance(scores, Tensor):
            scores = scores.to_dense() if scores.layout is not torch.strided else scores
        is_readable = not (isinstance(scores, Tensor) and scores.is_meta)
        values = scores.tolist() if is_readable and hasattr(scores, "dtype") else scores
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            kind = "nothing" if values is None else type(values).__name__
            what = f"{name} must return a list with one reward for each completion. Received: {kind}."
            remedy = "Declare the function with async def." if inspect.isawaitable(values) else ""
            if callable(values):
                remedy = (
                    f"If {name} creates the reward function, write {{{name}: {{}}}} in YAML, or pass what it returns."
                )
            if inspect.iscoroutine(values):
                values.close()
            raise UserError(what, remedy=remedy, option="reward_funcs")
        if len(values) != expected:
            many = f"{len(values)} reward{'' if len(values) == 1 else 's'}"
            raise UserError(f"{name} returned {many} for {expected} completions.", option="reward_funcs")
        return torch.tensor([self._number(name, at, v) for at, v in enumerate(values)], dtype=torch.float64)

    def _number(self, name: str, at: int, value: Any) -> float:
        if value is None:
            return math.nan
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
            what = f"{name} returned {reprlib.repr(value)} for {self.places[at]}; a reward must be a number or None."
            raise UserError(what, option="reward_funcs") from None
        if abs(number) > torch.finfo(torch.float32).max:  # advantages are computed in float32
            what = f"{name} returned {number} for {self.places[at]}; use None for a completion without a score."
            raise UserError(what, option="reward_funcs")
        return number

    def _arguments_of(self, function: RewardFunction) -> dict[str, Any]:
        """Return a copy of the arguments of a function, so that changes do not affect other functions or the log. A
        column does not replace an argument that is fixed in ``reward_funcs``."""
        if function.reads_texts:
            return {"texts": list(self.texts)}
        known, fixed = function.parameters, function.fixed
        arguments = {**self.arguments, "log_metric": self.arguments["log_metric"](function)}
        return {
            name: _copy_value(value)
            for name, value in arguments.items()
            if name not in fixed and (known is None or name in known)
        }

    def _call_error(self, function: RewardFunction, error: BaseException) -> UserError:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
        at = f", line {own[-1].lineno}" if own else ""
        message = first_line(error)
        kind = type(error).__name__
        text = kind if message == kind else f"{kind}: {message}"
        where = self._failing_completion(function)
        what = f"{_shown_name(function)}{at}: {text.removesuffix('.')}.{where} Stopped at step {self.step}."
        return UserError(what, remedy="Return None for a completion that cannot be scored.", option="reward_funcs")

    def _failing_completion(self, function: RewardFunction) -> str:
        """Return `` Record 12, completion "...".``: the first completion on which the function fails alone, if one is
        found in time."""
        if function.is_async or inspect.isgeneratorfunction(function.call):
            return ""
        deadline = time.monotonic() + min(_SEARCH_S, self.timeout_s)
        arguments, count = self._arguments_of(function), len(self.places)
        for at in range(count):
            if time.monotonic() > deadline:
                break
            one = {n: [v[at]] if isinstance(v, list) and len(v) == count else v for n, v in arguments.items()}
            one |= dict.fromkeys(one.keys() & {"log_extra", "log_metric"}, _do_nothing)
            try:
                call_function(
                    partial(function.call, **one), max(0.1, deadline - time.monotonic()), _shown_name(function)
                )
            except TimeLimitReached:
                break
            except KeyboardInterrupt:
                raise
            except BaseException:  # the failure that is searched for
                completion = _shown_completion(self.arguments["completions"][at])
                cut = completion if len(completion) <= _SHOWN else completion[:_SHOWN] + " ..."
                place = self.places[at]
                return f' {place[:1].upper()}{place[1:]}, completion "{cut}".'
        return ""

    def _timeout_error(self, function: RewardFunction) -> UserError:
        what = (
            f"{_shown_name(function)} has not returned for {self.timeout_s:g} s (reward_timeout_s), on "
            f"{len(self.places)} completions of step {self.step}."
        )
        remedy = "Give the function a time limit of its own, or raise reward_timeout_s."
        return UserError(what, remedy=remedy, option=("reward_timeout_s", "reward_funcs"))


def _is_reserved(name: str, functions: Sequence[str]) -> bool:
    """Whether the log of a run, or its evaluation, has a value of its own under this name."""
    of_functions = {f"rewards/{function}/{kind}" for function in functions for kind in ("mean", "std", "none")}
    return name in _RESERVED_METRICS | of_functions or name.startswith(_RESERVED_PREFIXES)


def _copy_value(value: Any) -> Any:
    """Copy lists and dicts at any depth; everything else is kept."""
    if type(value) is list:
        return [_copy_value(each) for each in value]
    return {key: _copy_value(each) for key, each in value.items()} if type(value) is dict else value


def _as_json(value: Any) -> Any:
    """Convert a value of ``log_extra`` to JSON data."""
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, circular references, NaN
        return reprlib.repr(value)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _shown_completion(completion: Any) -> str:
    """Return a completion as text; of a single message its content."""
    is_message = isinstance(completion, list) and len(completion) == 1
    return str(completion[0].get("content") if is_message else completion)


def _do_nothing(*_: Any) -> None:
    return None


def _shown_name(function: RewardFunction) -> str:
    file = function.place.partition(",")[0]
    return f"{file}:{function.name}" if file.endswith(".py") else function.name
