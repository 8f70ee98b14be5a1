"""Check which option values a user of the web UI may set, for everything that it plans or starts.

In: raw values, from the form, the queue or a run's ``run.yaml``, and the fields that the planner describes
(``field_of`` in ``serve/page/planner_process.py``), which carry the flags of each option's declaration. Values are
read as a run reads them, then checked: no risky option, no secret, no path outside the roots.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from burnish.config.conversion import as_type
from burnish.config.secrets import has_secret_name
from burnish.serve.http.errors import APIError
from burnish.serve.page.places import Roots

Field = Mapping[str, Any]
_TYPES: Mapping[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "list": list[str], "dict": dict[str, Any], "NoneType": None,
}  # fmt: skip


def check_values(
    values: Mapping[str, Any], fields: Iterable[Field], allow: Container[str], places: Roots, start: Path
) -> None:
    """Check that a visitor may set all of ``values``.

    Args:
        fields: one per option.
        allow: risky options that the owner of the page has allowed.
        start: the folder in which the command runs: relative paths begin there.
    Raises:
        APIError: 422, with the option.
    """
    known = {name: field for field in fields for name in (field["name"], *field["aliases"])}
    named: dict[str, list[str]] = {}
    for key, raw in values.items():
        field = known.get(key, {})
        name = field.get("name", key)
        if has_secret_name(name) and name not in allow:
            raise APIError(422, "not_allowed", f'"{name}" is a secret and cannot be set from the web UI.', param=name)
        if not (field.get("risky") or field.get("names_place")):
            continue
        value = _read(field, raw)
        if field["risky"] and name not in allow and not _is_harmless(value, field):
            message = (
                f'"{name}" cannot be set from the web UI: {field["risky"]}. To allow it: burnish webui web_allow={name}'
            )
            raise APIError(422, "not_allowed", message, param=name)
        if field["names_place"]:
            named.setdefault(name, []).extend(_texts(value))  # an alias may be set beside its option
    folders = [start, *(places.within(text, "dataset_dir", start) for text in named.get("dataset_dir", ()))]
    for name, texts in named.items():
        for text in texts:
            for folder in folders:
                places.within(text, name, folder)


def _read(field: Field, raw: Any) -> Any:
    try:
        return as_type(reduce(or_, (_TYPES[kind] for kind in field["kinds"])), raw)
    except ValueError as error:
        raise APIError(422, "invalid_value", f'"{field["name"]}" {error}', param=field["name"]) from error


def _is_harmless(value: Any, field: Field) -> bool:
    parts = value if isinstance(value, list) else [value]
    return value == field["default"] or all(part in (None, "", False, {}, *field["harmless"]) for part in parts)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return [value] if value else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (text for item in inside for text in _texts(item))
