"""Read JSON files, which may be empty, truncated or corrupted, and write them.

In: a path. Out: its data. Refuses, with file, line and remedy: invalid JSON or UTF-8, excessive nesting, and data of
another type than the reader needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from burnish.config.conversion import DuplicateKeyError, object_without_duplicate_keys
from burnish.config.errors import UserError
from burnish.utils.files import open_regular_file, special_file_kind

DAMAGED_FILE_REMEDY = "Download the file again, or correct it."
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}


def read_json(path: Path, remedy: str = DAMAGED_FILE_REMEDY) -> Any:
    """The data of a JSON file.

    Raises:
        UserError: if it is not valid JSON, with line and column.
    """
    if kind := special_file_kind(path):
        raise UserError(f'"{path}" is {kind}, not a file.', remedy=remedy)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"{path}, line {error.lineno}, column {error.colno}"
        what = "the file is empty." if not path.stat().st_size else f"not valid JSON: {error.msg}."
        raise UserError(what, where=place if path.stat().st_size else str(path), remedy=remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text at byte {error.start}.", where=str(path), remedy=remedy) from None
    except RecursionError:
        what = "lists and objects are nested too deeply."
        raise UserError(what, where=str(path), remedy=remedy) from None
    except ValueError as error:  # a number with more digits than Python accepts
        raise UserError(f"not valid JSON: {error}.", where=str(path), remedy=remedy) from None


def read_object(
    path: Path, remedy: str = DAMAGED_FILE_REMEDY, needs: Iterable[tuple[str, type]] = ()
) -> dict[str, Any]:
    """The data of a JSON file with an object.

    Args:
        path: the file.
        remedy: what the user should do if it is invalid.
        needs: required keys, and the types of their values.
    """
    found = read_json(path, remedy)
    if not isinstance(found, dict):
        raise UserError(f"expected an object. Received: {json_in_words(found)}.", where=str(path), remedy=remedy)
    for key, kind in needs:
        if key not in found:
            raise UserError(f'"{key}" is missing.', where=str(path), remedy=remedy)
        if not isinstance(found[key], kind) or (kind is int and isinstance(found[key], bool)):
            what = f'"{key}" must be {_KINDS.get(kind, "an integer")}. Received: {json_in_words(found[key])}.'
            raise UserError(what, where=str(path), remedy=remedy)
    return found


def read_settings(path: Path) -> Any:
    """The data of a settings file that a user wrote. Raises ValueError with a clause if it is not JSON or has a
    duplicate key.
    """
    try:
        with open_regular_file(path) as file:
            return json.load(file, object_pairs_hook=object_without_duplicate_keys)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except DuplicateKeyError:
        raise
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error


def json_beside(path: Path) -> str:
    """``The folder contains: a.json, b.json.``: other files in the folder of a missing file; "" if there are none."""
    there = sorted(map(str, path.parent.glob("*.json")))[:5]
    return f"The folder contains: {', '.join(there)}." if there else ""


def write_json(path: Path, data: Any, *, indent: int = 2, sort_keys: bool = False) -> None:
    """Write a JSON file with a final newline. Raises TypeError for data that JSON does not support."""
    path.write_text(json.dumps(data, indent=indent, sort_keys=sort_keys) + "\n", encoding="utf-8")


def json_in_words(value: Any) -> str:
    """``a list``, ``the number 3``"""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value}"
    return _KINDS.get(type(value), type(value).__name__)


def shorten_value(value: Any, length: int = 160) -> str:
    """Format a value for an error message: as JSON if possible, at most ``length`` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate could not be printed
    return text if len(text) <= length else text[: length - 4] + " ..."


def quote_value(value: Any, length: int = 160) -> str:
    """As ``shorten_value``, with text in quotation marks, so that ``"5"`` differs from ``5``."""
    return shorten_value(json.dumps(value, ensure_ascii=False, default=str), length)
