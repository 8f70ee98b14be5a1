"""Completions of a script's ``rollout_func``, and the checks of what it returns.

In: a function ``(prompts, trainer) -> {"prompt_ids": ..., "completion_ids": ..., "logprobs": ...}``. Out: completions.
Refuses, with the name of the key and the number of the completion: missing keys, another number of values than
prompts, lists without tokens, ids outside of the vocabulary, log-probabilities that are not finite, and masks other
than 0 and 1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from burnish.config.errors import UserError
from burnish.inference.types import NoiseKey
from burnish.rollouts.completions import Completion, CompletionLimits, CompletionSource
from burnish.utils.forks import end_forked_processes

_REQUIRED_KEYS = ("prompt_ids", "completion_ids", "logprobs")
_OF_TOKENS = ("logprobs", "env_mask")
"""Keys with a value per token of each completion; None if there are none."""


def check_rollout_func(function: Any) -> None:
    """Raise TypeError if a ``rollout_func`` cannot be called with the prompts and the trainer."""
    if not callable(function):
        raise TypeError(
            f"`rollout_func` must be a function (prompts, trainer) -> dict. Received: {function!r:.100}, of type "
            f"{type(function).__name__}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind([], None)
    except TypeError as error:
        raise TypeError(
            f"`rollout_func` must accept the prompts and the trainer as its two arguments. Received: a function with "
            f"the parameters {signature} ({error})."
        ) from None


class ScriptSource(CompletionSource):
    """Completions of a rollout function. Additional keys become columns for the reward functions; ``env_mask`` is 1 for
    tokens of the model.

    Args:
        vocab_size: number of token ids that the model has an embedding for.
    """

    def __init__(self, function: Callable[..., Mapping[str, Any]], trainer: Any, vocab_size: int) -> None:
        self.function, self.trainer, self.vocab_size = function, trainer, vocab_size
        self.records: Sequence[Mapping[str, Any]] = ()

    def set_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records = records

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        with end_forked_processes("rollout_func"):
            returned = self.function([record["prompt"] for record in self.records], self.trainer)
        output = checked_output(returned, len(prompts), self.vocab_size)
        columns = {name: values for name, values in output.items() if name not in (*_REQUIRED_KEYS, "env_mask")}
        masks, logps = output.get("env_mask"), output["logprobs"]
        return [
            Completion(
                ids, ids[-1] in limits.stop_ids, None if masks is None else masks[at],
                None if logps is None else logps[at], {name: values[at] for name, values in columns.items()},
                prompt=output["prompt_ids"][at],
            )
            for at, ids in enumerate(output["completion_ids"])
        ]  # fmt: skip

    def free(self) -> None:
        return None


def checked_output(returned: Any, count: int, vocab_size: int) -> dict[str, Any]:
    """Return the result of a rollout function with lists instead of tensors.

    Args:
        count: number of prompts.

    Raises:
        UserError: if a key is missing, or a value is not as described above.
    """
    if not isinstance(returned, Mapping):
        kind = "nothing" if returned is None else type(returned).__name__
        raise _error(f"must return a dictionary. Received: {kind}.")
    if missing := [name for name in _REQUIRED_KEYS if name not in returned]:
        raise _error(f"must return keys {', '.join(_REQUIRED_KEYS)}. Missing: {', '.join(missing)}.")
    if odd := [name for name in returned if not isinstance(name, str)]:
        raise _error(f"must return a dictionary whose keys are strings. Received: the key {odd[0]!r}.")
    output: dict[str, Any] = {}
    for name, values in returned.items():
        listed = _as_list(values)
        is_column = name not in (*_REQUIRED_KEYS, *_OF_TOKENS)
        if listed is None and values is None and name in _OF_TOKENS:
            output[name] = None
            continue
        if listed is None and not is_column:
            raise _error(f'must return a list for "{name}". Received: {_shorten(values)}.')
        output[name] = [values] * count if listed is None else listed  # one value for all completions, as in TRL
        if len(output[name]) != count:
            raise UserError(
                f'rollout_func returned {len(output[name])} values of "{name}" for {count} prompts.', remedy=_COUNT
            )
    for name in ("prompt_ids", "completion_ids"):
        output[name] = [_ids(name, number, ids, vocab_size) for number, ids in enumerate(output[name], 1)]
    for name in _OF_TOKENS:
        if output.get(name) is not None:
            pairs = zip(output["completion_ids"], output[name], strict=True)
            output[name] = [_checked_token_values(name, number, *pair) for number, pair in enumerate(pairs, 1)]
    return output


_COUNT = "Return one value for each prompt: a prompt is passed once for each of its completions."


def _error(what: str) -> UserError:
    return UserError(f"rollout_func {what}", option="rollout_func")


def _as_list(values: Any) -> list[Any] | None:
    """Return a list, tuple, tensor or array as a list; None for other values."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, list | tuple) else None


def _shorten(value: Any) -> str:
    return f"{value!r:.60}"


def _ids(name: str, number: int, values: Any, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt or completion."""
    ids, place = _as_list(values), f'"{name}" of completion {number}'
    if ids is None:
        raise _error(f"must return a list of token ids for {place}. Received: {_shorten(values)}.")
    if not ids:
        raise _error(f"must return at least one token id for {place}. Received: an empty list.")
    for token in ids:
        if isinstance(token, bool) or not _is_integer(token):
            raise _error(f"must return integers for {place}. Received: {_shorten(token)}.")
        if not 0 <= token < vocab_size:
            raise _error(f"must return token ids from 0 to {vocab_size - 1} for {place}. Received: {token}.")
    return [int(token) for token in ids]


def _is_integer(value: Any) -> bool:
    try:
        return bool(value == value.__index__())
    except (AttributeError, TypeError):
        return False


def _checked_token_values(name: str, number: int, ids: Sequence[int], values: Any) -> list[Any]:
    """Return the log-probabilities or the mask of a completion."""
    found, place = _as_list(values), f'"{name}" of completion {number}'
    if found is None:
        raise _error(f"must return a list for {place}. Received: {_shorten(values)}.")
    if len(found) != len(ids):
        what = f'rollout_func returned {len(found)} values of "{name}" for completion {number}, which has '
        raise UserError(f"{what}{len(ids)} tokens.", option="rollout_func")
    for value in found:
        if name == "env_mask" and value not in (0, 1):
            raise _error(f"must return 0 or 1 for each token in {place}. Received: {_shorten(value)}.")
        if name == "logprobs" and not _is_finite(value):
            remedy = 'Return "logprobs": None if they are not known.'
            what = f"rollout_func must return a finite number for each token in {place}. Received: {_shorten(value)}."
            raise UserError(what, remedy=remedy, option="rollout_func")
    return [int(value) for value in found] if name == "env_mask" else [float(value) for value in found]


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except TypeError:
        return False
