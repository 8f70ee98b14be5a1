"""Request bodies as pydantic models. All problems are reported in one error that names the parameters.

An ``APIError`` names the path of each problem (``messages[3].content``). A field that is null counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from burnish.serve.http.bodies import json_type
from burnish.serve.http.errors import APIError

_MOST_SHOWN = 8
"""Maximum number of problems listed in one message; the others are counted."""


def problem(code: str, message: str, at: str = "") -> PydanticCustomError:
    """Return an error for a validator. ``at`` is a path within the validated value, such as ``.name``."""
    return PydanticCustomError("problem", "{message}", {"code": code, "message": message, "at": at})


def _whole_float_to_int(value: Any) -> Any:
    """Convert whole floats: JSON has a single number type, so 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole_float_to_int)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1)]
_OTHER = "·other"
TEXT_OR_OTHER = Discriminator(lambda value: "·text" if isinstance(value, str) else _OTHER)
"""Discriminates text from other values. Tags with this prefix are omitted from the paths of problems."""


class Body(BaseModel):
    """Base class for JSON objects of a request."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


AnyBody = TypeVar("AnyBody", bound=Body)


def read(kind: type[AnyBody], body: Mapping[str, Any]) -> AnyBody:
    """Validate a body.

    Raises:
        APIError: 400, with all problems.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise combine_errors([_api_error_of(found) for found in error.errors(include_url=False)]) from error


def unknown_fields(body: Body, within: str = "") -> Iterator[str]:
    """Yield the names of undeclared fields, including those of nested objects (``messages.name``)."""
    yield from (f"{within}{name}" for name in body.model_extra or ())
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Body):
                yield from unknown_fields(each, f"{within}{field.alias or name}.")


def combine_errors(problems: Sequence[APIError]) -> APIError:
    """Combine problems into one error."""
    first, sentences = problems[0], [problem.message for problem in problems[:_MOST_SHOWN]]
    if len(problems) > _MOST_SHOWN:
        sentences.append(f"And {len(problems) - _MOST_SHOWN} more.")
    return APIError(first.status, first.code, " ".join(sentences), param=first.param)


def api_error(code: str, path: str, message: str) -> APIError:
    return APIError(400, code, f'"{path}" {message}', param=path)


_TYPES = {
    "int": "an integer", "float": "a number", "string": "a string", "bool": "true or false", "list": "a list",
    "dict": "an object", "model": "an object",
}  # fmt: skip
_LIMITS = {
    "less_than": "less than", "less_than_equal": "less than or equal to", "greater_than": "greater than",
    "greater_than_equal": "greater than or equal to",
}  # fmt: skip


def _api_error_of(found: Any) -> APIError:
    """Convert a pydantic error."""
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    path = _path(found["loc"]) + context.get("at", "")
    path = path.removeprefix(".")
    received = f"Received: {format_value(value)}."
    if kind == "problem":
        return api_error(context["code"], path, context["message"])
    if kind == "missing":
        return api_error("missing_required_parameter", path, "is required.")
    if (expected := _TYPES.get(kind.partition("_")[0])) and kind.endswith(("_type", "_from_float")):
        either = "a string or " if found["loc"] and found["loc"][-1] == _OTHER else ""
        return api_error("invalid_type", path, f"must be {either}{expected}. Received: {json_type(value)}.")
    if kind in ("too_long", "too_short"):
        bounds = {"too_long": "at most {max_length:,}", "too_short": "at least {min_length:,}"}[kind].format(**context)
        entries = "entry" if bounds.endswith(" 1") else "entries"
        return api_error("invalid_value", path, f"must have {bounds} {entries}. Received: {len(value):,}.")
    if kind == "literal_error":
        return api_error("invalid_value", path, f"must be one of {context['expected']}. {received}")
    if kind in _LIMITS:  # pydantic prints large integers as floats
        (limit,) = (context[name] for name in ("lt", "le", "gt", "ge") if name in context)
        shown_limit = str(limit) if isinstance(limit, int) else f"{limit:g}"
        return api_error("invalid_value", path, f"must be {_LIMITS[kind]} {shown_limit}. {received}")
    message = found["msg"].partition("should ")[2] or found["msg"]
    return api_error("invalid_value", path, f"must {message}. {received}")


def _path(places: Sequence[int | str]) -> str:
    parts = (f"[{place}]" if isinstance(place, int) else f".{place[:80]}" for place in places
             if isinstance(place, int) or not place.startswith("·"))  # fmt: skip
    return "".join(parts).removeprefix(".")


def format_value(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return f'"{text[:80]}"' if isinstance(value, str) else text[:80]
