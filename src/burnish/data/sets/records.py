"""Read a record with the layout of its dataset: columns by their part (prompt, response, ...), with type checks.

Raises BadRecord with the column and its value for a missing column or a value of another type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.data.images.sources import MediaReader
from burnish.data.reading.json_files import Values, parse_json
from burnish.data.stats import RecordReason
from burnish.data.template_arguments import COLUMN, RESERVED
from burnish.loop.types import Example, RoleName
from burnish.utils.json_files import shorten_value

ROLES: Mapping[str, RoleName] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "function", "tool_call": "function",
    "observation": "observation", "tool": "observation", "function": "observation", "function_response": "observation",
    "tool_response": "observation", "ipython": "observation",
}  # fmt: skip
"""Role names that the tags of a dataset do not define -> role."""


ALL_COLUMNS = "*"
"""Used in place of column names by a stage that needs all columns."""


class BadRecord(ValueError):
    """Raised for a record that breaks its format.

    Args:
        what: error message: what was expected.
        remedy: what to do.
        reason: reason in the statistics.
        kind: kind of fault, if the message differs between records with the same fault.
        received: the value found, appended to the message.
    """

    def __init__(
        self, what: str, remedy: str = "", reason: str = "a column is missing or of the wrong type", kind: str = "",
        received: str = "",
    ) -> None:  # fmt: skip
        self.kind = kind or re.sub(r"\d+", "", what)  # without positions, so that equal faults are grouped
        self.what = f"{what} Received: {received}" if received else what
        self.remedy, self.reason = remedy, reason
        super().__init__(self.what)


@dataclass(frozen=True)
class RecordNeeds:
    """What a stage requires of the records of a dataset; declared by its objective.

    Args:
        kind: "answers"; "pairs" (two responses to compare); "unpaired" (a response with a label); "prompts" (the
            response is optional); "any" of these; or a custom kind: records of formats that are registered with
            ``holds=kind``.
        columns: further columns, stored in ``Example.extra``; ALL_COLUMNS for all columns of each record.
        stage: name of the stage, for error messages.
        reader: how images are found, or the type of a text-only model; None refuses images.
        without_pairs: what to do with single responses, if the stage requires pairs.
    """

    kind: str = "answers"
    columns: tuple[str, ...] = ()
    stage: str = "sft"
    reader: MediaReader | None = None
    without_pairs: str = ""

    @property
    def compares(self) -> bool:
        """Whether records hold preferences: pairs or single responses with labels."""
        return self.kind in ("pairs", "unpaired")


ANSWERS = RecordNeeds()


@dataclass
class Layout:
    """Format and columns of the records of one dataset.

    Args:
        format: a name in ``FORMATS``.
        columns: part -> column; a part that is missing has no column.
        further_columns: name for reward functions -> column.
        required: parts whose column every record must have.
        tags: role names and keys of conversations (LLaMA-Factory's keys).
        media: columns of images, videos and audio, which must be empty except for ``images`` and ``videos``.
        images, videos: column of images, and of videos, "" for none.
        reader: how images are found; None if the model takes no images.
        awaited: optional columns named by the user that no record had so far.
        notes: notes on automatic choices, without duplicates, in order.
        dropped_parts: parts of the last record that were dropped; the caller counts and clears them.
        boolean_of_label: label value -> boolean, if labels are not JSON booleans.
        needs: requirements of the stage.
        verbatim: pass messages to the chat template unchanged (``Message.raw``): with any role and further keys, and
            with the system message in its place.
    """

    format: str
    columns: Mapping[str, str]
    required: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    images: str = ""
    videos: str = ""
    reader: MediaReader | None = None
    awaited: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    dropped_parts: list[RecordReason] = field(default_factory=list)
    boolean_of_label: Mapping[Any, bool] = field(default_factory=dict)
    needs: RecordNeeds = ANSWERS
    verbatim: bool = False
    further_columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named: tuple[RoleName, ...] = ("user", "assistant", "observation", "function", "system")
        tagged: dict[str, RoleName] = {self.tags[f"{role}_tag"]: role for role in named if f"{role}_tag" in self.tags}
        self.roles: Mapping[str, RoleName] = {**ROLES, **tagged}
        """Role name in a conversation -> role."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record with its layout."""

    values: Values
    source: str
    number: int
    layout: Layout

    def example(self, **fields: Any) -> Example:
        """Create an example with the source and number of this record."""
        return Example(source=self.source, number=self.number, **fields)

    def refuse_media(self) -> None:
        """Raise BadRecord if the record contains images, videos or audio that the model would not see."""
        reader = self.layout.reader
        supporting = f"{reader.model_type} supports" if reader else "this stage supports"
        named = {self.layout.images: "images", self.layout.videos: "videos"}
        for column in self.layout.media:
            if self.values.get(column):
                kind = named.get(column, "audio" if column.startswith("audio") else "media")
                remedy = (
                    f"{kind.capitalize()} require a model with a vision tower and a stage other than pt and rm. "
                    if column in named
                    else ""
                )
                part = kind if column in named else column
                raise BadRecord(
                    f'the record contains {kind} ("{column}"), but {supporting} text only.',
                    f"{remedy}To train on the text only, remove the column from the file, or leave "
                    f'"{part}" out of "columns".',
                    reason="it contains non-text content",
                )

    def value(self, part: str) -> Any:
        """Return the value in the column of ``part``, None if an optional column is missing."""
        column = self.layout.columns.get(part, "")
        if column not in self.values and part in self.layout.required:
            raise BadRecord(f'the column "{column}" is missing. Found: {list_columns(self.values)}.')
        return self.values.get(column)

    def column(self, part: str) -> str:
        """Return the column of a required part. Raises BadRecord if the user's "columns" do not name it."""
        if part not in self.layout.columns:
            raise BadRecord(f'"columns" must contain "{part}" for the format {self.layout.format}.')
        return self.layout.columns[part]

    def text(self, part: str) -> str:
        """Return the text of a required part."""
        return as_text(self.value(part), self.column(part))

    def text_or_none(self, part: str) -> str | None:
        """Return the text of a part that may be null."""
        value = self.value(part)
        return None if value is None else as_text(value, self.layout.columns[part])

    def json_text(self, part: str) -> str:
        """Return a part as JSON text, whether the record holds text or a value; "" if it is empty."""
        value = self.value(part)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""
        return as_text(text, self.layout.columns.get(part, ""))

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template without null values, which Parquet writes for missing keys."""
        column, value = self.layout.columns.get(COLUMN, COLUMN), self.value(COLUMN)
        try:
            found = parse_json(value) if isinstance(value, str) and value else value or {}
        except json.JSONDecodeError:
            found = value
        if not isinstance(found, Mapping):
            raise BadRecord(f'"{column}" must be an object.', received=shorten_value(value))
        for name in found:
            if not name.isidentifier() or not name.isascii() or name in RESERVED:
                what = "is set by burnish" if name in RESERVED else "is not a name of a variable"
                raise BadRecord(f'"{column}" contains "{shorten_value(name, 40)}", which {what}.', "Remove it.")
        return {name: argument for name, argument in found.items() if argument is not None}

    def turns_or_none(self, part: str) -> list[Mapping[str, Any]] | None:
        """Return the messages of a conversation, or None if the part is not one. Verbatim records are not parsed."""
        value = self.value(part)
        if self.layout.verbatim and isinstance(value, str | dict):
            return [value] if isinstance(value, dict) else None
        return as_messages(value)

    def turns(self, part: str) -> list[Mapping[str, Any]]:
        """Return the messages of a conversation as they are in the file. Raises BadRecord if the part is not one."""
        value, turns = self.value(part), self.turns_or_none(part)
        if turns is None:
            raise BadRecord(f'"{self.column(part)}" must be a list of messages.', received=shorten_value(value))
        return turns


def as_text(value: Any, column: str) -> str:
    """Return ``value`` as text, joining a list of text parts. Raises BadRecord for other values."""
    if isinstance(value, str):
        if not value.isascii():
            _check_unicode(value, column)
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        others = sorted({str(part["type"]) for part in value} - {"text"})
        if others:
            raise BadRecord(
                f'"{column}" contains {list_columns(others)}, but only text is supported here.',
                reason="it contains non-text content",
            )
        return "".join(as_text(part.get("text"), f"{column}.text") for part in value)
    if value is None:
        raise BadRecord(f'"{column}" must be a string.', received="null.")
    remedy = f'Write it as a string: "{value}".' if isinstance(value, int | float) else ""
    raise BadRecord(f'"{column}" must be a string.', remedy, received=shorten_value(value))


def as_list(text: str) -> Any:
    """Return the list in a JSON text (as in CSV and Parquet files); a text that is not one unchanged."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return text


def as_messages(value: Any) -> list[Mapping[str, Any]] | None:
    """Return a list of messages, also if it is JSON text (as in CSV and Parquet files); None for other values."""
    value = as_list(value) if isinstance(value, str) else value
    return value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else None


def list_columns(names: Any) -> str:
    """Join column names for a message, shortened. Without a header, names are values of the first record."""
    shown = [shorten_value(str(name), 40) for name in names]
    return ", ".join([*shown[:12], *(["..."] if len(shown) > 12 else [])]) or "nothing"


def _check_unicode(value: str, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise BadRecord(
            f'"{column}" is not valid Unicode: unpaired surrogate {half} at character {error.start}.',
            reason="the text is not valid Unicode",
        ) from None
