"""Record formats: functions that convert a record to an example.

The layout of a dataset (``layouts.py``) names the format. A record that breaks it is refused with file, record, line
and column, or counted and dropped (``on_bad_record``). Whether roles alternate is not checked here: the template
decides whether it can render a conversation.

A format is one function:

    @FORMATS.register("qa", columns={"prompt": "question", "response": "answer"})
    def qa(record: Record) -> Example:
        return record.example(prompt=record.text("prompt"), completion=_response(record))

alpaca, sharegpt and openai follow LLaMA-Factory (src/llamafactory/data/converter.py, August 2026), with three
differences for ``openai``. "detailed thinking off" is not added to the system message. Tool-call arguments given as
JSON text are parsed. Responses of parallel tool calls remain separate messages, which the template joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from burnish.config.bounds import DEEPEST_NODE
from burnish.config.errors import Problem, UserError, few
from burnish.config.registry import Registry
from burnish.data.reading.files import line_of
from burnish.data.reading.json_files import NOT_AN_OBJECT, OBJECT_EXAMPLE, NotAnObject, Values
from burnish.data.sets.images import refuse_other_media, with_images, with_paths
from burnish.data.sets.preferences import with_preference
from burnish.data.sets.records import ALL_COLUMNS, BadRecord, Layout, Record, as_list, as_messages, as_text
from burnish.data.sets.turns import OPENAI_TAGS, SHAREGPT_TAGS, as_context, conversation, messages_of
from burnish.data.stats import DataStats, drop_reason
from burnish.data.template_arguments import COLUMN, NO_TEMPLATE
from burnish.loop.types import Example, Message
from burnish.utils.json_files import shorten_value

SHOWN = 5
"""Maximum number of kinds of faults, and of records per kind, that one error names."""

Format: TypeAlias = Callable[[Record], Example]
FORMATS: Registry[Format] = Registry("format")
"""Traits of a format:

- ``columns``: part -> default column;
- ``optional``: part -> default column, for parts that a record may lack;
- ``tags``: default role names and keys;
- ``holds``: kind of its records (``RecordNeeds.kind``): "pairs", or a custom kind. Default: responses;
- ``finds``: function that returns a record's columns by part if the record has this format, else None. Default: checks
  that all required columns are present.
"""


@FORMATS.register(
    "alpaca",
    columns={"prompt": "instruction", "query": "input", "response": "output"},
    optional={"query": "input", "history": "history", "system": "system", "tools": "tools", COLUMN: COLUMN},
)
def alpaca(record: Record) -> Example:
    """An instruction with optional input, and the output. Earlier turns are in the history."""
    if set(record.layout.columns) == {"prompt"} and record.layout.needs.kind != "prompts":
        return record.example(text=record.text("prompt"))  # LLaMA-Factory's configuration for plain text
    instruction, query = record.text_or_none("prompt"), record.text_or_none("query")
    if instruction is None and not query:
        column = record.layout.columns["prompt"]
        raise BadRecord(
            f'"{column}" is null, so the record has no prompt.', f'Set "{column}"; use "" for an empty prompt.'
        )
    question = "\n".join(filter(None, (instruction, query)))
    answer = record.text_or_none("response")
    answers = () if answer is None else (Message("assistant", answer),)
    return record.example(
        messages=(*_history(record), Message("user", question), *answers),
        system=record.text_or_none("system"),
        tools=record.json_text("tools"),
    )


def _history(record: Record) -> Iterator[Message]:
    turns = record.value("history") or ()
    turns = turns if not isinstance(turns, str) else as_list(turns)
    if not isinstance(turns, list | tuple):
        name = record.layout.columns["history"]
        raise BadRecord(f'"{name}" must be a list of pairs [prompt, response].', received=shorten_value(turns))
    for place, pair in enumerate(turns):
        column = f"{record.layout.columns['history']}[{place}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRecord(f'"{column}" must be a pair [prompt, response].', received=shorten_value(pair))
        yield Message("user", as_text(pair[0], f"{column}[0]"))
        yield Message("assistant", as_text(pair[1], f"{column}[1]"))


MESSAGES = ("messages", "conversations", "conversation")
"""Columns in which messages are detected."""


def _finds_turns(role_key: str) -> Callable[[Values], Mapping[str, str] | None]:
    """Return a function that finds a column of messages whose roles have the key ``role_key``."""

    def find(values: Values) -> Mapping[str, str] | None:
        for column in MESSAGES:
            turns = as_messages(values.get(column))
            if turns and role_key in turns[0]:
                return {"messages": column}
        return None

    return find


_SHARED_COLUMNS = {"system": "system", "tools": "tools", COLUMN: COLUMN}


@FORMATS.register(
    "sharegpt",
    columns={"messages": "conversations"},
    optional=_SHARED_COLUMNS,
    tags=SHAREGPT_TAGS,
    finds=_finds_turns("from"),
)
def sharegpt(record: Record) -> Example:
    """A list of messages with "from" and "value", or the keys set in the tags."""
    return conversation(record, messages_of(record, "messages"))


@FORMATS.register(
    "openai", columns={"messages": "messages"}, optional=_SHARED_COLUMNS, tags=OPENAI_TAGS, finds=_finds_turns("role")
)
def openai(record: Record) -> Example:
    """A list of messages with "role" and "content". Tool calls are in "tool_calls"."""
    return conversation(record, messages_of(record, "messages"))


@FORMATS.register(
    "prompt_completion",
    columns={"prompt": "prompt", "response": "completion"},
    optional=_SHARED_COLUMNS,
    tags=OPENAI_TAGS,
)
def prompt_completion(record: Record) -> Example:
    """A prompt and a completion, both text or both lists of messages. Only the completion is trained."""
    if isinstance(record.value("prompt"), str) and record.turns_or_none("prompt") is None:
        return record.example(prompt=record.text("prompt"), completion=_response(record))
    if record.turns_or_none("prompt") is None and not isinstance(record.value("prompt"), list):
        received = shorten_value(record.value("prompt"))
        raise BadRecord(f'"{record.column("prompt")}" must be text or a list of messages.', received=received)
    before = map(as_context, messages_of(record, "prompt"))
    has_no_response = record.layout.needs.kind == "prompts" and not record.value("response")
    return conversation(record, [*before, *([] if has_no_response else messages_of(record, "response"))])


def _response(record: Record) -> str | None:
    return record.text_or_none("response") if record.layout.needs.kind == "prompts" else record.text("response")


@FORMATS.register(
    "preference",
    columns={"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    optional={"prompt": "prompt", **_SHARED_COLUMNS, "margin": "margin"},
    tags=OPENAI_TAGS,
    holds="pairs",
)
def preference(record: Record) -> Example:
    """A prompt and two responses, as text or messages. Without a prompt, both responses begin with it."""
    prompt = record.value("prompt")
    if prompt is None or (isinstance(prompt, str) and record.turns_or_none("prompt") is None):
        answers_are_text = isinstance(record.value("chosen"), str) and record.turns_or_none("chosen") is None
        column = record.layout.columns.get("prompt", "")
        if answers_are_text and prompt is None and column in record.values and not record.layout.verbatim:
            what = f'"{column}" is null, so the record has no prompt.'
            raise BadRecord(what, f'Set it, or remove "{column}" if both responses begin with the prompt.')
        prompt_text = record.text_or_none("prompt") if answers_are_text else None
        return record.example(prompt=prompt_text, system=record.text_or_none("system"), tools=record.json_text("tools"))
    return conversation(record, messages_of(record, "prompt"))


@FORMATS.register("text", columns={"text": "text"})
def text(record: Record) -> Example:
    """Plain text, for pretraining or already rendered."""
    return record.example(text=record.text("text"))


BadRecords: TypeAlias = "list[tuple[Record, BadRecord]]"
"""Records that break their format, each with its error."""


def convert_records(
    records: Iterable[tuple[Values, str, int]], layout: Layout, stats: DataStats, on_bad_record: str = "raise"
) -> list[Example]:
    """Convert records to examples.

    Args:
        records: (values, source, record number from 1) for each record.
        layout: format and columns.
        stats: statistics that dropped records are added to.
        on_bad_record: "raise" or "drop".

    Raises:
        UserError: if records break the format and are not dropped, or if no example remains.
    """
    bad: BadRecords = []
    examples = [e for e in examples_from(records, layout, stats, on_bad_record, bad) if e is not None]
    if bad and (on_bad_record != "drop" or not examples):
        raise UserError(bad_records(bad, are_all=not examples))
    return examples


def examples_from(
    records: Iterable[tuple[Values, str, int]], layout: Layout, stats: DataStats, on_bad_record: str, bad: BadRecords
) -> Iterator[Example | None]:
    """Yield the example of each record. A record that breaks the format yields None and is added to ``bad``."""
    read = FORMATS[layout.format]
    for values, source, number in records:
        record, example = Record(values, source, number, layout), None
        stats.seen += 1
        layout.awaited.difference_update(values)
        try:
            if isinstance(values, NotAnObject):
                received = shorten_value(values.received)
                raise BadRecord(NOT_AN_OBJECT, OBJECT_EXAMPLE, reason="not an object", received=received)
            columns = values if ALL_COLUMNS in layout.needs.columns else layout.needs.columns
            _check_depth(values, columns)
            if layout.reader is None or layout.reader.model_type:
                record.refuse_media()
                example = with_preference(record, read(record))
            else:
                refuse_other_media(record)
                example = with_images(record, with_preference(record, read(record)))
            if columns:
                extra = {name: values.get(name) for name in columns}
                extra |= {name: values.get(column) for name, column in layout.further_columns.items()}
                example = replace(example, extra=with_paths(extra, record, example))
            if arguments := record.template_arguments():
                example = replace(example, extra={**example.extra, COLUMN: arguments})
                if not example.messages:
                    stats.add(NO_TEMPLATE, example)
        except BadRecord as error:
            bad.append((record, error))
            if on_bad_record == "drop":
                stats.add(drop_reason(error.reason), record.example())
        while layout.dropped_parts:
            stats.add(layout.dropped_parts.pop(), record.example())
        yield example


def _check_depth(values: Values, columns: Iterable[str]) -> None:
    """Raise BadRecord if a column that rows store is nested deeper than code that follows it can read."""
    for name in columns:
        level, depth = [values.get(name)], 0
        while level := [inside for each in level if isinstance(each, list | dict) for inside in _nested_values(each)]:
            depth += 1
            if depth > DEEPEST_NODE:
                raise BadRecord(
                    f'"{name}" is nested more than {DEEPEST_NODE} levels deep.', reason="a column is nested too deeply"
                )


def _nested_values(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values()


def bad_records(bad: BadRecords, are_all: bool) -> list[Problem]:
    """Return a problem for each kind of fault, located at its first record. The last problem has the remedy."""
    kinds: dict[str, list[tuple[Record, BadRecord]]] = {}
    for record, error in bad:
        kinds.setdefault(error.kind, []).append((record, error))
    problems = [_bad_kind(found) for found in list(kinds.values())[:SHOWN]]
    if not are_all:
        last = problems[-1]
        way_out = "Correct the file, or set on_bad_record: drop to skip such records."
        problems[-1] = replace(last, remedy=" ".join(filter(None, (last.remedy, way_out))))
    return problems


def _bad_kind(found: Sequence[tuple[Record, BadRecord]]) -> Problem:
    first, error = found[0]
    others = same_problem_in([record.number for record, _ in found[1:]])
    remedy = " ".join(filter(None, (others, error.remedy)))
    shown = "" if isinstance(first.values, NotAnObject) else f"Record: {shorten_value(first.values)}"
    return Problem(error.what, place(first.source, first.number), shown, remedy)


def same_problem_in(numbers: Sequence[int]) -> str:
    """Return ``Same problem in records 9, 12, 40 and 3 more.``, or "" for no numbers."""
    if not numbers:
        return ""
    noun = "record" if len(numbers) == 1 else "records"
    return f"Same problem in {noun} {few([*map(str, numbers)], SHOWN)}."


def place(source: str, number: int) -> str:
    """Return ``data/train.json, record 17 (line 204)``."""
    line = line_of(Path(source), number)
    return f"{source}, record {number}" + (f" (line {line})" if line else "")
