"""The body of a request as one JSON object, read strictly.

In: a request. Out: a dict. Rejected: a content type other than JSON; a body that exceeds the size limit (declared or
received), takes longer than ``BODY_TIMEOUT_S``, is not a JSON object, or is nested deeper than ``MAX_DEPTH``; duplicate
keys; NaN and infinity; lone surrogates. Form data and compressed bodies are not supported.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from burnish.serve.http.errors import APIError

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_TIMEOUT_S = 30.0
MAX_DEPTH = 64
PARSE_IN_THREAD_BYTES = 256 * 1024
"""Bodies larger than this, in bytes, are parsed in a thread so that they do not block other streams."""


async def json_object(request: Request) -> dict[str, Any]:
    """Return the body of ``request`` as a JSON object.

    Raises:
        APIError: 400, 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(
            415, "not_json", f'The header must be "Content-Type: application/json". Received: "{kind[:80]}".'
        )
    body = await whole_body(request)
    if len(body) > PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


async def whole_body(request: Request) -> bytes:
    """Return the whole body in bytes; ``guards.py`` enforces the size limit while it is read."""
    from starlette.requests import ClientDisconnect  # here, because the terminal chat validates bodies without a server

    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError as error:
        message = f"The body must arrive within {BODY_TIMEOUT_S:g} seconds."
        raise APIError(408, "request_timeout", message, headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise APIError(400, "invalid_json", "The connection was closed before the body was complete.") from error


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        APIError: 400 ``invalid_json`` or ``invalid_type``.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"byte {error.start} is not UTF-8") from error
    try:
        value = json.loads(
            text, object_pairs_hook=_object_without_duplicate_keys, parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise _invalid_json(_TOO_DEEP) from error
    except ValueError as error:
        raise _invalid_json("a number has too many digits") from error
    if not isinstance(value, dict):
        raise APIError(400, "invalid_type", f"The body must be a JSON object. Received: {json_type(value)}.")
    refuse_surrogates(value)
    return value


def refuse_surrogates(value: Any) -> None:
    """Raise APIError 400 if a string in a JSON value contains half of a surrogate pair, which has no UTF-8."""
    if (path := _unpaired_surrogate_path(value)) is not None:
        message = "A string contains an unpaired surrogate, which is not a valid character."
        raise APIError(400, "invalid_value", message, param=path[1:] or None)


def json_type(value: Any) -> str:
    """Name of the JSON type of a value, for error messages."""
    kinds: Sequence[tuple[Any, str]] = (
        (bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string"), (list, "an array"),
        (dict, "an object"),
    )  # fmt: skip
    return next((word for kind, word in kinds if isinstance(value, kind)), "null")


def _invalid_json(why: str) -> APIError:
    return APIError(400, "invalid_json", f"The body must be JSON: {why}.")


def _object_without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise APIError(400, "invalid_json", f'The key "{_shorten(twice)}" appears twice in one object.')
    return found


def _finite_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise _invalid_json(f"the number {_shorten(text)} is too large")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise _invalid_json(f"{word} is not a valid JSON number")


def _unpaired_surrogate_path(value: Any, depth: int = 1) -> str | None:
    """Path of the first lone surrogate in a value, beginning with a dot or a bracket; None if there is none."""
    if isinstance(value, str):
        is_whole = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if is_whole else ""
    if not isinstance(value, list | dict):
        return None
    if depth > MAX_DEPTH:
        raise _invalid_json(_TOO_DEEP)
    if isinstance(value, dict) and any(_unpaired_surrogate_path(key) is not None for key in value):
        return ""
    for place, item in enumerate(value) if isinstance(value, list) else value.items():
        inside = _unpaired_surrogate_path(item, depth + 1)
        if inside is not None:
            return f"[{place}]{inside}" if isinstance(value, list) else f".{_shorten(str(place))}{inside}"
    return None


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _shorten(text: str) -> str:
    return text[:80].encode("utf-8", "replace").decode("utf-8")
