"""Options -> Plan: everything that can be decided, and refused, before data or weights are read.

In: values with their places (``config.py``). Out: a ``Plan``: the flat options object that every component receives,
the place where each value was set, and notes for the user. Nothing writes to the options afterwards.

Refuses, all at once: unknown names, wrong types and ranges, options that burnish does not have, and whatever the
components' own checks find. A component's check is a function ``check_<topic>(options) -> list[Problem]`` in the module
that declares its options, its notes are ``<topic>_notes(options) -> list[str]``; both are found here by their names.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from burnish.app import checks
from burnish.app.absent import take_absent
from burnish.app.options import RunOptions
from burnish.core.errors import Problem, UserError
from burnish.core.options import Given, Spec, build, changed_options, convert, specs

Check = Callable[[Any], list[Problem]]


@dataclass(frozen=True)
class Plan:
    """The decided options of one run.

    Args:
        options: an instance of ``RunOptions``; read only.
        provenance: option -> the place where it was set; only those that were given.
        notes: sentences on options without effect, and on choices that were made.
        world_size: processes that share the run, as the launcher says.
    """

    options: RunOptions
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world_size: int = 1

    def where(self, name: str) -> str:
        """The place where an option was set; "" where it is at its default."""
        return self.provenance.get(name, "")

    def changed(self) -> Iterator[tuple[Spec, Any, str]]:
        """Yield the options that are not at their default: declaration, value, place."""
        declared = specs(RunOptions)
        return (
            (declared[name], value, self.provenance.get(name, ""))
            for name, value in changed_options(self.options).items()
        )


def plan(given: Mapping[str, Given], also: Sequence[Check] = ()) -> Plan:
    """Decide a run.

    Args:
        also: further checks, such as those of files, which complete the list of problems. They run only where the
            options have a problem; otherwise ``prepare`` does these checks.
    Raises:
        UserError: with every problem that the options alone can show.
    """
    present, problems, foreign = take_absent(given, {**specs(RunOptions), **aliases()})
    options, wrong = build(RunOptions, present)
    provenance = provenance_of(present)
    doubtful = _doubtful(present)

    def asked(checks: Sequence[Check]) -> list[Problem]:
        found = (problem for check in checks for problem in check(options))
        return [_placed(problem, provenance) for problem in found if doubtful.isdisjoint(_options_named(problem))]

    problems += [*wrong, *asked(component_checks())]
    if problems:
        raise UserError(dict.fromkeys([*problems, *asked(also)]))
    return Plan(
        options=options,
        provenance=MappingProxyType(provenance),
        notes=(*foreign, *_notes(present, options)),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )


@cache
def aliases() -> dict[str, str]:
    """Other name -> name of an option."""
    return {alias: spec.name for spec in specs(RunOptions).values() for alias in spec.aliases}


def provenance_of(given: Mapping[str, Given]) -> dict[str, str]:
    """Option -> the place where it was set."""
    return {aliases().get(key, key): item.where for key, item in given.items()}


@contextmanager
def placing(provenance: Mapping[str, str]) -> Iterator[None]:
    """Add file and line of the option to problems without a place that are raised in the ``with`` block."""
    try:
        yield
    except UserError as error:
        raise UserError(_placed(problem, provenance) for problem in error.problems) from error


@cache
def component_checks() -> tuple[Check, ...]:
    """Find every ``check_<topic>(options)`` of ``checks.py`` and of the modules that declare options."""
    return tuple(_functions_of_options(lambda name: name.startswith("check_")))


@cache
def component_notes() -> tuple[Callable[[Any], list[str]], ...]:
    """Find every ``<topic>_notes(options)`` of those modules: notes on options without effect, and on choices."""
    return tuple(_functions_of_options(lambda name: name.endswith("_notes") and name[0] != "_"))


def _functions_of_options(is_wanted: Callable[[str], bool]) -> Iterator[Callable[[Any], Any]]:
    """Find the functions of one argument, ``options``, whose name is wanted, in the order of the groups."""
    declaring = (spec.group.__module__ for spec in specs(RunOptions).values())
    modules = dict.fromkeys([checks.__name__, *declaring])
    for module in modules:
        for name, function in vars(sys.modules[module]).items():
            is_own = inspect.isfunction(function) and function.__module__ == module
            if is_wanted(name) and is_own and list(inspect.signature(function).parameters) == ["options"]:
                yield function


def _doubtful(present: Mapping[str, Given]) -> set[str]:
    """Options that are at their default only because the given value could not be read, or was misspelled.

    A check that names one of them would report a consequence beside its cause.
    """
    known = specs(RunOptions)
    names: set[str] = set()
    for key, item in present.items():
        name = aliases().get(key, key)
        if name not in known:
            names.update(get_close_matches(name, known, n=1))
            continue
        try:
            convert(known[name], item.value)
        except ValueError:
            names.add(name)
    return names


def _options_named(problem: Problem) -> list[str]:
    """The options that a problem names, in their order. A name that is also an English word counts only in quotes."""
    words = re.findall(r'"(\w+)"|(\w+_\w+)', problem.what)
    return [quoted or plain for quoted, plain in words if (quoted or plain) in specs(RunOptions)]


def _placed(problem: Problem, provenance: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the place of the first option that it names, unless it has a place of its own."""
    if problem.where:
        return problem
    places = [provenance[name] for name in _options_named(problem) if name in provenance]
    return replace(problem, where=places[0]) if places else problem


def _notes(present: Mapping[str, Given], options: RunOptions) -> Iterator[str]:
    known = specs(RunOptions)
    for key, item in present.items():
        spec = known[aliases().get(key, key)]
        if key != spec.name:
            yield f'"{key}" ({item.where}) is another name of "{spec.name}".'
        if spec.ignored:
            yield f'"{key}" ({item.where}) has no effect: {spec.ignored}'
    yield from (note for notes in component_notes() for note in notes(options))
