"""Records -> examples, by the format of their data set.

In: records with their places, and the layout of the data set (``layouts.py`` finds it). Out: examples. A record that
breaks its format is refused with file, record, line and column, or counted and left out (``on_bad_record``). A
conversation whose roles do not alternate is passed on: the template decides whether it can be written.

A format is one function from a record to an example:

    @FORMATS.register("qa", columns={"prompt": "question", "response": "answer"})
    def qa(record: Record) -> Example:
        return record.example(prompt=record.text("prompt"), completion=_response(record))

alpaca, sharegpt and openai are LLaMA-Factory's (src/llamafactory/data/converter.py, August 2026) but for three points.
Its ``openai`` adds "detailed thinking off" to the system message; here nothing is added. It loses the arguments'
structure where OpenAI wrote them as text; here they are read. It joins the answers of parallel calls in Qwen's tags;
here each is a message, and the template joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from burnish.config.errors import Problem, UserError, few
from burnish.config.registry import Registry
from burnish.data.reading.files import line_of
from burnish.data.reading.json_files import Values, shortened
from burnish.data.sets.images import refuse_others, with_images
from burnish.data.sets.preferences import judged
from burnish.data.sets.records import ALL_COLUMNS, BadRecord, Layout, Record, as_text, as_turns
from burnish.data.sets.turns import OPENAI_TAGS, SHAREGPT_TAGS, as_context, conversation, messages_of
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message

SHOWN = 5
"""Number of kinds of faults, and of records of each kind, that one error names; the others are counted."""

Format: TypeAlias = Callable[[Record], Example]
FORMATS: Registry[Format] = Registry("format")
"""Traits of a member:

- ``columns``: part -> column, for data sets that name none;
- ``optional``: the same, for parts that a record may lack;
- ``tags``: names of roles and keys, for data sets that do not give them;
- ``holds``: the kind of its records (``RecordNeeds.kind``), if not answers: "pairs", or a kind of a stage;
- ``finds``: a record -> its columns by part if it is of this format, else None; by default, if all of ``columns`` that
  are not optional are there.
"""


@FORMATS.register(
    "alpaca",
    columns={"prompt": "instruction", "query": "input", "response": "output"},
    optional={"query": "input", "history": "history", "system": "system", "tools": "tools"},
)
def alpaca(record: Record) -> Example:
    """An instruction, its input and the output; earlier turns in the history."""
    if set(record.layout.columns) == {"prompt"} and record.layout.needs.kind != "prompts":
        return record.example(text=record.text("prompt"))  # LLaMA-Factory's way to name a column of plain text
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
    for place, pair in enumerate(record.value("history") or ()):
        column = f"{record.layout.columns['history']}[{place}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRecord(f'"{column}" must be a pair [prompt, response].', received=shortened(pair))
        yield Message("user", as_text(pair[0], f"{column}[0]"))
        yield Message("assistant", as_text(pair[1], f"{column}[1]"))


def _finds_turns(role_key: str) -> Callable[[Values], Mapping[str, str] | None]:
    """Make a function that finds a column with a list of messages whose roles are under ``role_key``."""

    def find(values: Values) -> Mapping[str, str] | None:
        for column in ("messages", "conversations", "conversation"):
            turns = as_turns(values.get(column))
            if turns and role_key in turns[0]:
                return {"messages": column}
        return None

    return find


_BESIDE = {"system": "system", "tools": "tools"}


@FORMATS.register(
    "sharegpt", columns={"messages": "conversations"}, optional=_BESIDE, tags=SHAREGPT_TAGS, finds=_finds_turns("from")
)
def sharegpt(record: Record) -> Example:
    """A list of messages with "from" and "value", or whatever the tags call them."""
    return conversation(record, messages_of(record, "messages"))


@FORMATS.register(
    "openai", columns={"messages": "messages"}, optional=_BESIDE, tags=OPENAI_TAGS, finds=_finds_turns("role")
)
def openai(record: Record) -> Example:
    """A list of messages with "role" and "content", tool calls in "tool_calls"."""
    return conversation(record, messages_of(record, "messages"))


@FORMATS.register(
    "prompt_completion", columns={"prompt": "prompt", "response": "completion"}, optional=_BESIDE, tags=OPENAI_TAGS
)
def prompt_completion(record: Record) -> Example:
    """A prompt and what follows it, both text or both lists of messages; the completion is learned."""
    if isinstance(record.value("prompt"), str) and record.turns_or_none("prompt") is None:
        return record.example(prompt=record.text("prompt"), completion=_response(record))
    before = map(as_context, messages_of(record, "prompt"))
    is_asked = record.layout.needs.kind == "prompts" and not record.value("response")
    return conversation(record, [*before, *([] if is_asked else messages_of(record, "response"))])


def _response(record: Record) -> str | None:
    return record.text_or_none("response") if record.layout.needs.kind == "prompts" else record.text("response")


@FORMATS.register(
    "preference",
    columns={"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    optional={"prompt": "prompt", "system": "system", "tools": "tools", "margin": "margin"},
    tags=OPENAI_TAGS,
    holds="pairs",
)
def preference(record: Record) -> Example:
    """Two answers, text or messages, to a prompt of the same kind; or two that begin with it."""
    prompt = record.value("prompt")
    if prompt is None or (isinstance(prompt, str) and record.turns_or_none("prompt") is None):
        answers_are_text = isinstance(record.value("chosen"), str) and record.turns_or_none("chosen") is None
        column = record.layout.columns.get("prompt", "")
        if answers_are_text and prompt is None and column in record.values and not record.layout.verbatim:
            what = f'"{column}" is null, so the record has no prompt.'
            raise BadRecord(what, f'Set it, or remove "{column}" if both responses begin with the prompt.')
        asked = record.text_or_none("prompt") if answers_are_text else None
        return record.example(prompt=asked, system=record.text_or_none("system"), tools=record.json_text("tools"))
    return conversation(record, messages_of(record, "prompt"))


@FORMATS.register("text", columns={"text": "text"})
def text(record: Record) -> Example:
    """Plain text, for pretraining or already rendered."""
    return record.example(text=record.text("text"))


Bad: TypeAlias = "list[tuple[Record, BadRecord]]"
"""Records that break their format, and how."""


def convert_records(
    records: Iterable[tuple[Values, str, int]], layout: Layout, stats: DataStats, on_bad_record: str = "raise"
) -> list[Example]:
    """Convert records to examples; a record is (values, source, its number in the source from 1).

    Raises:
        UserError: for records that break the format, unless they are dropped and some are left.
    """
    bad: Bad = []
    examples = [e for e in converted(records, layout, stats, on_bad_record, bad) if e is not None]
    if bad and (on_bad_record != "drop" or not examples):
        raise UserError(bad_records(bad, are_all=not examples))
    return examples


def converted(
    records: Iterable[tuple[Values, str, int]], layout: Layout, stats: DataStats, on_bad_record: str, bad: Bad
) -> Iterator[Example | None]:
    """Yield the example of each record, None for one that breaks the format, which is added to ``bad``."""
    read = FORMATS[layout.format]
    for values, source, number in records:
        record, example = Record(values, source, number, layout), None
        stats.seen += 1
        layout.awaited.difference_update(values)
        try:
            if layout.sight is None or layout.sight.model_type:
                record.refuse_media()
                example = judged(record, read(record))
            else:
                refuse_others(record)
                example = with_images(record, judged(record, read(record)))
            if layout.needs.columns:
                wanted = values if ALL_COLUMNS in layout.needs.columns else layout.needs.columns
                example = replace(example, extra={name: values.get(name) for name in wanted})
        except BadRecord as error:
            bad.append((record, error))
            if on_bad_record == "drop":
                stats.add(f"dropped: {error.reason}", record.example())
        while layout.dropped_parts:
            stats.add(layout.dropped_parts.pop(), record.example())
        yield example


def bad_records(bad: Bad, are_all: bool) -> list[Problem]:
    """A problem for each kind of fault, at the first record that has it; the last problem has the remedy."""
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
    others = same_in([record.number for record, _ in found[1:]])
    remedy = " ".join(filter(None, (others, error.remedy)))
    return Problem(error.what, place(first.source, first.number), f"Record: {shortened(first.values)}", remedy)


def same_in(numbers: Sequence[int]) -> str:
    """``The same in records 9, 12, 40 and 3 more.``, or nothing where there are none."""
    if not numbers:
        return ""
    noun = "record" if len(numbers) == 1 else "records"
    return f"Same problem in {noun} {few([*map(str, numbers)], SHOWN)}."


def place(source: str, number: int) -> str:
    """``data/train.json, record 17 (line 204)``."""
    line = line_of(Path(source), number)
    return f"{source}, record {number}" + (f" (line {line})" if line else "")
