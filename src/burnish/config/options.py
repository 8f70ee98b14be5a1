"""Options: a dataclass field with help, choices, unit, bounds and aliases; groups of them; their union.

Each component declares a small dataclass of options next to its code:

    @dataclass
    class ClipOptions:
        max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.", ge=0)

The flat class of all options inherits from these groups, so every component receives the same object. Flags, YAML keys,
validation, the web form, the tables of the documentation and ``explain`` are derived from the declaration. This module
reads no files; ``run/plan`` does, and passes each value with its location.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from burnish.config.conversion import as_type, members, type_in_words
from burnish.config.errors import OptionText, Problem, UserError, did_you_mean
from burnish.config.extensions import packages_of
from burnish.config.secrets import has_secret_name, keep_secret

OptionsT = TypeVar("OptionsT")


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    refused: Callable[[], Iterable[Any]] = tuple,
    unit: str = "",
    aliases: Iterable[str] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    ignored: str = "",
    is_secret: bool = False,
    names_place: bool = False,
    risky: str = "",
    harmless: Iterable[Any] = (),
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: the default; lists and dicts are copied per instance.
        help: one sentence for a user who has not read the code.
        choices: the allowed values, or a function that lists them (a registry's names).
        refused: lists values known from other tools that are accepted here without being offered, so that a check can
            explain why they are not supported.
        unit: "steps", "tokens", "s", "bytes", ... if it is not obvious.
        aliases: older or foreign names of the same option; a note is printed when one is used.
        ge, gt, le, lt: bounds of a number.
        ignored: why the option is accepted but has no effect; printed when it is set.
        is_secret: the value is never shown or written (``config/secrets.py``).
        names_place: a text in the value may be the path of a file or folder.
        risky: why a visitor of the web page may not set the option: it runs code, starts programs, or sends data to
            other machines.
        harmless: values of a risky option that a visitor may set. Its default and empty values are always allowed.
    """
    metadata = {
        "help": help, "choices": choices, "refused": refused, "unit": unit, "aliases": tuple(aliases),
        "bounds": {"ge": ge, "gt": gt, "le": le, "lt": lt}, "ignored": ignored, "is_secret": is_secret,
        "names_place": names_place, "risky": risky, "harmless": tuple(harmless),
    }  # fmt: skip
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not is_secret)


def shared_options(fields: type[OptionsT]) -> type[OptionsT]:
    """Decorator: the dataclass is no group of options; its options belong to each group that inherits from it."""
    _SHARED.add(fields)
    return fields


_SHARED: set[type] = set()


@dataclass(frozen=True)
class OptionSpec:
    """One option as declared."""

    name: str
    type: Any
    default: Any
    help: str
    unit: str
    aliases: tuple[str, ...]
    bounds: Mapping[str, float | None]
    ignored: str
    group: type  # the dataclass that declares it
    raw_choices: Any = None
    refused: Callable[[], Iterable[Any]] = tuple
    is_secret: bool = False
    names_place: bool = False
    risky: str = ""
    harmless: tuple[Any, ...] = ()

    @property
    def choices(self) -> list[Any] | None:
        if self.raw_choices is not None:
            return list(self.raw_choices() if callable(self.raw_choices) else self.raw_choices)
        literals = [arg for member in members(self.type) if get_origin(member) is Literal for arg in get_args(member)]
        return literals or None

    @property
    def type_name(self) -> str:
        """The type for an error message: "a number", "true or false", "a list"."""
        return type_in_words(self.type)


@dataclass(frozen=True)
class RawValue:
    """A value as given, and its location: ``run.yaml, line 12`` or ``the command line``."""

    value: Any
    where: str = ""


@cache
def specs(group: type) -> dict[str, OptionSpec]:
    """The options of a group or union by name, in order of declaration.

    A subclass that assigns another default (``learning_rate: float = 1e-6``) inherits help, bounds and the rest.
    """
    hints = get_type_hints(group)
    found = {}
    for f in dataclasses.fields(group):
        default = (
            f.default
            if f.default is not MISSING
            else (f.default_factory() if f.default_factory is not MISSING else None)
        )
        meta = f.metadata or _inherited_metadata(group, f.name)
        found[f.name] = OptionSpec(
            name=f.name,
            type=hints[f.name],
            default=default,
            help=meta.get("help", ""),
            unit=meta.get("unit", ""),
            aliases=tuple(meta.get("aliases") or ()),
            bounds=meta.get("bounds", {}),
            ignored=meta.get("ignored", ""),
            group=_declarer(group, f.name),
            raw_choices=meta.get("choices"),
            refused=meta.get("refused", tuple),
            is_secret=meta.get("is_secret", False),
            names_place=meta.get("names_place", False),
            risky=meta.get("risky", ""),
            harmless=meta.get("harmless", ()),
        )
    return found


def union(name: str, *groups: type, doc: str = "") -> type:
    """A flat dataclass of all options of ``groups``.

    Raises:
        UserError: if two groups declare the same name or alias.
    """
    owner: dict[str, type] = {}
    for group in groups:
        for word in (word for spec in specs(group).values() for word in (spec.name, *spec.aliases)):
            if word in owner:
                raise _declared_twice(word, owner[word], group)
            owner[word] = group
    made = type(
        name, tuple(reversed(groups)), {"__doc__": doc or f"Options of {', '.join(g.__name__ for g in groups)}."}
    )
    return dataclass(made)


def _declared_twice(word: str, *groups: type) -> UserError:
    by = " and by ".join(f"{group.__module__}.{group.__name__}" for group in groups)
    packages = " and ".join(packages_of(group.__module__ for group in groups))
    remedy = f"Update or uninstall {packages}." if packages else ""
    return UserError(f'Option "{word}" is declared by {by}; names must be unique.', where=packages, remedy=remedy)


def build(group: type[OptionsT], raw_values: Mapping[str, RawValue]) -> tuple[OptionsT, list[Problem]]:
    """Create an instance of ``group`` from raw values. Returns it, and all problems.

    For unknown names the most similar option is suggested; aliases are resolved; each value is converted to its
    declared type and checked against its choices and bounds. Invalid values are replaced by defaults.
    """
    kind: type = group
    known = specs(kind)
    by_alias = {alias: spec.name for spec in known.values() for alias in spec.aliases}
    values: dict[str, Any] = {}
    first_place: dict[str, tuple[str, str]] = {}
    problems: list[Problem] = []
    for key, item in raw_values.items():
        name = by_alias.get(key, key)
        if has_secret_name(key) or (name in known and known[name].is_secret):
            keep_secret(item.value)
        if name not in known:
            problems.append(_unknown(key, item, [*known, *by_alias]))
            continue
        if name in first_place:
            other, place = first_place[name]
            what = f'"{key}" and "{other}" are names of the same option; set only one of them.'
            problems.append(Problem(what, where=item.where or place, option=name))
            continue
        first_place[name] = (key, item.where)
        try:
            values[name] = convert(known[name], item.value)
        except ValueError as error:
            what = OptionText(f'"{{{name}}}" {{}}', error, names={name: key})
            problems.append(Problem(what, where=item.where, option=name))
    return group(**values), problems


def _unknown(key: str, item: RawValue, known: Sequence[str]) -> Problem:
    place = f" {'on' if item.where.endswith('line') else 'in'} {item.where}" if item.where else ""
    inside = [name for name in item.value if name in known] if isinstance(item.value, Mapping) else []
    if inside:
        remedy = f'Options are not nested: move "{inside[0]}" to the top level.'
        return Problem(f'Unknown option "{key}"{place}.', remedy=remedy, option=key)
    return Problem(f'Unknown option "{key}"{place}.{did_you_mean(key, known)}', option=key)


def convert(spec: OptionSpec, raw: Any) -> Any:
    """Convert ``raw`` (from YAML, a flag or Python) to the declared type.

    Raises:
        ValueError: a clause that starts with what was expected, to which the caller adds the option's name.
    """
    choices = spec.choices
    known = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices or ()]
    if known and isinstance(raw, Mapping | list) and str in members(spec.type) and not _allows_any_text(spec):
        raise ValueError(f"must be one of {', '.join(known)}. Received: {raw!r}.")
    value = as_type(spec.type, raw)
    if choices and value is not None:
        for item in value if isinstance(value, list) else [value]:
            if item not in [*choices, *spec.refused()] and not (isinstance(item, str) and _allows_any_text(spec)):
                raise ValueError(
                    f'must be one of {", ".join(known)}. Received: "{item}".{did_you_mean(str(item), known)}'
                )
    if isinstance(value, int | float) and not isinstance(value, bool):
        check_bounds(spec, value)
    if spec.names_place:
        for text in value if isinstance(value, list) else [value]:
            _check_path_length(text)
    return value


_MAX_NAME, _MAX_PATH = 255, 4095
"""Bytes of the name of a file, and of a path, on Linux and macOS."""


def _check_path_length(text: Any) -> None:
    """Raise ValueError if a path, or a name in it, is longer than file systems allow."""
    if not isinstance(text, str) or text.lstrip().startswith("{"):
        return
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > _MAX_NAME or len(os.fsencode(text)) > _MAX_PATH:
        raise ValueError(
            f"must be a path of at most {_MAX_PATH} bytes with names of at most {_MAX_NAME} bytes. "
            f'Received: "{text[:60]} ...".'
        )


def changed_options(options: Any) -> dict[str, Any]:
    """The options that differ from their default."""
    return {n: getattr(options, n) for n, s in specs(options.__class__).items() if getattr(options, n) != s.default}


def ineffective_option_notes(options: Any, switches: Mapping[str, str]) -> list[str]:
    """A sentence for each option that was set without effect, because the option that it depends on was not set.

    Args:
        options: the options of the run.
        switches: option -> the option that it depends on.
    """
    changed = changed_options(options)
    return [
        f'"{name}" has no effect without "{switch}".'
        for name, switch in switches.items()
        if name in changed and switch not in changed
    ]


def _allows_any_text(spec: OptionSpec) -> bool:
    # "str | Literal[...]": the choices are suggestions, any text is allowed.
    return str in members(spec.type) and spec.raw_choices is None


def check_bounds(spec: OptionSpec, value: float) -> None:
    """Check a number against the option's bounds. Raises ValueError with a clause if it is out of bounds."""
    limits = [(_BOUNDS[name], bound) for name, bound in spec.bounds.items() if bound is not None]
    if not all(holds(value, bound) for (holds, _), bound in limits):
        clauses = " and ".join(_bound_in_words(word, bound, spec.unit) for (_, word), bound in limits)
        raise ValueError(f"must be {clauses}. Received: {value}.")


def _bound_in_words(word: str, bound: float, unit: str) -> str:
    """Return a bound with its unit, such as ``at least 1 row`` or ``greater than 0``."""
    if not isfinite(bound):
        return "finite"
    if not bound:
        return f"{word} {bound}"
    return f"{word} {bound} {unit_after(bound, unit)}".rstrip()


def unit_after(number: float, unit: str) -> str:
    """Return the unit as it is written after ``number``: ``row`` after 1, ``rows`` after other numbers."""
    if number != 1 or len(unit) < 2:
        return unit
    return unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def _declarer(group: type, name: str) -> type:
    """The first group in the inheritance chain that has the field (subclasses may override its default)."""
    owners = (c for c in reversed(group.__mro__) if name in getattr(c, "__dataclass_fields__", {}))
    return next((c for c in owners if c not in _SHARED), group)


def _inherited_metadata(group: type, name: str) -> Mapping[str, Any]:
    """The metadata of the nearest base that declares the field with ``option``."""
    fields = (vars(c).get("__dataclass_fields__", {}).get(name) for c in group.__mro__[1:])
    return next((f.metadata for f in fields if f and "unit" in f.metadata), {})


def raise_if(problems: Iterable[Problem]) -> None:
    """Raise one UserError with all problems, if there are any."""
    found = list(problems)
    if found:
        raise UserError(found)
