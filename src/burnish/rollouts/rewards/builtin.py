"""The built-in reward functions: TRL 1.16's, with its names, arguments and results, and three of burnish.

A completion is text, or a list of messages that starts with the assistant's. The ids of a completion include its end
token. No function needs torch; math-verify is imported where it is used.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

from burnish.config.errors import MissingExtraError, Problem, UserError

EXTRA = "rewards"
Completion: TypeAlias = "str | list[dict[str, Any]]"
Scores: TypeAlias = "list[float | None]"
LogExtra: TypeAlias = "Callable[[str, list[Any]], None] | None"

_PARSE_S, _VERIFY_S = 10, 5


def text_of(completion: Completion) -> str:
    """Return the text of a completion: itself, or the content of its first message."""
    return completion if isinstance(completion, str) else str(completion[0].get("content") or "")


def _invalid(function: str, name: str, expected: str, value: Any) -> UserError:
    return UserError(f"{function}: {name} must be {expected}. Received: {value!r}.", option="reward_funcs")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(function: str, name: str, value: Any, least: int = 1) -> int:
    """Return an argument that must be an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _invalid(function, name, f"an integer of at least {least}", value)
    return value


# --- mathematics ------------------------------------------------------------------------------------------------------


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], log_extra: LogExtra = None, **kwargs: Any
) -> Scores:
    """Return 1 if the answer of a completion is mathematically equal to ``solution``, else 0; None if the solution
    cannot be parsed. Needs math-verify. The answer must be in LaTeX; a boxed one takes precedence."""
    return _compare_with_solutions([text_of(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra = None, **kwargs: Any,
) -> Scores:  # fmt: skip
    """Like ``accuracy_reward`` for the text after the last delimiter (default: ``</think>``); 0 without one."""
    return _compare_with_solutions(
        [_text_after(text_of(completion), reasoning_delimiters or ["</think>"]) for completion in completions],
        solution,
        log_extra,
    )


def _text_after(text: str, delimiters: Sequence[str]) -> str | None:
    found = next((delimiter for delimiter in delimiters if delimiter in text), None)
    return None if found is None else text.split(found)[-1]


def _compare_with_solutions(texts: Sequence[str | None], solutions: Sequence[str], log_extra: LogExtra) -> Scores:
    """Compare each text with its solution; None is an unfinished reasoning."""
    scores: Scores = []
    golds, answers = [], []
    for text, solution in zip(texts, solutions, strict=True):
        score, gold, answer = _verify(text, solution)
        scores.append(score)
        golds.append(gold)
        answers.append(answer)
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", answers)
    return scores


def _verify(text: str | None, solution: str) -> tuple[float | None, str, str]:
    """Return the score, and the parsed solution and text."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise MissingExtraError("math_verify", "accuracy_reward", EXTRA, option="reward_funcs") from None
    if text is None:
        return 0.0, "[incomplete reasoning]", "[incomplete reasoning]"
    # Its time limits use SIGALRM, which only the main thread can receive.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    gold = parse(solution, parsing_timeout=_PARSE_S if is_main else None)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    rules = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    limit = _PARSE_S if is_main else None
    answer = parse(text, extraction_config=[rules], extraction_mode="first_match", parsing_timeout=limit)
    score = float(verify(gold, answer, timeout_seconds=_VERIFY_S if is_main else None))
    return score, str(gold), str(answer) if answer else "[unparseable]"


class CosineScaledReward:
    """Correctness scaled by the length of the completion: short correct answers get more than long ones, and long wrong
    answers lose less than short ones.

    Args:
        max_len: length in tokens at which the cosine reaches its end.
        min_value_wrong, max_value_wrong: reward of a wrong answer of length 0, and of ``max_len``.
        min_value_correct, max_value_correct: reward of a correct answer of ``max_len``, and of length 0.

    Source: Yeo et al. 2025, appendix C.1, https://arxiv.org/abs/2502.03373
    """

    __name__ = "cosine_scaled_reward"

    def __init__(
        self, max_len: int, min_value_wrong: float = -1.0, max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5, max_value_correct: float = 1.0,
    ) -> None:  # fmt: skip
        self.max_len = _count(self.__name__, "max_len", max_len)
        values = {"min_value_wrong": min_value_wrong, "max_value_wrong": max_value_wrong,
                  "min_value_correct": min_value_correct, "max_value_correct": max_value_correct}  # fmt: skip
        for name, value in values.items():
            if not _is_number(value):
                raise _invalid(self.__name__, name, "a number", value)
        self.wrong, self.right = (max_value_wrong, min_value_wrong), (min_value_correct, max_value_correct)

    def __call__(
        self, completions: Sequence[Completion], solution: Sequence[str], completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> Scores:  # fmt: skip
        each = zip(accuracy_reward(completions, solution), completion_ids, strict=True)
        return [None if is_right is None else self._scale(bool(is_right), len(ids)) for is_right, ids in each]

    def _scale(self, is_right: bool, length: int) -> float:
        low, high = self.right if is_right else self.wrong
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * min(length / self.max_len, 1.0)))


# --- form and length --------------------------------------------------------------------------------------------------

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """Return 1 if a completion starts with its only ``<think>`` and has a ``</think>``, else 0."""
    return [float(_THINK.match(text_of(completion)) is not None) for completion in completions]


class RepetitionPenaltyReward:
    """The share of repeated n-grams in the ids of a completion, times a penalty; 0 for fewer than n ids.

    Source: Yeo et al. 2025, appendix C.2, https://arxiv.org/abs/2502.03373
    """

    __name__ = "repetition_penalty_reward"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if not _is_number(max_penalty) or max_penalty > 0:
            raise _invalid(self.__name__, "max_penalty", "a number of at most 0", max_penalty)
        self.ngram_size, self.max_penalty = _count(self.__name__, "ngram_size", ngram_size), max_penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[at : at + self.ngram_size]) for at in range(len(ids) - self.ngram_size + 1)]
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        return repeated * self.max_penalty if repeated else 0.0


class SoftOverlongPunishment:
    """0 up to L - C tokens, decreasing to -1 at L, and -1 above.

    Args:
        max_completion_len: L. soft_punish_cache: C.

    Source: Yu et al. 2025 (DAPO), eq. 13, https://arxiv.org/abs/2503.14476
    """

    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, max_completion_len: int, soft_punish_cache: int) -> None:
        name = "soft_overlong_punishment"
        self.longest = _count(name, "max_completion_len", max_completion_len)
        self.cache = _count(name, "soft_punish_cache", soft_punish_cache, least=0)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._length_penalty(len(ids)) for ids in completion_ids]

    def _length_penalty(self, length: int) -> float:
        over = length - (self.longest - self.cache)
        if over <= 0:
            return 0.0
        return -over / self.cache if length <= self.longest else -1.0


# --- burnish's own ----------------------------------------------------------------------------------------------------


def exact_match_reward(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> Scores:
    """Return 1 if a completion equals ``answer``, ignoring surrounding white space, else 0."""
    each = zip(completions, answer, strict=True)
    return [
        None if right is None else float(text_of(completion).strip() == str(right).strip())
        for completion, right in each
    ]


def contains_answer_reward(completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> Scores:
    """Return 1 if a completion contains ``answer``, else 0."""
    each = zip(completions, answer, strict=True)
    return [None if right is None else float(str(right).strip() in text_of(completion)) for completion, right in each]


class JsonSchemaReward:
    """1 if a completion is one JSON value with the type and the properties that a schema requires, else 0.

    Args:
        schema: a JSON schema, of which ``type``, ``required``, ``properties``, ``items`` and ``enum`` are checked.
    """

    __name__ = "json_schema_reward"

    def __init__(self, schema: dict[str, Any]) -> None:
        _check_schema(schema, "schema")
        self.schema = schema

    def __call__(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        return [float(self._holds(text_of(completion))) for completion in completions]

    def _holds(self, text: str) -> bool:
        try:
            return _matches_schema(json.loads(text, parse_constant=_refuse_constant), self.schema)
        except (ValueError, RecursionError):
            return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def _check_schema(schema: Any, place: str) -> None:
    """Raise UserError if a part of a JSON schema that is checked has another form than expected."""
    if not isinstance(schema, dict):
        raise _invalid("json_schema_reward", place, "a dictionary", schema)
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if not isinstance(kind, str) or kind not in _JSON_TYPES:
            raise _invalid("json_schema_reward", f"{place}.type", f"one of {', '.join(_JSON_TYPES)}", kind)
    for name, kind in (("enum", list), ("required", list), ("properties", dict)):
        if not isinstance(schema.get(name, kind()), kind):
            expected = "a list" if kind is list else "a dictionary"
            raise _invalid("json_schema_reward", f"{place}.{name}", expected, schema[name])
    for name, part in schema.get("properties", {}).items():
        _check_schema(part, f"{place}.properties.{name}")
    if "items" in schema:
        _check_schema(schema["items"], f"{place}.items")


def _matches_schema(value: Any, schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds or []
    is_flag = isinstance(value, bool)
    if names and not any(isinstance(value, _JSON_TYPES[n]) and (not is_flag or n == "boolean") for n in names):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(_matches_schema(item, schema.get("items", {})) for item in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    return set(schema.get("required", ())) <= value.keys() and all(
        _matches_schema(value[name], part) for name, part in properties.items() if name in value
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "exact_match_reward": exact_match_reward,
    "contains_answer_reward": contains_answer_reward,
}
"""Built-in functions that are called directly; configured arguments are fixed."""

FACTORIES: dict[str, Callable[..., Any]] = {
    "cosine_scaled_reward": CosineScaledReward,
    "repetition_penalty_reward": RepetitionPenaltyReward,
    "soft_overlong_punishment": SoftOverlongPunishment,
    "json_schema_reward": JsonSchemaReward,
}
"""Built-in functions that are created from their arguments."""
FACTORIES |= {f"get_{name}": factory for name, factory in FACTORIES.items()}


def missing_libraries(function: Any, name: str) -> list[Problem]:
    """Return a problem if a built-in reward function needs a library that is not installed.

    Args:
        function: a value of ``FUNCTIONS`` or ``FACTORIES``, or what a factory has created. Others need nothing.
        name: name of the function, for the message.
    """
    inner = function.func if isinstance(function, partial) else function
    is_mathematical = inner is accuracy_reward or inner is reasoning_accuracy_reward or inner is CosineScaledReward
    if not (is_mathematical or isinstance(inner, CosineScaledReward)) or find_spec("math_verify") is not None:
        return []
    return list(MissingExtraError("math_verify", name, EXTRA, option="reward_funcs").problems)
