"""Options -> Plan: everything that can be decided, and refused, before data or weights are read.

In: values with their places (``config.py``). Out: a ``Plan``: the flat options object that every component receives,
who set each value, and what a person should be told. Nothing writes to the options afterwards.

Refuses, all at once: unknown names, wrong types and ranges, options that burnish does not have, and whatever the
components' own checks find. A component's check is a function ``check_<topic>(options) -> list[Problem]`` in the module
that declares its options, its remarks are ``<topic>_notes(options) -> list[str]``; both are found here by their names.
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

from burnish.adapters.base import ADAPTERS, FinetuningOptions
from burnish.app import checks
from burnish.app.absent import take_absent
from burnish.app.metrics import MetricOptions
from burnish.core.checkpoint import CheckpointOptions
from burnish.core.early_stopping import EarlyStoppingOptions
from burnish.core.errors import Problem, UserError
from burnish.core.events import FlowOptions
from burnish.core.loop import LoopOptions
from burnish.core.options import Given, Spec, build, changed, convert, option, specs, union
from burnish.core.schedule import CurveOptions, StepOptions
from burnish.data.batching import BatchingOptions
from burnish.data.options import DataOptions
from burnish.data.stream import StreamOptions
from burnish.data.templates import TemplateOptions
from burnish.data.truncate import EncodingOptions
from burnish.engine.options import EngineOptions
from burnish.models.export import ExportOptions
from burnish.models.generate import GenerationOptions
from burnish.models.liger import LigerOptions
from burnish.models.options import ModelOptions
from burnish.models.quantize import QuantizationOptions
from burnish.objectives.base import OBJECTIVES
from burnish.optim.builtin import OPTIMIZERS, OptimOptions
from burnish.report.options import ReportOptions
from burnish.report.profile import ProfileOptions
from burnish.report.trackers import TRACKERS

Check = Callable[[Any], list[Problem]]


@dataclass
class TaskOptions:
    """What the run does."""

    stage: str = option(
        "sft", "What is learned: answers to instructions (sft), or plain text (pt).", choices=OBJECTIVES.names
    )
    do_train: bool | None = option(
        None, "Train; where it is left out, a run trains unless it only evaluates (do_eval) or predicts (do_predict)."
    )
    do_eval: bool = option(False, "Evaluate, after training where the run trains.")
    do_predict: bool = option(False, "Predict on the evaluation set, after training where the run trains.")


GROUPS: tuple[type, ...] = (
    TaskOptions,
    ModelOptions,
    LigerOptions,
    QuantizationOptions,
    FinetuningOptions,
    DataOptions,
    TemplateOptions,
    EncodingOptions,
    BatchingOptions,
    StreamOptions,
    StepOptions,
    CurveOptions,
    OptimOptions,
    LoopOptions,
    FlowOptions,
    EarlyStoppingOptions,
    CheckpointOptions,
    GenerationOptions,
    MetricOptions,
    ExportOptions,
    ReportOptions,
    ProfileOptions,
    EngineOptions,
)
"""What every run reads, in the order in which ``burnish train --help`` lists it."""
MEMBER_GROUPS: tuple[type, ...] = (
    *ADAPTERS.option_groups(),
    *OBJECTIVES.option_groups(),
    *OPTIMIZERS.option_groups(),
    *TRACKERS.option_groups(),
)
"""What single members of a family read, plugins included."""
RunOptions: type = union("RunOptions", *GROUPS, *MEMBER_GROUPS, doc="Every option of a run, flat.")


@dataclass(frozen=True)
class Plan:
    """One run, decided.

    Args:
        options: an instance of ``RunOptions``; read only.
        provenance: option -> who set it; only those that were given.
        notes: what has no effect, and what was chosen where nothing was given.
        world_size: processes that share the run, as the launcher says.
    """

    options: Any
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world_size: int = 1

    def where(self, name: str) -> str:
        """Who set an option; "" where it is at its default."""
        return self.provenance.get(name, "")

    def changed(self) -> Iterator[tuple[Spec, Any, str]]:
        """The options that are not at their default: declaration, value, who set it."""
        declared = specs(RunOptions)
        return ((declared[name], value, self.provenance.get(name, "")) for name, value in changed(self.options).items())


def plan(given: Mapping[str, Given], also: Sequence[Check] = ()) -> Plan:
    """Decide a run.

    Args:
        also: further checks, such as those that look into files, for a list of problems that is whole: they are made
            where the options have a problem, since ``prepare`` makes them where they have none.
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
    """Option -> who set it."""
    return {aliases().get(key, key): item.where for key, item in given.items()}


@contextmanager
def placing(provenance: Mapping[str, str]) -> Iterator[None]:
    """What is refused meanwhile names file and line of the option that it speaks of, where it says no place."""
    try:
        yield
    except UserError as error:
        raise UserError(_placed(problem, provenance) for problem in error.problems) from error


@cache
def component_checks() -> tuple[Check, ...]:
    """Every ``check_<topic>(options)`` of ``checks.py`` and of the modules that declare options."""
    return tuple(_functions_of_options(lambda name: name.startswith("check_")))


@cache
def component_notes() -> tuple[Callable[[Any], list[str]], ...]:
    """Every ``<topic>_notes(options)`` of those modules: what has no effect, and what was chosen."""
    return tuple(_functions_of_options(lambda name: name.endswith("_notes")))


def _functions_of_options(is_wanted: Callable[[str], bool]) -> Iterator[Callable[[Any], Any]]:
    """The functions of one argument, ``options``, whose name is wanted, in the order of the groups."""
    declaring = (spec.group.__module__ for spec in specs(RunOptions).values())
    modules = dict.fromkeys([checks.__name__, *declaring])
    for module in modules:
        for name, function in vars(sys.modules[module]).items():
            is_own = inspect.isfunction(function) and function.__module__ == module
            if is_wanted(name) and is_own and list(inspect.signature(function).parameters) == ["options"]:
                yield function


def _doubtful(present: Mapping[str, Given]) -> set[str]:
    """Options that stand at their default only because what was given could not be read, or was misspelled.

    A check that speaks of one of them would report a consequence beside its cause.
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
    """The options that a problem speaks of, in the order in which it does. A name that is an English word too counts
    only where it is quoted."""
    words = re.findall(r'"(\w+)"|(\w+_\w+)', problem.what)
    return [quoted or plain for quoted, plain in words if (quoted or plain) in specs(RunOptions)]


def _placed(problem: Problem, provenance: Mapping[str, str]) -> Problem:
    """``problem`` with the place of the first option it speaks of, where it has no place of its own."""
    if problem.where:
        return problem
    places = [provenance[name] for name in _options_named(problem) if name in provenance]
    return replace(problem, where=places[0]) if places else problem


def _notes(present: Mapping[str, Given], options: Any) -> Iterator[str]:
    known = specs(RunOptions)
    for key, item in present.items():
        spec = known[aliases().get(key, key)]
        if key != spec.name:
            yield f'"{key}" ({item.where}) is another name of "{spec.name}".'
        if spec.ignored:
            yield f'"{key}" ({item.where}) has no effect: {spec.ignored}'
    yield from (note for notes in component_notes() for note in notes(options))
