"""A record read with the layout of its data set: columns by their part (prompt, response, ...), values checked by type.

In: a record as it is in the file (column -> value) and a ``Layout``. Out: text, JSON, lists of messages. Refused, as a
``BadRecord`` that names the column and its value: a column that is missing, a value of another type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.data.images.sources import Sight
from burnish.data.reading.json_files import Values, parsed, shortened
from burnish.loop.types import Example, RoleName

ROLES: Mapping[str, RoleName] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "function", "tool_call": "function",
    "observation": "observation", "tool": "observation", "function": "observation", "function_response": "observation",
    "tool_response": "observation", "ipython": "observation",
}  # fmt: skip
"""Meaning of role names that the tags of a data set do not define."""


ALL_COLUMNS = "*"
"""In place of the name of a column that a stage asks for: all of them."""


class BadRecord(ValueError):
    """A record that breaks its format.

    Args:
        what: a sentence: what was expected.
        remedy: what to do.
        reason: the reason in the stats.
        received: what stands there instead, as the end of the message.
        kind: the kind of fault, where the sentence is not the same for all records with it.
    """

    def __init__(
        self, what: str, remedy: str = "", reason: str = "a column is missing or of the wrong type", kind: str = "",
        received: str = "",
    ) -> None:  # fmt: skip
        self.kind = kind or re.sub(r"\d+", "", what)  # the same for all records with this fault, wherever it is in them
        self.what = f"{what} Received: {received}" if received else what
        self.remedy, self.reason = remedy, reason
        super().__init__(self.what)


@dataclass(frozen=True)
class RecordNeeds:
    """What a stage needs of the records of a data set; its objective declares it.

    Args:
        kind: "answers"; "pairs" (two answers to compare); "verdicts" (an answer with a label); "prompts" (an answer is
            optional); or another word: records of formats that are registered with ``holds`` and that word.
        columns: further columns, which ``Example.extra`` then holds; ALL_COLUMNS for those of each record.
        stage: the name of the stage, for error messages.
        sight: how images are found, or the type of a model that takes none; None refuses them.
    """

    kind: str = "answers"
    columns: tuple[str, ...] = ()
    stage: str = "sft"
    sight: Sight | None = None

    @property
    def compares(self) -> bool:
        """Whether records hold preferences: pairs or verdicts."""
        return self.kind in ("pairs", "verdicts")


ANSWERS = RecordNeeds()


@dataclass
class Layout:
    """Format and columns of the records of one data set.

    Args:
        format: a name in ``FORMATS``.
        columns: part -> column; a part that is not named has no column.
        required: the parts whose column every record must have.
        tags: names of roles and keys in a conversation (LLaMA-Factory's keys).
        media: the columns of images and the like, which must be empty but for ``images``.
        images: the column of images, "" for none.
        sight: how images are found; None where the model sees none.
        awaited: optional columns that the user named and that no record had so far.
        notes: choices made for the user, each once, in the order in which they were made.
        dropped_parts: parts of the record just read that were left out; the caller that converts it counts them.
        verdicts: how verdicts are written, where not as true and false.
        needs: what the stage needs of the records.
        verbatim: messages go to the chat template unchanged: with any role, further keys, and the system message in
            its place (``Message.raw``).
    """

    format: str
    columns: Mapping[str, str]
    required: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    images: str = ""
    sight: Sight | None = None
    awaited: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    dropped_parts: list[str] = field(default_factory=list)
    verdicts: Mapping[Any, bool] = field(default_factory=dict)
    needs: RecordNeeds = ANSWERS
    verbatim: bool = False

    def __post_init__(self) -> None:
        named: tuple[RoleName, ...] = ("user", "assistant", "observation", "function", "system")
        tagged: dict[str, RoleName] = {self.tags[f"{role}_tag"]: role for role in named if f"{role}_tag" in self.tags}
        self.roles: Mapping[str, RoleName] = {**ROLES, **tagged}
        """Name of a role in a conversation -> the role."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record and its layout."""

    values: Values
    source: str
    number: int
    layout: Layout

    def example(self, **fields: Any) -> Example:
        """Make an example that knows its source and number."""
        return Example(source=self.source, number=self.number, **fields)

    def refuse_media(self) -> None:
        """Refuse a record that has more than text, because the model would not see it."""
        for column in self.layout.media:
            if self.values.get(column):
                sight, is_images = self.layout.sight, column == self.layout.images
                raise BadRecord(
                    f'the record contains images ("{column}"), but {sight.model_type} reads text only.'
                    if is_images and sight is not None
                    else f'the column "{column}" is not empty, but burnish trains on text only.',
                    "Choose a model with a vision tower. To train on the text only, remove the column from the file, "
                    'or leave "images" out of "columns".'
                    if is_images
                    else "To train on the text only, remove the column from the file.",
                    reason="it contains more than text",
                )

    def value(self, part: str) -> Any:
        """The value in the column of ``part``; None where an optional column is missing."""
        column = self.layout.columns.get(part, "")
        if column not in self.values and part in self.layout.required:
            raise BadRecord(f'the column "{column}" is missing. Found: {listed(self.values)}.')
        return self.values.get(column)

    def text(self, part: str) -> str:
        """The text of a part that must be there."""
        return as_text(self.value(part), self.layout.columns[part])

    def text_or_none(self, part: str) -> str | None:
        """The text of a part that may be null."""
        value = self.value(part)
        return None if value is None else as_text(value, self.layout.columns[part])

    def json_text(self, part: str) -> str:
        """The JSON text of a part, whether the file holds it as text or as a value; "" where there is none."""
        value = self.value(part)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""
        return as_text(text, self.layout.columns.get(part, ""))

    def turns_or_none(self, part: str) -> list[Mapping[str, Any]] | None:
        """The messages of a conversation, None where the part is none. Verbatim records hold no messages as JSON."""
        value = self.value(part)
        if self.layout.verbatim and isinstance(value, str | dict):
            return [value] if isinstance(value, dict) else None
        return as_turns(value)

    def turns(self, part: str) -> list[Mapping[str, Any]]:
        """The messages of a conversation as they are in the file."""
        value, turns = self.value(part), self.turns_or_none(part)
        if turns is None:
            column = self.layout.columns[part]
            raise BadRecord(f'"{column}" must be a list of messages.', received=shortened(value))
        return turns


def as_text(value: Any, column: str) -> str:
    """Return ``value`` as text; a list of text parts is joined. Raises BadRecord where it is something else."""
    if isinstance(value, str):
        if not value.isascii():
            _check_unicode(value, column)
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        others = sorted({str(part["type"]) for part in value} - {"text"})
        if others:
            raise BadRecord(
                f'"{column}" contains {listed(others)}, but burnish trains on text only.',
                reason="it contains more than text",
            )
        return "".join(as_text(part.get("text"), f"{column}.text") for part in value)
    if value is None:
        raise BadRecord(f'"{column}" must be a string.', received="null.")
    remedy = f'Write it as a string: "{value}".' if isinstance(value, int | float) else ""
    raise BadRecord(f'"{column}" must be a string.', remedy, received=shortened(value))


def as_turns(value: Any) -> list[Mapping[str, Any]] | None:
    """A list of messages, also one written as JSON text (in CSV and Parquet files), or None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parsed(value)
        except json.JSONDecodeError:
            return None
    return value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else None


def listed(names: Any) -> str:
    """Names of columns; of a file without a header they are the values of its first record, and may be long."""
    shown = [shortened(str(name), 40) for name in names]
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
