"""The fields of a JSON body, read one by one, each with its type and bounds; everything that is wrong is kept.

    fields = BodyFields(body)
    temperature = fields.number("temperature", ge=0, le=2)
    fields.raise_all()

A field that is absent or null has the value None, or the default that is named. A field that is wrong has it too, and
adds a problem. ``unknown`` is what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from burnish.serve.http.bodies import json_type
from burnish.serve.http.errors import Refusal

MOST_SAID = 8
"""Problems in one message; the rest is counted."""


class BodyFields:
    """One object of a body.

    Args:
        values: the object.
        path: where it stands in the body, ``messages[3]``; "" for the body itself.
        problems: of the whole body; shared by the objects within it.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", problems: list[Refusal] | None = None) -> None:
        self.values, self.path = values, path
        self.problems: list[Refusal] = [] if problems is None else problems
        self.asked: set[str] = set()

    def name_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        self.asked.add(name)
        return self.values.get(name)

    @property
    def unknown(self) -> list[str]:
        return [name for name in self.values if name not in self.asked]

    # --- values -------------------------------------------------------------------------------------------------------

    def typed(self, name: str, kind: type, expected: str, required: bool = False) -> Any:
        """The value, where it is of that type."""
        value = self.raw(name)
        if isinstance(value, kind):
            return value
        if value is not None:
            self.wrong_type(name, expected, value)
        elif required:
            self.missing(name)
        return None

    def text(self, name: str, required: bool = False) -> str | None:
        found: str | None = self.typed(name, str, "text", required)
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong_type(name, "true or false", value)
        return default

    def integer(self, name: str, ge: int | None = None, le: int | None = None) -> int | None:
        value = self.raw(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number: 1.0 is 1
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            within: int | None = self._within(name, value, ge, le)
            return within
        self.wrong_type(name, "a whole number", value)
        return None

    def number(
        self, name: str, ge: float | None = None, le: float | None = None, gt: float | None = None
    ) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong_type(name, "a number", value)
            return None
        if gt is not None and value <= gt:
            self.wrong(name, f"must be greater than {gt:g}", value)
            return None
        within = self._within(name, value, ge, le)
        return None if within is None else float(within)

    def _within(self, name: str, value: Any, least: float | None, most: float | None) -> Any:
        if value is None or ((least is None or value >= least) and (most is None or value <= most)):
            return value
        words = f"between {least:g} and {most:g}" if least is not None and most is not None else (
            f"at least {least:g}" if least is not None else f"at most {most:g}"
        )  # fmt: skip
        self.wrong(name, f"must be {words}", value)
        return None

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is None or value in choices:
            return value
        self.wrong(name, f"must be one of {', '.join(choices)}", value)
        return None

    def items(self, name: str, most: int, required: bool = False) -> list[Any] | None:
        value: list[Any] | None = self.typed(name, list, "a list", required)
        if value is not None and (len(value) > most or (required and not value)):
            words = f"must have 1 to {most:,} entries" if required else f"may have {most:,} entries"
            self.wrong(name, words, f"{len(value):,} entries")
            return None
        return value

    def object(self, name: str, required: bool = False) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self.typed(name, dict, "an object", required)
        return found

    def within(self, name: str, required: bool = False) -> BodyFields | None:
        """The object of that name, to be read in its turn."""
        value = self.object(name, required)
        return None if value is None else BodyFields(value, self.name_of(name), self.problems)

    def each(self, name: str, items: Iterable[Any] | None) -> list[BodyFields]:
        """The objects of a list, to be read in their turn."""
        found = []
        for index, item in enumerate(items or ()):
            place = f"{name}[{index}]"
            if isinstance(item, dict):
                found.append(BodyFields(item, self.name_of(place), self.problems))
            else:
                self.wrong_type(place, "an object", item)
        return found

    # --- problems -----------------------------------------------------------------------------------------------------

    def missing(self, name: str) -> None:
        self.add("missing_required_parameter", name, "is required, and is not there.")

    def wrong_type(self, name: str, expected: str, value: Any) -> None:
        self.add("invalid_type", name, f"must be {expected}. Received: {json_type(value)}.")

    def wrong(self, name: str, expected: str, value: Any) -> None:
        self.add("invalid_value", name, f"{expected}. Received: {_shown(value)}.")

    def unsupported(self, name: str, remedy: str) -> None:
        self.add("unsupported_parameter", name, f"is not supported here. {remedy}")

    def add(self, code: str, name: str, rest: str, status: int = 400) -> None:
        """A problem whose sentence begins with the field's name."""
        path = self.name_of(name)
        self.problems.append(Refusal(status, code, f'"{path}" {rest}', param=path))

    def raise_all(self) -> None:
        """Raise one refusal that says all problems, or return."""
        if not self.problems:
            return
        first, sentences = self.problems[0], [problem.message for problem in self.problems[:MOST_SAID]]
        if len(self.problems) > MOST_SAID:
            sentences.append(f"And {len(self.problems) - MOST_SAID} more.")
        raise Refusal(first.status, first.code, " ".join(sentences), param=first.param)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return f'"{text[:80]}"' if isinstance(value, str) and not text[:1].isdigit() else text[:80]
