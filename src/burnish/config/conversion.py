"""Convert a raw value from YAML, a flag or Python to the type that an annotation declares.

In: an annotation such as ``float | None`` or ``list[str]``, and a value: ``"1e-4"``, ``"[a, b]"``, ``3``. Out: the
value in that type. Raises ValueError with a clause to which the caller adds the option's name if no type of the
annotation accepts the value.
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from burnish.config.bounds import DEEPEST_NODE, MOST_NODES

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_NONE = {"none", "null", "~", ""}
_OCTAL = re.compile(r"[-+]?0[0-7]+")
_TYPE_NAMES = {
    float: "a number", int: "an integer", bool: "true or false", str: "text", list: "a list", dict: "a mapping",
}  # fmt: skip


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union. For any other annotation, the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for arg in get_args(annotation) for inner in members(arg))
    return (annotation,)


def type_in_words(annotation: Any) -> str:
    """The type for an error message: "a number", "true or false", "a list"."""
    names = [_TYPE_NAMES.get(get_origin(m) or m) for m in members(annotation) if m is not type(None)]
    return " or ".join(dict.fromkeys(n for n in names if n)) or "text"


def as_type(annotation: Any, raw: Any) -> Any:
    """Convert ``raw`` to the first type of the annotation that accepts it.

    Raises:
        ValueError: a clause that starts with what was expected.
    """
    types_allowed = members(annotation)
    is_choice = any(raw in get_args(member) for member in types_allowed if get_origin(member) is Literal)
    can_be_text = str in types_allowed or is_choice  # "none" may be one of the choices
    if raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE and not can_be_text):
        if type(None) in types_allowed:
            return None
        raise ValueError(f"must be {type_in_words(annotation)}. Received an empty value.")
    if type(None) in types_allowed and isinstance(raw, str) and raw.strip().lower() in {"none", "null", "~"}:
        return None
    for member in sorted((m for m in types_allowed if m is not type(None)), key=_specificity):
        try:
            return _convert_to_member(member, raw)
        except (DuplicateKeyError, AmbiguousNumberError):
            raise
        except ValueError:
            continue
    for member in types_allowed:
        if (clause := _wrong_element(member, raw)) is not None:
            raise ValueError(clause)
    how = ', as JSON: {"name": value}' if isinstance(raw, str) and raw.strip().startswith("{") else ""
    raise ValueError(f"must be {type_in_words(annotation)}{how}. Received: {raw!r}.")


_PLURAL_TYPE_NAMES = {float: "numbers", int: "integers", bool: "true or false", str: "text", dict: "mappings"}


def _wrong_element(annotation: Any, raw: Any) -> str | None:
    """Return a clause about the first element of a list with another type than ``list[...]`` declares, if any."""
    if get_origin(annotation) is not list or (inner := get_args(annotation)[0]) not in _PLURAL_TYPE_NAMES:
        return None
    try:
        values = _list(raw)
    except ValueError:
        return None
    for number, value in enumerate(values, 1):
        try:
            _convert_to_member(inner, value)
        except ValueError:
            place = f" as element {number}" if len(values) > 1 else ""
            return f"must be a list of {_PLURAL_TYPE_NAMES[inner]}. Received: {value!r}{place}."
    return None


def _convert_to_member(member: Any, raw: Any) -> Any:
    origin = get_origin(member) or member
    if origin is Literal:
        return _literal(member, raw)
    if origin is Any:
        return raw
    reader = _READERS.get(origin)
    if reader is None:
        if isinstance(origin, type) and isinstance(raw, origin):
            return raw
        raise ValueError
    value = reader(raw)
    inner = get_args(member)
    if origin is list and inner:
        return [_convert_to_member(inner[0], item) for item in value]
    return value


def _literal(member: Any, raw: Any) -> Any:
    for allowed in get_args(member):
        if raw == allowed or str(raw).lower() == str(allowed).lower():
            return allowed
    if isinstance(raw, str | bool | int):
        return raw  # convert() reports it with the list of choices
    raise ValueError


def _bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, int | str) and str(raw).strip().lower() in _TRUE | _FALSE:
        return str(raw).strip().lower() in _TRUE
    raise ValueError


def _int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    if isinstance(raw, float) and not raw.is_integer():
        raise ValueError
    _refuse_octal(raw)
    if isinstance(raw, str) and not raw.strip().lstrip("+-").replace("_", "").isdigit():
        number = float(raw)
        if not number.is_integer():
            raise ValueError
        return int(number)
    return int(raw)


def _refuse_octal(raw: Any) -> None:
    """Raise AmbiguousNumberError for text that is an octal number in YAML 1.1, and another decimal one in YAML 1.2."""
    digits = raw.strip().replace("_", "") if isinstance(raw, str) else ""
    if _OCTAL.fullmatch(digits) and int(digits, 8) != int(digits):
        readings = f"YAML 1.1 reads {raw} as {int(digits, 8)}, YAML 1.2 as {int(digits)}"
        raise AmbiguousNumberError(f"must be a number without leading zeros. Received: {raw!r} ({readings}).")


def _float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    _refuse_octal(raw)
    # YAML 1.1 reads 1e-5 as text, Python does not. YAML writes infinity as ".inf".
    try:
        number = float(raw.replace(".inf", "inf") if isinstance(raw, str) else raw)
    except OverflowError:  # an integer with more than 308 digits
        raise ValueError from None
    if number != number:
        raise ValueError
    return int(number) if isinstance(raw, int) else number


def _str(raw: Any) -> str:
    if isinstance(raw, str):
        raw.encode("utf-8")  # a ValueError for bytes on the command line that are not UTF-8
        if "\0" in raw:
            raise ValueError
    if isinstance(raw, str):
        # A shell expands "~", YAML does not.
        return os.path.expanduser(raw) if raw.startswith("~/") else raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError


def _list(raw: Any) -> list[Any]:
    if isinstance(raw, list | tuple):
        return list(raw)
    if isinstance(raw, str):
        if raw.strip().startswith("["):
            try:
                return list(_nested_json(raw))
            except json.JSONDecodeError:  # without quotes, as after a shell: [a, b]
                raw = raw.strip()[1:].removesuffix("]")
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return [raw]
    raise ValueError


def _dict(raw: Any) -> dict[str, Any]:
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, str) and raw.strip().startswith("{"):
        return dict(_nested_json(raw))
    raise ValueError


def _nested_json(text: str) -> Any:
    """Parse a list or an object. Raises DuplicateKeyError, also for too deep a nesting, and JSONDecodeError."""
    try:
        return json.loads(text, object_pairs_hook=object_without_duplicate_keys)
    except RecursionError:
        raise DuplicateKeyError("nests lists and mappings too deeply.") from None


def literal(text: str) -> bool | int | float | str:
    """Convert text to a boolean or a number if possible."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class AmbiguousNumberError(ValueError):
    """A number has several readings. The message is a clause."""


class DuplicateKeyError(ValueError):
    """A JSON or YAML object has a duplicate key. The message is a clause."""


def object_without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` for JSON written by a user: create the object. Raises DuplicateKeyError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        shown = json.dumps(found, ensure_ascii=False)
        raise DuplicateKeyError(
            f'has the duplicate key "{twice}". Received: {shown if len(shown) <= 100 else shown[:96] + " ..."}.'
        )
    return found


def yaml_without_duplicate_keys(text: str, loader: Any) -> Any:
    """Parse YAML written by a user with ``loader``, a class of PyYAML.

    Keys are compared by value: ``0x1`` and ``1`` are the same key, ``1`` and ``"1"`` are not. A key that ``<<`` merges
    in may be repeated, as the YAML specification allows.

    Raises:
        DuplicateKeyError: also for too deep a nesting, and for too many values.
        ValueError: if a scalar has the form of a number or a date, but is none. The message is a clause.
        yaml.YAMLError: if it is not YAML.
    """

    class Loader(loader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: str | None) -> Any:
            node = super().compose_mapping_node(anchor)
            first: dict[Any, Any] = {}
            for key, _ in node.value:
                if not isinstance(key.value, str) or key.value == "<<":
                    continue
                value = key.value if key.tag.endswith((":str", ":value")) else self.construct_object(key)
                if first.setdefault(value, key) is not key:
                    lines = " and ".join(f"line {one.start_mark.line + 1}" for one in (first[value], key))
                    raise DuplicateKeyError(f'has the duplicate key "{key.value}", in {lines}.')
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except ValueError as error:  # 0x_, 2001-99-99
                what = f'"{node.value}" in line {node.start_mark.line + 1} is not a valid number or date: {error}'
                raise ValueError(what) from error

    one = Loader(text)
    try:
        root = one.get_single_node()
        if num_nodes(root) > MOST_NODES:
            raise DuplicateKeyError(f"expands to more than {MOST_NODES:,} values through its aliases (*).")
        return None if root is None else one.construct_document(root)
    except RecursionError:
        raise DuplicateKeyError("nests lists and mappings too deeply.") from None


def num_nodes(root: Any) -> int:
    """Count the values of a tree of YAML nodes with expanded aliases. Raises RecursionError if it is too deep."""
    return 0 if root is None else _num_nodes(root, 0, {})


def _num_nodes(node: Any, depth: int, known: dict[int, int]) -> int:
    if depth > DEEPEST_NODE:
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = 1  # for an alias within its own anchor, which the loader refuses
        inside = node.value if isinstance(node.value, list) else []
        pairs = (item if isinstance(item, tuple) else (item,) for item in inside)
        known[id(node)] = 1 + sum(_num_nodes(part, depth + 1, known) for pair in pairs for part in pair)
    return known[id(node)]


_READERS: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str, list: _list, dict: _dict}


def _specificity(member: Any) -> int:
    """Sort key: types that accept the fewest values come first, so that "true" is a bool and "3" a number, not text."""
    order = [Literal, dict, bool, int, float, list, str]
    origin = get_origin(member) or member
    return order.index(origin) if origin in order else -1
