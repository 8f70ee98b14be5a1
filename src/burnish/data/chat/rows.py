"""A template with a tokenizer: encodes examples, and provides stop tokens, fingerprints and the chat template."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol, TypeVar

from burnish.config.errors import UserError
from burnish.data.chat.encoding import NO_TEXT, NOT_PLAIN_TEXT, ConversationEncoder
from burnish.data.chat.labels import (
    EncodedConversation,
    EndTokens,
    Segment,
    TemplateChoices,
    Turn,
    label_turns,
    masked_labels,
)
from burnish.data.chat.rendering import UnreadableTemplate
from burnish.data.chat.slots import BrokenConversation
from burnish.data.chat.table import TemplateSpec
from burnish.data.chat.tools.tools import ToolError
from burnish.data.images.family import Family
from burnish.data.images.image_file import BadImage, ImageFile, UnsupportedMedia
from burnish.data.images.in_rows import Marks, images_column, images_in, remove_marks
from burnish.data.stats import DataStats, drop_reason, keep_reason
from burnish.data.template_arguments import THINKING, UNUSED, arguments_of
from burnish.data.tokens.encoder import Encoder, shared_start
from burnish.loop.types import Example, Ids, Row
from burnish.utils.json_files import quote_value

OPTIONS_OF_ROWS: Final = (
    "train_on_prompt",
    "mask_history",
    "train_on_eos",
    "enable_thinking",
    "preserve_thinking",
    "truncation",
    "on_too_long",
)


Encoded = TypeVar("Encoded", list[Turn], Row)

SHRUNK = keep_reason("images resized to fit into cutoff_len (image_fit: shrink)")
SHRINKING, SMALLEST = 0.8, 28 * 28
"""Factor applied to the pixels of images in each attempt to fit a row, and the minimum pixels of an image."""


class TemplateFormat(Protocol):
    """Formats conversations: with a named template (``slots.py``) or with Jinja (``chat_template.py``).

    It writes one placeholder of ``family`` per image and, with ``writes_openings``, ``family.opening`` before a video.
    """

    writes_openings: bool
    encoder: Encoder
    family: Family | None

    @property
    def closing_word(self) -> str | None:
        """Token that closes a row if turns have no end token of their own, else None."""
        ...

    def read_special_tokens(self) -> None: ...
    @property
    def forgets_thoughts(self) -> bool:
        """Whether the reasoning of responses before the last one is removed."""
        ...

    def answering_last(self) -> TemplateFormat:
        """Return the format for training on the last response only, where earlier reasoning may be removed."""
        ...

    @property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments that a record can set."""
        ...

    def with_arguments(self, values: Mapping[str, Any]) -> TemplateFormat:
        """Return the format with arguments in place of those of the run; a name that is not used has no effect."""
        ...

    def turns(self, examples: Sequence[Example], stats: DataStats) -> list[list[Turn] | None]: ...
    def prompt(self, example: Example) -> list[int]: ...
    def end_words(self) -> tuple[str, ...]: ...
    def jinja(self) -> str | dict[str, str]: ...
    def identity(self) -> Any: ...


class Template(ConversationEncoder):
    """A template with a tokenizer.

    Args:
        name: name in messages.
        form: formatting of conversations.
        options: ``TemplateOptions`` and ``EncodingOptions``.
        spec: the named template; None for a tokenizer's own chat template.
        cutoff_len: maximum row length, if different from the option: packing may need another length.

    ``notes`` are messages for the user about automatic choices.
    """

    def __init__(
        self, name: str, form: TemplateFormat, options: TemplateChoices, tokenizer: Any, spec: TemplateSpec | None,
        cutoff_len: int | None,
    ) -> None:  # fmt: skip
        super().__init__(options, tokenizer, cutoff_len or options.cutoff_len)
        self.name, self.form, self.options, self.spec = name, form, options, spec
        self.marks = None if form.family is None else Marks(form.family, form.writes_openings)
        self.notes: list[str] = []
        self.images_refused: UserError | None = None  # why a vision model cannot be given images

    def answering_last(self) -> Template:
        """Return the template as it formats conversations whose last response is compared or scored (see
        ``TemplateFormat.answering_last``)."""
        found = copy(self)
        found.form = self.form.answering_last()
        return found

    def prompt(self, example: Example) -> list[int]:
        """Return the ids up to the beginning of the next response. A final response in the example is ignored."""
        return list(self.prompt_row(example)["input_ids"])

    def prompt_row(self, example: Example, images: Sequence[ImageFile] | None = None) -> Row:
        """Return ``prompt`` as a row: ``input_ids``, and ``images`` if there are any.

        Args:
            images: images that are used in place of those before the response, for instance smaller ones.

        Raises:
            BadImage: if the model refuses an image, or the template does not write one mark per image.
        """
        form = self._form_of(self.form, example)
        if self.marks is None:
            return {"input_ids": form.prompt(example)}
        example = remove_marks(example)
        ids = array("i", form.prompt(self.marks.for_template(example)))
        images = _images_before_response(example) if images is None else images
        made = self.marks.expand(self.marks.front(len(images)) + ids, images)
        row: Row = {"input_ids": made.ids.tolist()}
        return row | {"images": images_column(made.images)} if images else row

    def stop_token_ids(self, tokenizer: Any = None) -> list[int]:
        """Return the ids that end generation: EOS and the template's stop words."""
        tokenizer = tokenizer or self.tokenizer
        ids = {tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, self.form.end_words())}
        return sorted(ids - {None})

    def end_ids(self) -> frozenset[int]:
        """Return the ids that end a message: the stop tokens, except those that open the next message."""
        opening = self.spec.opening_words if self.spec else ()
        return frozenset(self.stop_token_ids()) - set(map(self.tokenizer.convert_tokens_to_ids, opening))

    def jinja(self) -> str | dict[str, str]:
        """Return a chat template for the tokenizer that renders the trained tokens; a dictionary if it has several."""
        return self.form.jinja()

    @property
    def forgets_thoughts(self) -> bool:
        """Whether the reasoning of responses before the last one is removed."""
        return self.spec is not None and self.spec.reasoning and self.form.forgets_thoughts

    @property
    def fingerprint(self) -> str:
        """A hash that changes if the rows of the same examples could change."""
        options = {name: getattr(self.options, name) for name in OPTIONS_OF_ROWS}
        known = [self.form.identity(), self.form.encoder.identity, options, self.cutoff_len]
        known += [] if self.form.family is None else [self.form.family.identity]
        return _hash_identity([*known, "without earlier reasoning"] if self.forgets_thoughts else known)

    @property
    def form_fingerprint(self) -> str:
        """A hash of the text around the messages; it does not depend on labels or truncation."""
        return _hash_identity(self.form.identity())

    @property
    def image_fingerprint(self) -> str:
        """A hash that changes if the pixels of an image could change; "" for a text model."""
        return "" if self.form.family is None else _hash_identity(self.form.family.identity)

    @property
    def tokenizer_fingerprint(self) -> str:
        """A hash that changes if the token ids of a text could change."""
        return _hash_identity(self.form.encoder.identity)

    def _chats(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        form = self.form.answering_last() if last_only else self.form
        word = form.closing_word
        closing = None if word is None else int(self.tokenizer.convert_tokens_to_ids(word))
        ends = EndTokens(self.end_ids(), closing if self.spec and not last_only else None)
        trained_ids = frozenset() if self.options.train_on_eos == "none" else ends.token_ids
        examples = examples if self.marks is None else [remove_marks(example) for example in examples]
        written = examples if self.marks is None else [self.marks.for_template(example) for example in examples]
        found = self._turns(form, written, stats) if examples else []
        for example, turns in zip(examples, found, strict=True):
            turns = turns and self._seen(example, turns, stats)
            if turns is None:
                yield None
                continue
            labelled = label_turns(turns[-1:] if last_only else turns, self.options, ends)
            if self.marks is not None:
                labelled = [
                    (self.marks.without_placeholders(a), self.marks.without_placeholders(b)) for a, b in labelled
                ]
            yield EncodedConversation([*turns[:-1], *labelled] if last_only else labelled, closing, trained_ids)

    def _turns(self, form: TemplateFormat, examples: Sequence[Example], stats: DataStats) -> list[list[Turn] | None]:
        """Return the turns of each example, formatted with the arguments of its record."""
        if not any(map(arguments_of, examples)):
            return form.turns(examples, stats)
        groups: dict[str, list[int]] = {}
        for at, example in enumerate(examples):
            self._count_unused_arguments(example, stats)
            groups.setdefault(json.dumps(arguments_of(example), sort_keys=True), []).append(at)
        counted, found = DataStats(), dict[int, list[Turn] | None]()
        for places in groups.values():
            some = [examples[at] for at in places]
            own = self._form_of(form, some[0])
            found |= zip(places, own.turns(some, counted), strict=True)
        order = {(example.source, example.number): at for at, example in enumerate(examples)}
        for reason, numbers in counted.records.items():
            stats.records[reason] += sorted(numbers, key=lambda place: order[place])
        return [found[at] for at in range(len(examples))]

    def _form_of(self, form: TemplateFormat, example: Example) -> TemplateFormat:
        """Return the format with the arguments of a record.

        Raises:
            UserError: if the template cannot have them.
        """
        values = arguments_of(example)
        if not values:
            return form
        try:
            if self.spec is not None:
                self._check_arguments(self.spec, values)
            return form.with_arguments(values)
        except UserError as error:
            problems = [replace(problem, where=problem.where or example.place) for problem in error.problems]
            raise UserError(problems) from error

    def _count_unused_arguments(self, example: Example, stats: DataStats) -> None:
        for name in sorted(arguments_of(example).keys() - self.form.arguments):
            stats.add(UNUSED.format(name=name), example)

    def _check_arguments(self, spec: TemplateSpec, values: Mapping[str, Any]) -> None:
        """Raise UserError if a named template does not accept these arguments."""
        jinja = "a Jinja template: remove template to use the tokenizer's own, or set it to a .jinja file."
        for name, value in values.items():
            if name not in THINKING:
                what = f'the template "{spec.name}" has no argument "{name}" (chat_template_kwargs).'
                raise UserError(what, remedy=f"Use only {' and '.join(sorted(THINKING))}, or {jinja}")
            if not isinstance(value, bool):
                what = f'"{name}" in chat_template_kwargs must be true or false. Received: {quote_value(value)}.'
                raise UserError(what)

    def _seen(self, example: Example, turns: list[Turn], stats: DataStats) -> list[Turn] | None:
        """Return the turns with image tokens inserted; None if an image cannot be used (counted in ``stats``)."""
        if self.marks is None:
            if images_in(example):
                self._refuse_images(example)
            return turns
        images = images_in(example)
        try:
            if not self.marks.family.source.shrinks:
                return self.marks.turns(turns, images)
            encode = partial(self.marks.turns, turns)
            available = self.cutoff_len - (self.form.closing_word is not None)
            return _with_fitting_images(example, images, encode, _length_of_turns, available, stats)
        except UnsupportedMedia as error:
            raise UserError(f"The record cannot be tokenized: {error}", where=example.place) from error
        except BadImage as error:
            stats.add(drop_reason(str(error)), example)
            return None

    def _refuse_images(self, example: Example) -> None:
        what, remedy = "the record contains images, but the model supports text only.", "Remove the image column."
        if self.images_refused is not None:
            (problem, *_) = self.images_refused.problems
            where = f"{problem.where}: " if problem.where else ""
            what, remedy = f"the images of the record cannot be used: {where}{problem.what}", problem.remedy
        raise UserError(what, example.place, remedy=remedy)

    def _texts(self, examples: Sequence[Example], stats: DataStats) -> Iterator[EncodedConversation | None]:
        """Encode plain texts and completions. They have no template around them and may contain control tokens."""
        ending, escaped = self.spec.text_end if self.spec else "", self.form.encoder.with_control_tokens
        plain = [e.text + ending if e.text else "" for e in examples]
        texts = [
            escaped(text if e.completion is None else (e.prompt or "") + e.completion)
            for e, text in zip(examples, plain, strict=True)
        ]
        prompts = [escaped(example.prompt or "") for example in examples]
        ids = self.form.encoder.encode(filter(None, (*texts, *prompts)))
        opening = self.opening_ids() if examples else array("i")
        for example, text, prompt in zip(examples, texts, prompts, strict=True):
            if not text:
                stats.add(NOT_PLAIN_TEXT if example.messages else NO_TEXT, example)
                yield None
                continue
            trained_from = shared_start(ids[prompt], ids[text])[0] if prompt else 0
            has_end = example.completion is None and bool(ending)
            yield self._text(opening + ids[text], len(opening), len(opening) + trained_from, has_end)

    def completion_prompt(self, example: Example) -> Ids:
        """Return the ids before the completion of a text record, as in its row."""
        (found,) = self._texts([example], DataStats())
        return array("i") if found is None else found.turns[0][0].ids

    def _prompt_rows(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        texts = [self.form.encoder.with_control_tokens(e.text or e.prompt or "") for e in examples]
        ids = self.form.encoder.encode(filter(None, texts))
        opening = self.opening_ids() if any(texts) else array("i")
        return [
            {"input_ids": opening + ids[text]}
            if text
            else self._request_row(example, stats)
            if example.messages
            else {"input_ids": array("i")}
            for example, text in zip(examples, texts, strict=True)
        ]

    def _request_row(self, example: Example, stats: DataStats) -> Row | None:
        """Return the row of a conversation up to its response; None if an image cannot be used (counted)."""
        if self.marks is None and images_in(example):
            self._refuse_images(example)
        if arguments_of(example):
            self._count_unused_arguments(example, stats)
        try:
            if self.marks is None or not self.marks.family.source.shrinks:
                row = self.prompt_row(example)
            else:
                images, encode = _images_before_response(example), partial(self.prompt_row, example)
                row = _with_fitting_images(example, images, encode, _length_of_row, self.cutoff_len, stats)
        except UnsupportedMedia as error:
            raise UserError(f"The record cannot be tokenized: {error}", where=example.place) from error
        except (BadImage, BrokenConversation, ToolError, UnreadableTemplate) as error:
            stats.add(drop_reason(str(error)), example)
            return None
        return {**row, "input_ids": array("i", row["input_ids"])}

    def _text(self, ids: Ids, opening: int, trained_from: int, has_end: bool) -> EncodedConversation:
        """Return one turn of context and trained part. EOS is appended unless the text already has an end token."""
        eos = self.tokenizer.eos_token_id
        is_open = not has_end and eos is not None and ids[-1] != eos
        source, target = ids[:trained_from], ids[trained_from:] + array("i", [eos] if is_open else [])
        last = len(target) - (has_end or eos is not None)
        labels = source[:] if self.options.train_on_prompt else masked_labels(len(source))
        prompt = Segment(source, lambda: [at >= opening for at in range(len(source))], labels=labels)
        return EncodedConversation(
            [(prompt, Segment(target, lambda: [at < last for at in range(len(target))], labels=target))]
        )

    def opening_ids(self) -> Ids:
        """Return the BOS token if the tokenizer puts it before every text, else nothing."""
        bos = self.tokenizer.bos_token_id
        own = self.tokenizer("", add_special_tokens=True)["input_ids"]
        return array("i", [bos] if bos is not None and list(own[:1]) == [bos] else [])


def _hash_identity(identity: Any) -> str:
    return sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _with_fitting_images(
    example: Example, images: Sequence[ImageFile], encode: Callable[[Sequence[ImageFile]], Encoded],
    length: Callable[[Encoded], int], maximum: int, stats: DataStats,
) -> Encoded:  # fmt: skip
    """Encode an example. If it is too long, shrink all its images by the same factor until it fits; leave them as they
    are if that is impossible.

    Args:
        encode: encodes the example with the given images.
        length: returns the number of tokens.
        maximum: maximum number of tokens.
    """
    original = found = encode(images)
    factor = 1.0
    while length(found) > maximum:
        factor *= SHRINKING
        smaller = [one.shrunk(factor) for one in images]
        if not smaller or any((one.max_pixels or 0) < SMALLEST for one in smaller):
            return original
        found = encode(smaller)
    if found is not original:
        stats.add(SHRUNK, example)
    return found


def _images_before_response(example: Example) -> list[ImageFile]:
    return images_in(replace(example, messages=example.request))


def _length_of_turns(turns: list[Turn]) -> int:
    return EncodedConversation(turns).length


def _length_of_row(row: Row) -> int:
    return len(row["input_ids"])
