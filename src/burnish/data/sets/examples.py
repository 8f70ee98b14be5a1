"""The examples of a run, in memory or streamed; their content hash; and the check for empty responses.

``StreamedExamples`` converts a record when it is accessed, so problems of a record are found then. The error messages
are the same as for a dataset in memory.
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
from burnish.data.sets.formats import BadRecords, bad_records, examples_from, place, same_problem_in
from burnish.data.sets.preferences import last_answer, response_text
from burnish.data.sets.records import Layout
from burnish.data.stats import DataStats, drop_reason, keep_reason
from burnish.loop.types import RESPONSE_ROLES, Example, Message
from burnish.utils.sequences import LazySequence

if TYPE_CHECKING:
    from numpy import ndarray

Located: TypeAlias = tuple[Values, str, int]
"""A record, its source for error messages, and its number within the source, from 1."""

EMPTY = drop_reason("all responses are empty")
EMPTY_KEPT = keep_reason("a response is empty")
MARKS = ("<image>", "<video>", "<audio>")
MARK_IN_TEXT = keep_reason("{mark} is tokenized as plain text")


def content_hash(examples: Sequence[Example]) -> str:
    """Return a hash of the content and order of the examples. It does not depend on file names."""
    hashed = blake2b(digest_size=16)
    for example in examples:
        parts = [example.system, example.tools, example.text, example.prompt, example.completion]
        for turn in example.messages:
            parts += (turn.role, *_hashed_content(turn), str(turn.train), str(turn.weight))
        if example.chosen is not None or example.tag is not None:
            parts += [repr((example.chosen, example.rejected, example.tag, example.other, example.margin))]
        if example.extra:
            parts.append(json.dumps(example.extra, sort_keys=True, default=str))
        # Each part is preceded by its length, so that "ab" + "c" and "a" + "bc" have different hashes.
        sized = ["-" if part is None else f"{len(part)}:{part}" for part in (str(len(parts)), *parts)]
        hashed.update("".join(sized).encode(errors="surrogatepass"))
    return hashed.hexdigest()


def _hashed_content(message: Message) -> list[str]:
    """Return the text of a message, or kind and value of each of its parts; and the original message, if it is kept."""
    if isinstance(message.content, str):
        found = [message.content]
    else:
        found = ["parts", *(text for part in message.content for text in (part.kind, _identity(part.value)))]
    found += ["reasoning"] if message.has_reasoning else []
    return found if message.raw is None else [*found, json.dumps(message.raw, sort_keys=True, default=str)]


def _identity(value: Any) -> str:
    """Return a text, or the string that identifies an image."""
    return value if isinstance(value, str) else str(value.identity)


# --- examples in memory, and streamed examples ------------------------------------------------------------------------


class Examples(LazySequence[Example]):
    """Base class for the examples of a run, or of one dataset."""

    is_streamed = False
    """True if records stay in their files, so that problems of a record are found when it is accessed."""

    @cached_property
    def content_hash(self) -> str:
        """A hash of the content and order of the examples."""
        raise NotImplementedError

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        """Return these examples, None for records that give none. Dropped records are counted in ``stats``."""
        raise NotImplementedError

    def select(self, indices: Sequence[int]) -> Examples:
        """Return the examples at ``indices``, in that order."""
        raise NotImplementedError

    def drop_unanswered(self, on_empty_target: str | None, stats: DataStats) -> Examples:
        """Return the examples without those whose responses are all empty. Streamed examples are not filtered here."""
        return self

    def load_in_memory(self, stats: DataStats) -> ListedExamples:
        """Return all examples in memory, without records that give none."""
        return ListedExamples([example for example in self.make(range(len(self)), stats) if example is not None])

    def places(self) -> Callable[[int], str]:
        """Return a function from index to the file and record of an example. It holds no text of the examples."""
        raise NotImplementedError


class ListedExamples(Examples):
    """Examples in memory."""

    def __init__(self, examples: Sequence[Example] = ()) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def item(self, index: int) -> Example:
        return self.examples[index]

    @cached_property
    def content_hash(self) -> str:
        return content_hash(self.examples)

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        return [self.examples[index] for index in indices]

    def make_one(self, index: int, stats: DataStats, on_bad_record: str, bad: BadRecords) -> Example:
        return self.examples[index]

    def select(self, indices: Sequence[int]) -> ListedExamples:
        return ListedExamples([self.examples[index] for index in indices])

    def drop_unanswered(self, on_empty_target: str | None, stats: DataStats) -> ListedExamples:
        """Return the examples without those whose responses are all empty. Raises UserError if none is left."""
        answered = [e for e in with_answers(self.examples, on_empty_target, stats) if e is not None]
        if self.examples and not answered:
            raise UserError(empty_problem(self.examples, are_all=True))
        return ListedExamples(answered)

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
        files: indexed files.
        chosen: record numbers of the dataset, counted across all files.
        layout: format and columns of the records.
    """

    files: Sequence[Table]
    chosen: Sequence[int]
    layout: Layout

    def __len__(self) -> int:
        return len(self.chosen)

    def locate(self, index: int) -> Located:
        """Return the record of an example, its file, and its number within the file."""
        number = self.chosen[index]
        for file in self.files:
            if number < len(file):
                return file[number], str(file.path), number + 1
            number -= len(file)
        raise IndexError(index)

    def make_one(self, index: int, stats: DataStats, on_bad_record: str, bad: BadRecords) -> Example | None:
        """Return an example. If its record breaks the format, return None and add the problem to ``bad``."""
        return next(examples_from([self.locate(index)], self.layout, stats, on_bad_record, bad))

    @cached_property
    def content_hash(self) -> str:
        """A hash of file contents, layout and selected records."""
        layout = self.layout
        known = [sorted(layout.columns.items()), sorted(layout.tags.items()), layout.format]
        known += [sorted(layout.further_columns.items())] if layout.further_columns else []
        hashed = blake2b(json.dumps([[f.content_hash for f in self.files], known]).encode(), digest_size=16)
        hashed.update(repr(self.chosen).encode())
        return hashed.hexdigest()


class StreamedExamples(Examples):
    """Examples of several datasets in a given order, each created when it is accessed.

    Args:
        sets: the datasets. A dataset whose records cannot stay in a file is in memory.
        order: (N, 2) int64, dataset index and row within it for each example.
        on_bad_record: what to do with records that break their format: "raise" or "drop".
        on_empty_target: what to do with records whose responses are all empty: "raise", "drop" or "keep".
        adds_kl_responses: give each example the response of an earlier record with another text, as
            ``data.sets.preferences.with_other_answers`` does for examples in memory.
    """

    is_streamed = True

    def __init__(
        self, sets: Sequence[ListedExamples | StreamedSet], order: ndarray[Any, Any], on_bad_record: str = "raise",
        on_empty_target: str = "drop", adds_kl_responses: bool = False,
    ) -> None:  # fmt: skip
        self.sets, self.order = sets, order
        self.on_bad_record, self.on_empty_target = on_bad_record, on_empty_target
        self.adds_kl_responses = adds_kl_responses

    def __len__(self) -> int:
        return len(self.order)

    def make(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        """Return these examples, None for dropped records.

        Raises:
            UserError: with all of these records that break their format or have empty responses, unless such records
                are dropped.
        """
        found = self._read(indices, stats)
        if not self.adds_kl_responses:
            return found
        return [one and self._with_other(one, index) for one, index in zip(found, indices, strict=True)]

    def _read(self, indices: Sequence[int], stats: DataStats) -> list[Example | None]:
        bad: BadRecords = []
        places = [self.order[index] for index in indices]
        found = [self.sets[int(s)].make_one(int(row), stats, self.on_bad_record, bad) for s, row in places]
        if bad and self.on_bad_record != "drop":
            raise UserError(bad_records(bad, are_all=False))
        return with_answers(found, self.on_empty_target, stats)

    def _with_other(self, example: Example, index: int) -> Example:
        for back in range(1, min(len(self), MISMATCH_WINDOW + 1)):
            try:
                (before,) = self._read([(index - back) % len(self)], DataStats())
            except UserError:  # a bad record raises when it is accessed itself
                continue
            if before is not None and response_text(last_answer(before)) != response_text(last_answer(example)):
                return replace(example, other=last_answer(before))
        return example

    def select(self, indices: Sequence[int]) -> StreamedExamples:
        """The examples at ``indices``, in that order."""
        chosen = self.order[indices]
        return StreamedExamples(self.sets, chosen, self.on_bad_record, self.on_empty_target, self.adds_kl_responses)

    def item(self, index: int) -> Example:
        """Return one example. Raises IndexError if its record gives none."""
        (example,) = self.make([index], DataStats())
        if example is None:
            raise IndexError(f"example {index} has no trainable tokens")
        return example

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [example for example in self.make(indices, DataStats()) if example is not None]

    def places(self) -> Callable[[int], str]:
        def place(index: int) -> str:
            (found,) = self._read([index], DataStats())
            return f"example {index + 1}" if found is None else found.place

        return place

    @cached_property
    def content_hash(self) -> str:
        """A hash of file contents, layouts, options and order."""
        known = [*(some.content_hash for some in self.sets), self.on_bad_record, self.on_empty_target]
        return blake2b(json.dumps(known).encode() + self.order.tobytes(), digest_size=16).hexdigest()


MISMATCH_WINDOW = 100
"""Number of earlier records searched for a response with another text."""


# --- empty responses --------------------------------------------------------------------------------------------------


def with_answers(
    examples: Sequence[Example | None], on_empty_target: str | None, stats: DataStats
) -> list[Example | None]:
    """Return the examples, with None in place of those whose responses are all empty.

    Examples without any response turn are kept here. They are counted later, by the template.

    Args:
        on_empty_target: see ``StreamedExamples``; None if responses are not used.

    Raises:
        UserError: if a response is empty and ``on_empty_target`` is "raise".
    """
    found: list[Example | None] = []
    empty: list[Example] = []
    for example in examples:
        answers = _answers(example) if example is not None and on_empty_target is not None else []
        is_empty = bool(answers) and on_empty_target != "keep" and not any(answer.strip() for answer in answers)
        if example is not None and is_empty:
            stats.add(EMPTY, example)
            empty.append(example)
        elif example is not None:
            if not all(answer.strip() for answer in answers):
                stats.add(EMPTY_KEPT, example)
            for mark in marks_in(example):
                stats.add(MARK_IN_TEXT.format(mark=mark), example)
        found.append(None if is_empty else example)
    if empty and on_empty_target == "raise":
        raise UserError(empty_problem(empty, are_all=len(empty) == len(examples)))
    return found


def marks_in(example: Example) -> list[str]:
    """Return the placeholders of images, videos and audio that occur in the texts of an example."""
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
    return [turn.text for turn in example.messages if turn.role in RESPONSE_ROLES]


def empty_problem(empty: Sequence[Example], are_all: bool) -> Problem:
    """Return the problem that the responses of ``empty`` are empty."""
    others = same_problem_in([example.number for example in empty[1:]])
    what = "the assistant turn is empty."
    remedy = "Fill in the response, or set on_empty_target: drop."
    if are_all:
        remedy = "All records are affected. Check which column is used as the response."
    return Problem(f"{what} {others}".strip(), where=place(empty[0].source, empty[0].number), remedy=remedy)
