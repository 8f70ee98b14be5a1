"""The plan of a run: everything that can be decided and checked before data or weights are read.

A ``Plan`` holds the flat options object that every component receives, the place where each value was set, and notes
for the user. The options are not modified afterwards.

All problems are reported at once: unknown names, wrong types and ranges, options that burnish does not support, and the
results of the components' checks (``@check`` and ``@notes`` of ``config/checks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from burnish.config.checks import CHECKS, NOTES, Check, Notes
from burnish.config.errors import Problem, UserError, rename_options
from burnish.config.options import OptionSpec, RawValue, build, changed_options, convert, raise_if, specs
from burnish.losses.base import OBJECTIVES
from burnish.parallel.process_counts import launcher_problems
from burnish.run.plan import checks as _cross_checks
from burnish.run.plan import output_dir as _output_dir_check
from burnish.run.plan.checks import trains
from burnish.run.plan.options import RunOptions
from burnish.run.plan.unsupported import take_unsupported
from burnish.utils.environment import launcher_number


@dataclass(frozen=True)
class Plan:
    """The options of one run, after all checks.

    Args:
        options: an instance of ``RunOptions``; read-only.
        provenance: option -> place where it was set, for options that were set.
        notes: messages about options without effect and about automatic choices.
        world_size: number of processes, from the launcher.
        command: the burnish command that made the plan.
        records_of: stage whose kind of records the datasets hold, if it is not that of the options; ANY_RECORDS for
            any kind. Responses to these records are generated; no loss is computed.
    """

    options: RunOptions
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world_size: int = 1
    command: str = "train"
    records_of: str = ""

    def where(self, name: str) -> str:
        """Return the place where an option was set, or "" if it has its default value."""
        return self.provenance.get(name, "")

    def non_default_options(self) -> Iterator[tuple[OptionSpec, Any, str]]:
        """Return the options that differ from their defaults: declaration, value, place."""
        declared = specs(RunOptions)
        return (
            (declared[name], value, self.provenance.get(name, ""))
            for name, value in changed_options(self.options).items()
        )


def plan(values: Mapping[str, RawValue], extra_checks: Sequence[Check] = ()) -> Plan:
    """Create the plan of a run.

    Args:
        values: option values with their places.
        extra_checks: further checks, such as those of files. They run only if the options have a problem, to complete
            the list; otherwise ``prepare`` does these checks.
    Raises:
        UserError: with every problem of the options.
    """
    raise_if(launcher_problems())
    present, problems, foreign = take_unsupported(values, {**specs(RunOptions), **aliases()})
    present = _with_variant_stage(present)
    present, names_used, twice = _rename_options(present)
    options, wrong = build(RunOptions, present)
    provenance = provenance_of(present)
    options = replace(options, **dependent_defaults(options, provenance))
    doubtful = _options_with_invalid_values(present)

    def run_checks(checks: Sequence[Check]) -> list[Problem]:
        found = (problem for check in checks for problem in check(options))
        return [_with_location(problem, provenance) for problem in found if doubtful.isdisjoint(problem.options)]

    problems += [*twice, *wrong, *run_checks(component_checks())]
    if problems:
        reported = (
            replace(
                problem,
                what=rename_options(problem.what, names_used),
                remedy=rename_options(problem.remedy, names_used),
            )
            for problem in [*problems, *run_checks(extra_checks)]
        )
        raise UserError(dict.fromkeys(reported))
    return Plan(
        options=options,
        provenance=MappingProxyType(provenance),
        notes=(*foreign, *(rename_options(note, names_used) for note in _notes(present, options))),
        world_size=launcher_number("WORLD_SIZE", 1),
    )


def _stage_of(values: Mapping[str, RawValue]) -> str | None:
    """Return the value of ``stage``; None if it is not set or unknown."""
    stage = str(values["stage"].value) if "stage" in values else ""
    return stage if stage in OBJECTIVES else None


def _with_variant_stage(values: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Replace the stage if an option selects a variant of it (``StageObjective.variants``): ``online`` with ``dpo``."""
    stage = _stage_of(values)
    for option, variant in OBJECTIVES[stage].variants.items() if stage is not None else ():
        if option in values and str(values[option].value).lower() == "true":
            return {**values, "stage": replace(values["stage"], value=variant)}
    return dict(values)


def _rename_options(values: Mapping[str, RawValue]) -> tuple[dict[str, RawValue], Mapping[str, str], list[Problem]]:
    """Replace names that have a stage-specific meaning (``StageObjective.option_names``).

    Returns the values, the names of these options in messages (those of the stage, unless the user set the other
    one), and a problem for each option that is set under both names.
    """
    stage = _stage_of(values)
    names = OBJECTIVES[stage].option_names if stage is not None else {}
    twice = [
        Problem(f'"{key}" and "{names[key]}" are names of the same option; set only one of them.', item.where)
        for key, item in values.items()
        if names.get(key) in values
    ]
    shown = {option: name for name, option in names.items() if option not in values}
    return {names.get(key, key): item for key, item in values.items()}, shown, twice


EVAL_STEPS = 500  # default interval of evaluations, independent of the default interval of logs


def dependent_defaults(options: RunOptions, names: Container[str]) -> dict[str, Any]:
    """Return defaults that depend on the stage and on the length of the run, for options that were not set."""
    defaults: dict[str, Any] = {}
    known = options.stage in OBJECTIVES
    objective = OBJECTIVES[options.stage] if known else None
    if objective is not None:
        defaults |= {name: value for name, value in objective.default_options(options).items() if name not in names}
    rates = objective.learning_rates if objective is not None else None
    if rates is not None and "learning_rate" not in names:
        defaults["learning_rate"] = rates[0] if options.finetuning_type in ("full", "freeze") else rates[1]
    if "logging_steps" not in names and trains(options):
        intervals: dict[str, Any] = {"logging_first_step": options.logging_strategy == "steps"}
        if options.eval_strategy == "steps":
            intervals["eval_steps"] = EVAL_STEPS
        defaults |= {name: value for name, value in intervals.items() if name not in names}
    return defaults


@cache
def aliases() -> dict[str, str]:
    """Return alias -> option name."""
    return {alias: spec.name for spec in specs(RunOptions).values() for alias in spec.aliases}


def provenance_of(values: Mapping[str, RawValue]) -> dict[str, str]:
    """Return option -> place where it was set."""
    return {aliases().get(key, key): item.where for key, item in values.items()}


@contextmanager
def locate_problems(provenance: Mapping[str, str]) -> Iterator[None]:
    """Add the place where an option was set to problems raised in the ``with`` block that have none."""
    try:
        yield
    except UserError as error:
        raise UserError(_with_location(problem, provenance) for problem in error.problems) from error


def component_checks() -> list[Check]:
    """Return all registered checks, in the order in which the options of their modules are declared."""
    return sorted(CHECKS, key=_declaration_order)


def component_notes() -> list[Notes]:
    """Return all registered functions that return notes, in the same order."""
    return sorted(NOTES, key=_declaration_order)


def _declaration_order(function: Callable[[Any], Any]) -> int:
    """Return the position of a function's module in declaration order, which does not depend on import order."""
    return _order_of_modules().get(function.__module__, len(_order_of_modules()))


@cache
def _order_of_modules() -> dict[str, int]:
    declaring = (spec.group.__module__ for spec in specs(RunOptions).values())
    modules = dict.fromkeys([_cross_checks.__name__, _output_dir_check.__name__, *declaring])
    return {module: place for place, module in enumerate(modules)}


def _options_with_invalid_values(present: Mapping[str, RawValue]) -> set[str]:
    """Return options that have their default value only because the given value or name was invalid.

    Checks that involve one of them are skipped, because they would report a consequence of that error.
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


def _with_location(problem: Problem, provenance: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the place of the first of its options that was set, unless it already has a place."""
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
