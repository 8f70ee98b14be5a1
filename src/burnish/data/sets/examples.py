"""The examples of a run: a hash of their content, a check for answers, and examples that are streamed.

In: records and their layout. Out: examples. ``StreamedExamples`` makes an example when it is used, so problems of its
record are found then; the error sentences are those of a dataset that is read as a whole.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from burnish.config.errors import Problem, UserError
from burnish.data.length import texts_in
from burnish.data.reading.json_files import Values
from burnish.data.reading.record_index import Table
from burnish.data.sets.formats import Bad, bad_records, converted, place, same_in
from burnish.data.sets.preferences import last_answer, said
from burnish.data.sets.records import Layout
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from burnish.utils.sequences import OnDemand

if TYPE_CHECKING:
    from numpy import ndarray

Located: TypeAlias = tuple[Values, str, int]
"""A record, its source as an error names it, and its number in it from 1."""

EMPTY = "dropped: all responses are empty"
EMPTY_KEPT = "kept: a response is empty"
MARKS = ("<image>", "<video>", "<audio>")
MARKED = "kept: {mark} is trained as plain text"


def content_hash(examples: Sequence[Example]) -> str:
    """A hash of the content of the examples, in their order; their file names do not count."""
    hashed = blake2b(digest_size=16)
    for example in examples:
        parts = [example.system, example.tools, example.text, example.prompt, example.completion]
        for turn in example.messages:
            parts += (turn.role, *_hashed_content(turn), str(turn.train), str(turn.weight))
        if example.chosen is not None or example.tag is not None:
            parts += [repr((example.chosen, example.rejected, example.tag, example.other, example.margin))]
        if example.extra:
            parts.append(json.dumps(example.extra, sort_keys=True, default=str))
        # Each part has its length before it, so that "ab" + "c" and "a" + "bc" hash differently.
        sized = ["-" if part is None else f"{len(part)}:{part}" for part in (str(len(parts)), *parts)]
        hashed.update("".join(sized).encode(errors="surrogatepass"))
    return hashed.hexdigest()


def _hashed_content(message: Message) -> list[str]:
    """What a message says: its text; or the kind and the value of each part. And the message as its record has it."""
    if isinstance(message.content, str):
        found = [message.content]
    else:
        found = ["parts", *(text for part in message.content for text in (part.kind, _identity(part.value)))]
    return found if message.raw is None else [*found, json.dumps(message.raw, sort_keys=True, default=str)]


def _identity(value: Any) -> str:
    """A text, or what tells an image from others."""
    return value if isinstance(value, str) else str(value.identity)


# --- examples in memory, and examples made when they are used ---------------------------------------------------------


class Examples(OnDemand[Example]):
    """The examples of a run, or of one set in it."""

    is_streamed = False
    """True where the records stay in their files, so that problems of a record are found when it is used."""

    @cached_property
    def content_hash(self) -> str:
        """Changes with what the examples say, and with their order."""
        raise NotImplementedError

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        """Make these examples, None where a record gives none; dropped records are counted."""
        raise NotImplementedError

    def chosen(self, indices: Sequence[int]) -> Examples:
        """The examples at ``indices``, in that order."""
        raise NotImplementedError

    def answered(self, on_empty_target: str, stats: DataStats) -> Examples:
        """The examples that have something to learn, if that is known before they are used."""
        return self

    def held(self, stats: DataStats) -> ListedExamples:
        """All examples, in memory, without those that a record does not give."""
        return ListedExamples([example for example in self.make(range(len(self)), stats) if example is not None])

    def places(self) -> Callable[[int], str]:
        """Return a function that tells the file and record of an example, and that holds no text of it."""
        raise NotImplementedError


class ListedExamples(Examples):
    """Examples in memory."""

    def __init__(self, examples: Sequence[Example] = ()) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def made(self, index: int) -> Example:
        return self.examples[index]

    @cached_property
    def content_hash(self) -> str:
        return content_hash(self.examples)

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        return [self.examples[index] for index in indices]

    def make_one(self, index: int, stats: DataStats, on_bad_record: str, bad: Bad) -> Example:
        return self.examples[index]

    def chosen(self, indices: Sequence[int]) -> ListedExamples:
        return ListedExamples([self.examples[index] for index in indices])

    def answered(self, on_empty_target: str, stats: DataStats) -> ListedExamples:
        """The examples that have something to learn. Raises UserError where there are examples, and none has."""
        kept = [e for e in with_answers(self.examples, on_empty_target, stats) if e is not None]
        if self.examples and not kept:
            raise UserError(empty_problem(self.examples, are_all=True))
        return ListedExamples(kept)

    def places(self) -> Callable[[int], str]:
        sources = list(dict.fromkeys(example.source for example in self.examples))
        index_of = {source: index for index, source in enumerate(sources)}
        which = array("i", (index_of[example.source] for example in self.examples))
        numbers = array("q", (example.number for example in self.examples))
        return lambda index: f"{sources[which[index]]}, record {numbers[index]}"


@dataclass(frozen=True)
class StreamedSet:
    """One dataset whose records stay in their files.

    Args:
        chosen: the records that belong to it, numbered across all files.
        layout: how they are read.
    """

    files: Sequence[Table]
    chosen: Sequence[int]
    layout: Layout

    def __len__(self) -> int:
        return len(self.chosen)

    def located(self, index: int) -> Located:
        """The record of an example, its file, and its number in it."""
        number = self.chosen[index]
        for file in self.files:
            if number < len(file):
                return file[number], str(file.path), number + 1
            number -= len(file)
        raise IndexError(index)

    def make_one(self, index: int, stats: DataStats, on_bad_record: str, bad: Bad) -> Example | None:
        """Make an example; None, and its problem in ``bad``, where the record breaks its format."""
        return next(converted([self.located(index)], self.layout, stats, on_bad_record, bad))

    @cached_property
    def content_hash(self) -> str:
        """A hash of the files' bytes, of the layout, and of the choice of records."""
        layout = self.layout
        known = [sorted(layout.columns.items()), sorted(layout.tags.items()), layout.format]
        hashed = blake2b(json.dumps([[f.content_hash for f in self.files], known]).encode(), digest_size=16)
        hashed.update(repr(self.chosen).encode())
        return hashed.hexdigest()


class StreamedExamples(Examples):
    """Examples of several datasets in an order, each made when it is used.

    Args:
        sets: the datasets; one whose records cannot stay in a file is in memory.
        order: (N, 2) dataset, and row in it, of each example.
        on_bad_record, on_empty_target: treatment of records that break their format, or whose answers are all empty.
        looks_back: each example gets the answer of an earlier record with another text, as
            ``data.sets.preferences.with_other_answers`` does for examples in memory.
    """

    is_streamed = True

    def __init__(
        self, sets: Sequence[ListedExamples | StreamedSet], order: ndarray[Any, Any], on_bad_record: str = "raise",
        on_empty_target: str = "drop", looks_back: bool = False,
    ) -> None:  # fmt: skip
        self.sets, self.order = sets, order
        self.on_bad_record, self.on_empty_target, self.looks_back = on_bad_record, on_empty_target, looks_back

    def __len__(self) -> int:
        return len(self.order)

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        """Make these examples.

        Raises:
            UserError: with all records among these that break their format or have no answer, where that is not
                allowed.
        """
        found = self._read(indices, stats)
        if not self.looks_back:
            return found
        return [one and self._with_other(one, index) for one, index in zip(found, indices, strict=True)]

    def _read(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        bad: Bad = []
        places = [self.order[index] for index in indices]
        found = [self.sets[int(s)].make_one(int(row), stats, self.on_bad_record, bad) for s, row in places]
        if bad and self.on_bad_record != "drop":
            raise UserError(bad_records(bad, are_all=False))
        return with_answers(found, self.on_empty_target, stats)

    def _with_other(self, example: Example, index: int) -> Example:
        for back in range(1, min(len(self), LOOKED_BACK + 1)):
            try:
                (before,) = self._read([(index - back) % len(self)], DataStats())
            except UserError:  # a bad record, which stops the run when it is used itself
                continue
            if before is not None and said(last_answer(before)) != said(last_answer(example)):
                return replace(example, other=last_answer(before))
        return example

    def chosen(self, indices: Sequence[int]) -> StreamedExamples:
        """The examples at ``indices``, in that order."""
        chosen = self.order[indices]
        return StreamedExamples(self.sets, chosen, self.on_bad_record, self.on_empty_target, self.looks_back)

    def made(self, index: int) -> Example:
        """Make one example. Raises IndexError for a record that gives none."""
        (example,) = self.make([index], DataStats())
        if example is None:
            raise IndexError(f"example {index} has no trainable tokens")
        return example

    def some(self, indices: Sequence[int]) -> list[Example]:
        return [example for example in self.make(indices, DataStats()) if example is not None]

    def places(self) -> Callable[[int], str]:
        def place(index: int) -> str:
            (found,) = self._read([index], DataStats())
            return f"example {index + 1}" if found is None else found.place

        return place

    @cached_property
    def content_hash(self) -> str:
        """Changes with the content of the files, how it is read, and the order."""
        known = [*(some.content_hash for some in self.sets), self.on_bad_record, self.on_empty_target]
        return blake2b(json.dumps(known).encode() + self.order.tobytes(), digest_size=16).hexdigest()


LOOKED_BACK = 100
"""Records among which an answer with another text is looked for."""


# --- answers ----------------------------------------------------------------------------------------------------------


def with_answers(examples: Sequence[Example | None], on_empty_target: str, stats: DataStats) -> list[Example | None]:
    """The examples, None in place of those that have nothing to learn. Examples without any answer are counted later,
    by the template.

    Raises:
        UserError: for those that have nothing to learn, under "raise".
    """
    kept: list[Example | None] = []
    empty: list[Example] = []
    for example in examples:
        answers = _answers(example) if example is not None else []
        is_empty = bool(answers) and on_empty_target != "keep" and not any(answer.strip() for answer in answers)
        if example is not None and is_empty:
            stats.add(EMPTY, example)
            empty.append(example)
        elif example is not None:
            if not all(answer.strip() for answer in answers):
                stats.add(EMPTY_KEPT, example)
            for mark in marks_in(example):
                stats.add(MARKED.format(mark=mark), example)
        kept.append(None if is_empty else example)
    if empty and on_empty_target == "raise":
        raise UserError(empty_problem(empty, are_all=len(empty) == len(examples)))
    return kept


def marks_in(example: Example) -> list[str]:
    """The marks of images, videos and audio in a conversation, or in a prompt and its answers."""
    parts = [
        example.text, example.system, example.prompt, example.completion, example.messages, example.chosen,
        example.rejected,
    ]  # fmt: skip
    texts = [text for part in parts if part for text in texts_in(part)]
    return [mark for mark in MARKS if any(mark in text for text in texts)]


def _answers(example: Example) -> list[str]:
    if example.chosen is not None:
        return []  # a pair with an empty answer is a bad record
    if example.completion is not None:
        return [example.completion]
    return [turn.text for turn in example.messages if turn.role in ("assistant", "function")]


def empty_problem(empty: Sequence[Example], are_all: bool) -> Problem:
    """The problem that the answers of ``empty`` are all empty."""
    others = same_in([example.number for example in empty[1:]])
    what = "the assistant turn is empty."
    remedy = "Fill in the response, or set on_empty_target: drop."
    if are_all:
        remedy = "All records are affected. Check which column is used as the response."
    return Problem(f"{what} {others}".strip(), where=place(empty[0].source, empty[0].number), remedy=remedy)
