"""Options -> Plan: everything that can be decided, and refused, before data or weights are read.

In: values with their places (``config.py``). Out: a ``Plan``: the flat options object that every component receives,
the place where each value was set, and notes for the user. Nothing writes to the options afterwards.

Refuses, all at once: unknown names, wrong types and ranges, options that burnish does not have, and whatever the
registered checks of the components find (``@check`` and ``@notes`` of ``config/checks.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from burnish.config.checks import CHECKS, NOTES, Check, Notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import OptionSpec, RawValue, build, changed_options, convert, raise_if, specs
from burnish.losses.base import OBJECTIVES
from burnish.parallel.process_counts import launcher_problems
from burnish.run.plan import checks as _cross_checks
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.unsupported import take_absent


@dataclass(frozen=True)
class Plan:
    """The decided options of one run.

    Args:
        options: an instance of ``RunOptions``; read only.
        provenance: option -> the place where it was set; only those that were given.
        notes: sentences on options without effect, and on choices that were made.
        world_size: processes that share the run, as the launcher says.
        command: the command of burnish that made the plan.
    """

    options: RunOptions
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world_size: int = 1
    command: str = "train"

    def where(self, name: str) -> str:
        """The place where an option was set; "" where it is at its default."""
        return self.provenance.get(name, "")

    def changed(self) -> Iterator[tuple[OptionSpec, Any, str]]:
        """Yield the options that are not at their default: declaration, value, place."""
        declared = specs(RunOptions)
        return (
            (declared[name], value, self.provenance.get(name, ""))
            for name, value in changed_options(self.options).items()
        )


def plan(given: Mapping[str, RawValue], also: Sequence[Check] = ()) -> Plan:
    """Decide a run.

    Args:
        also: further checks, such as those of files, which complete the list of problems. They run only where the
            options have a problem; otherwise ``prepare`` does these checks.
    Raises:
        UserError: with every problem that the options alone can show.
    """
    raise_if(launcher_problems())
    present, problems, foreign = take_absent(given, {**specs(RunOptions), **aliases()})
    present, words, twice = _renamed(present)
    options, wrong = build(RunOptions, present)
    provenance = provenance_of(present)
    options = replace(options, **dependent_defaults(options, provenance))
    doubtful = _doubtful(present)

    def asked(checks: Sequence[Check]) -> list[Problem]:
        found = (problem for check in checks for problem in check(options))
        return [_placed(problem, provenance) for problem in found if doubtful.isdisjoint(problem.options)]

    problems += [*twice, *wrong, *asked(component_checks())]
    if problems:
        said = (replace(problem, what=_in_words(problem.what, words)) for problem in [*problems, *asked(also)])
        raise UserError(dict.fromkeys(said))
    return Plan(
        options=options,
        provenance=MappingProxyType(provenance),
        notes=(*foreign, *(_in_words(note, words) for note in _notes(present, options))),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _renamed(given: Mapping[str, RawValue]) -> tuple[dict[str, RawValue], Mapping[str, str], list[Problem]]:
    """With the names of the options that the stage means by them (``StageObjective.option_names``); these names, and a
    problem for each option that is given under both."""
    stage = str(given["stage"].value) if "stage" in given else ""
    if stage not in OBJECTIVES:
        return dict(given), {}, []
    for option, variant in OBJECTIVES[stage].variants.items():
        if option in given and str(given[option].value).lower() == "true":
            given, stage = {**given, "stage": replace(given["stage"], value=variant)}, variant
    names = OBJECTIVES[stage].option_names
    twice = [
        Problem(f'"{key}" and "{names[key]}" are two names of one option; set only one of them.', item.where)
        for key, item in given.items()
        if names.get(key) in given
    ]
    return {names.get(key, key): item for key, item in given.items()}, names, twice


def _in_words(sentence: str, words: Mapping[str, str]) -> str:
    """A sentence with the words of a stage in place of the options that it means by them."""
    for word, option in words.items() if " are two names of " not in sentence else ():
        sentence = sentence.replace(f'"{option}"', f'"{word}"')
    return sentence


LOGS_PER_RUN = 50


def dependent_defaults(options: RunOptions, given: Container[str]) -> dict[str, Any]:
    """Defaults that depend on the stage and on the length of the run, for options that were not given."""
    found: dict[str, Any] = {}
    known = options.stage in OBJECTIVES
    objective = OBJECTIVES[options.stage] if known else None
    if objective is not None:
        found |= {name: value for name, value in objective.default_options(options).items() if name not in given}
    rates = objective.learning_rates if objective is not None else None
    if rates is not None and "learning_rate" not in given:
        found["learning_rate"] = rates[0] if options.finetuning_type in ("full", "freeze") else rates[1]
    if "logging_steps" not in given and trains(options):
        found["logging_steps"] = 1 / LOGS_PER_RUN
        if "logging_first_step" not in given:
            found["logging_first_step"] = True
        if "eval_steps" not in given:
            found["eval_steps"] = options.logging_steps
    return found


@cache
def aliases() -> dict[str, str]:
    """Other name -> name of an option."""
    return {alias: spec.name for spec in specs(RunOptions).values() for alias in spec.aliases}


def provenance_of(given: Mapping[str, RawValue]) -> dict[str, str]:
    """Option -> the place where it was set."""
    return {aliases().get(key, key): item.where for key, item in given.items()}


@contextmanager
def placing(provenance: Mapping[str, str]) -> Iterator[None]:
    """Add file and line of the option to problems without a place that are raised in the ``with`` block."""
    try:
        yield
    except UserError as error:
        raise UserError(_placed(problem, provenance) for problem in error.problems) from error


def component_checks() -> list[Check]:
    """Every registered check, in the order in which the modules' options are declared."""
    return sorted(CHECKS, key=_position)


def component_notes() -> list[Notes]:
    """Every registered function of notes, in the same order."""
    return sorted(NOTES, key=_position)


def _position(function: Callable[[Any], Any]) -> int:
    """The place of a function's module in the order of declaration, which does not depend on the order of imports."""
    return _order_of_modules().get(function.__module__, len(_order_of_modules()))


@cache
def _order_of_modules() -> dict[str, int]:
    declaring = (spec.group.__module__ for spec in specs(RunOptions).values())
    return {module: place for place, module in enumerate(dict.fromkeys([_cross_checks.__name__, *declaring]))}


def _doubtful(present: Mapping[str, RawValue]) -> set[str]:
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


def _placed(problem: Problem, provenance: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the place of the first of its options that was given, unless it has a place already."""
    if problem.where:
        return problem
    places = [provenance[name] for name in problem.options if name in provenance]
    return replace(problem, where=places[0]) if places else problem


def _notes(present: Mapping[str, RawValue], options: RunOptions) -> Iterator[str]:
    known = specs(RunOptions)
    for key, item in present.items():
        spec = known[aliases().get(key, key)]
        if key != spec.name:
            yield f'"{key}" ({item.where}) is an alias of "{spec.name}".'
        if spec.ignored:
            yield f'"{key}" ({item.where}) has no effect: {spec.ignored}'
    yield from (note for notes in component_notes() for note in notes(options))
