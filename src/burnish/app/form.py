"""Every option of a run as a form shows it: for pages and editors, read from the declarations.

In: nothing. Out: ``{"groups": [...], "fields": [{"name", "group", "control", "default", ...}]}``, as JSON.
"""

from __future__ import annotations

from typing import Any, get_origin

from burnish.app.listing import component
from burnish.app.options import RunOptions
from burnish.core.conversion import members
from burnish.core.options import Spec, specs

_LONGEST_CHOICE = 60


def form() -> dict[str, Any]:
    """The fields in the order of their declaration, and the groups that they belong to."""
    fields = [field_of(spec) for spec in specs(RunOptions).values()]
    return {"groups": list(dict.fromkeys(field["group"] for field in fields)), "fields": fields}


def field_of(spec: Spec) -> dict[str, Any]:
    """One option as a field."""
    default = spec.default
    return {
        "name": spec.name,
        "group": component(spec.group),
        "type": spec.type_name,
        "control": control_of(spec),
        "default": default if isinstance(default, bool | int | float | str | list | dict) else None,
        "choices": [str(choice) for choice in spec.choices or []][:_LONGEST_CHOICE],
        "unit": spec.unit,
        "bounds": {name: bound for name, bound in spec.bounds.items() if bound is not None and abs(bound) < 1e300},
        "help": spec.help,
        "aliases": list(spec.aliases),
        "ignored": spec.ignored,
    }


def control_of(spec: Spec) -> str:
    """``switch``, ``choice``, ``number``, ``list`` or ``text``."""
    kinds = [get_origin(member) or member for member in members(spec.type) if member is not type(None)]
    if kinds == [bool]:
        return "switch"
    if spec.choices and list not in kinds and str not in [k for k in kinds if spec.raw_choices is None]:
        return "choice"
    if kinds and all(kind in (int, float) for kind in kinds):
        return "number"
    if list in kinds:
        return "list"
    return "text"
