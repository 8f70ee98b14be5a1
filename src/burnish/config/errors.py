"""Errors caused by the user's input: options, data, models, folders.

A ``Problem`` states where, what, why and a remedy, in at most four lines. A ``UserError`` holds all problems that were
found at once. The command line prints them without a traceback and exits with status 2. Errors of the machine (full
disk, memory) are ``RuntimeError`` and exit with 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from string import Formatter
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        what: expected and received, as one sentence that ends with a full stop.
        where: file and line, record number or option name; empty if ``what`` contains it.
        why: the consequence, if it is not obvious.
        remedy: what to do instead.
        option: name of the option that caused the problem, or several names, the most important first. Its location in
            the configuration is added to the message, and editors mark it.
        code: identifier for programs, such as an error code of the API.
    """

    what: str
    where: str = ""
    why: str = ""
    remedy: str = ""
    option: str | tuple[str, ...] = ()
    code: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The names in ``option``, as a tuple."""
        return (self.option,) if isinstance(self.option, str) else self.option

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        return "\n  ".join(part for part in (first, self.why, self.remedy) if part)


class OptionText(str):
    """A sentence that refers to options by name, so that it can be rendered with other names for them.

    >>> OptionText("{pref_beta} must be {}.", 1).rename({"pref_beta": "beta"})
    'beta must be 1.'

    Args:
        template: fields with a name are options, and ``{stage=kto}`` is an option with a value. Fields without a name
            are filled with ``values``.
    """

    template: str
    values: tuple[Any, ...]
    names: Mapping[str, str]

    def __new__(cls, template: str, *values: Any, names: Mapping[str, str] = MappingProxyType({})) -> OptionText:
        text = super().__new__(cls, Formatter().vformat(template, values, _OptionNames(names)))
        text.template, text.values, text.names = template, values, names
        return text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def rename(self, names: Mapping[str, str]) -> OptionText:
        return OptionText(self.template, *self.values, names={**self.names, **names})


class _OptionNames(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name.replace("=", ": ")


def rename_options(sentence: str, names: Mapping[str, str]) -> str:
    """``sentence`` with other names for its options: option -> name. A plain string is returned unchanged."""
    return sentence.rename(names) if isinstance(sentence, OptionText) else sentence


class UserError(ValueError):
    """Raised for errors in the user's input: options, data, models, folders. Holds all problems found.

    Args:
        problems: one problem or several, or the ``what`` of one, whose other fields are the other arguments.
    """

    def __init__(
        self,
        problems: Problem | str | Iterable[Problem],
        where: str = "",
        why: str = "",
        remedy: str = "",
        option: str | tuple[str, ...] = (),
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, where, why, remedy, option)
        self.problems: tuple[Problem, ...] = (
            (problems,) if isinstance(problems, Problem) else tuple(dict.fromkeys(problems))  # each one once
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


@cache
def source_folder() -> str | None:
    """The folder of the source code, if burnish was installed from there in editable mode (PEP 610)."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import, and needed for an error only

    try:
        origin = json.loads(distribution("burnish").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return unquote(urlsplit(origin["url"]).path) if is_editable else None


def install_command(extra: str) -> str:
    """The command that installs an extra, from the source code if burnish was installed from there."""
    folder = source_folder()
    return f'pip install "burnish[{extra}]"' if folder is None else f'pip install -e "{folder}[{extra}]"'


class MissingExtraError(UserError):
    """An optional library is not installed. Names the extra that installs it, or the library if there is none."""

    def __init__(self, library: str, needed_for: str, extra: str = "", option: str | tuple[str, ...] = ()) -> None:
        super().__init__(
            f"{needed_for} requires the library {library!r}, which is not installed.",
            remedy=f"Install it with: {install_command(extra) if extra else f'pip install {library}'}",
            option=option,
        )


class MissingMetricError(UserError, KeyError):
    """The metric that selects the best evaluation is not among the metrics of the evaluation."""

    __str__ = Exception.__str__  # KeyError's adds quotes


UNUSABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors that libraries raise for a file with unexpected contents. Catch these only where a user's file is passed to a
library."""


def is_unusable(error: BaseException) -> bool:
    """Whether ``error`` is one of those.

    The Rust library tokenizers raises a plain ``Exception``, and pyo3's ``PanicException``, which is a
    ``BaseException``.
    """
    return isinstance(error, UNUSABLE) or type(error) is Exception or type(error).__name__ == "PanicException"


class NotSavedError(RuntimeError):
    """Something could not be written or sent, and the user did not cause it. Holds the problem as a message."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite; the weights are those of the last finite step."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its causes, since a library may wrap, for example, a full disk in its own error."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        yield current
        chain.append(current)
        current = current.__cause__


def skipped_steps_message(num_steps: int, step: int) -> str:
    """The message about steps that were not applied, shared by all callers."""
    return (
        f"{num_steps} of the most recent optimizer steps (up to step {step}) "
        f"{'was' if num_steps == 1 else 'were'} skipped: the loss or the gradient was NaN or infinite. Lower "
        "learning_rate, or check the data."
    )


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of a library's error message, or the error's type if it has no message or raises an exception."""
    try:
        text = str(error)
    except Exception:  # the code of a user or a library
        text = ""
    return (next(iter(text.strip().splitlines()), "") or type(error).__name__)[:most]


def few(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c and 2 more``"""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def shape_in_words(shape: Iterable[int]) -> str:
    """A shape in words: ``320x32``."""
    return "x".join(map(str, shape)) or "a single number"


def argument_error_in_words(error: Exception) -> str:
    """A clause about arguments that a function does not accept, without Python's wording."""
    name = str(error).partition("() got an unexpected keyword argument ")[2]
    return (
        f"it has no argument {name}"
        if name
        else f"{error} is not a valid value"
        if isinstance(error, LookupError)
        else str(error)
    )


def did_you_mean(name: str, known: Iterable[str], limit: int = 1) -> str:
    """`` Did you mean "lora_rank"?``, or "" if no name is similar."""
    candidates = list(known)
    near = get_close_matches(name, candidates, n=limit, cutoff=0.6)
    # Names with different beginnings must be more similar: "loss_type" does not mean "apollo_scale_type".
    similar = get_close_matches(name, near, n=limit, cutoff=0.65)
    near = [one for one in near if one in similar or one[:1] == name.lstrip("-_[\"'")[:1]]
    return f" Did you mean {' or '.join(repr(n).replace(chr(39), chr(34)) for n in near)}?" if near else ""


_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator", "not enough memory", "out of memory", "Cannot allocate memory", "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch's error is recognized by its name to avoid importing torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    is_torch = "OutOfMemoryError" in names or (
        "RuntimeError" in names and any(t in str(error) for t in _OUT_OF_MEMORY_TEXTS)
    )
    return isinstance(error, MemoryError) or is_torch
