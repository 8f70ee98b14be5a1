"""Encode examples into rows: truncation, concatenation, and dropping of rows without trained tokens.

Examples may be conversations, prompts with completions, plain text, preference pairs, or responses with a label. An
example without trained tokens gives None. Dropped and truncated rows are counted with their record numbers. A row that
is too long is an error if ``on_too_long`` is "raise".

Tokenization is left to two subclasses: ``rows.Template`` (named and Jinja templates) and ``plain.PlainTemplate``
(messages and texts unchanged, as in TRL).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.labels import EncodedConversation, Segment, Turn, concatenate_ids, masked_labels
from burnish.data.chat.preferences import (
    IMAGE_TRUNCATED,
    TOO_LONG,
    pair_rows,
    unpaired_rows,
    with_mismatched_response,
)
from burnish.data.chat.truncate import EncodingChoices, fit_turns, refuse_long
from burnish.data.images.image_file import ImageFile
from burnish.data.images.in_rows import Marks, images_column, images_of_segments
from burnish.data.stats import DataStats, RecordReason, drop_reason, truncation_reason
from burnish.loop.types import IGNORE_INDEX, Example, Ids, Row, as_lists

NOTHING_TO_LEARN = drop_reason("no trainable tokens")
SHORTENED = truncation_reason("messages shortened to cutoff_len")
LEFT_OUT = truncation_reason("turns beyond cutoff_len were removed")
IMAGES_TOO_LONG = drop_reason("the images alone exceed cutoff_len; set a lower image_max_pixels", is_length=True)
NO_TEXT = drop_reason("no text")
NOT_PLAIN_TEXT = drop_reason(
    "a conversation instead of plain text",
    remedy="stage: pt trains on plain text. Set columns: {prompt: <column with the text>}, or use stage: sft.",
)
NO_END = RecordReason("kept, but its end-of-turn token does not contribute to the loss", "kept")


class ConversationEncoder:
    """Base class that encodes examples into rows.

    Args:
        options: truncation and end tokens.
        cutoff_len: maximum length of a row, in tokens.
    """

    marks: Marks | None

    def __init__(self, options: EncodingChoices, tokenizer: Any, cutoff_len: int) -> None:
        self.encoding, self.tokenizer, self.cutoff_len = options, tokenizer, cutoff_len

    def _chats(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        """Encode and label conversations. A conversation without turns gives None and is counted.

        Args:
            examples: conversations.
            stats: statistics that dropped examples are added to.
            last_only: train on the last response only, as for preferences.
        """
        raise NotImplementedError

    def _texts(self, examples: Sequence[Example], stats: DataStats) -> Iterator[EncodedConversation | None]:
        """Encode and label plain texts, and prompts with completions."""
        raise NotImplementedError

    def encode(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """Return a row per example, None if it has no trained tokens. Drops and truncations are added to ``stats``.

        Of a conversation, responses are trained; of a prompt with completion, the completion; of a text, all of it.

        Raises:
            UserError: with every row of the batch that is too long, if ``on_too_long`` is "raise".
        """
        return [as_lists(row) for row in self.encode_arrays(examples, stats)]

    def encode_arrays(self, examples: Sequence[Example], stats: DataStats, truncate: bool = True) -> list[Row | None]:
        """Like ``encode``, with arrays in place of lists.

        Args:
            examples: examples to encode.
            stats: statistics that dropped and truncated examples are added to.
            truncate: truncate rows to ``cutoff_len`` and drop rows without trained tokens. False for packing that
                concatenates and splits rows.
        """
        return self._rows(examples, self._conversations(examples, stats), stats, truncate)

    def encode_text(self, examples: Sequence[Example], stats: DataStats, truncate: bool = True) -> list[Row | None]:
        """Like ``encode_arrays`` for pretraining: encode plain texts only; other examples give None."""
        return self._rows(examples, list(self._texts(examples, stats)), stats, truncate)

    def encode_pairs(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """Return a row with two sequences per preference pair, as arrays.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        of_chosen, of_rejected = DataStats(), DataStats()
        sides = [
            self._answers([example.with_answer(side) for example in examples], of_side)
            for side, of_side in (("chosen", of_chosen), ("rejected", of_rejected))
        ]
        stats.merge_sides(of_chosen, of_rejected)
        return pair_rows(examples, sides[0], sides[1], self.encoding, self.cutoff_len, stats)

    def encode_unpaired(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """Return a row per labelled response, as arrays, with a mismatched completion if the example has one.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        own = self._answers(examples, stats)
        beside = iter(
            self._answers([with_mismatched_response(one) for one in examples if one.other is not None], DataStats())
        )
        others = [None if example.other is None else next(beside) for example in examples]
        return unpaired_rows(examples, own, others, self.encoding, self.cutoff_len, stats)

    def encode_answers(self, examples: Sequence[Example], stats: DataStats) -> list[Ids | None]:
        """Return the ids of each example up to the end of its last response, as in a row of a pair; not truncated.

        None for dropped examples, which are counted in ``stats``.
        """
        answers = self._answers(examples, stats)
        return [None if answer is None else concatenate_ids(one.ids for one in answer) for answer in answers]

    def encode_prompts(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """Return a row for the prompt of each example, without its final response: ``input_ids`` as an array, and
        ``images`` if there are any.

        None for a prompt that is empty, longer than ``cutoff_len`` (prompts are never truncated), or whose images
        cannot be used.
        """
        found: list[Row | None] = []
        placeholders = self.marks.family.placeholder_ids if self.marks is not None else frozenset()
        for example, row in zip(examples, self._prompt_rows(examples, stats), strict=True):
            length = self.cutoff_len if row is None else len(row["input_ids"])
            # Only texts that are not messages can contain placeholders without an image.
            if row is not None and "images" not in row and not placeholders.isdisjoint(row["input_ids"]):
                what = "its text contains an image placeholder of the model, but it has no image for it."
                raise UserError(what, where=example.place, remedy="Write the prompt as messages, with the image.")
            if reason := NO_TEXT if not length else TOO_LONG if length > self.cutoff_len else None:
                stats.add(reason, example)
            found.append(None if reason else row)
        return found

    def _prompt_rows(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """Return rows of prompts, of conversations or texts. None if images cannot be used, which is counted."""
        raise NotImplementedError

    def _conversations(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool = False
    ) -> list[EncodedConversation | None]:
        """Encode and label examples of any kind, in order. An example without turns gives None.

        Args:
            examples: examples to encode.
            stats: statistics that dropped examples are added to.
            last_only: train on the last response only, as for preferences.
        """
        is_plain = [example.text is not None or example.completion is not None for example in examples]
        texts = self._texts([e for e, plain in zip(examples, is_plain, strict=True) if plain], stats)
        chats = self._chats([e for e, plain in zip(examples, is_plain, strict=True) if not plain], stats, last_only)
        return [next(texts if plain else chats) for plain in is_plain]

    def _answers(self, examples: Sequence[Example], stats: DataStats) -> list[Turn | None]:
        """Return the last response of each example with its prompt, which is everything before it."""
        encoded = self._conversations(examples, stats, last_only=True)
        return [None if one is None else self._as_one_turn(one) for one in encoded]

    def _as_one_turn(self, encoded: EncodedConversation) -> Turn:
        *before, response = chain(*encoded.turns)
        ids = concatenate_ids(segment.ids for segment in before)
        prompt = Segment(
            ids, lambda: [mark for segment in before for mark in segment.content()], labels=masked_labels(len(ids)),
            images=images_of_segments(before),
        )  # fmt: skip
        if encoded.closing is None:
            return prompt, replace(response, weights=None)
        label = encoded.closing if self._trains_closing(response) else IGNORE_INDEX
        closed = Segment(
            response.ids + array("i", [encoded.closing]),
            lambda: [*response.content(), False],
            labels=response.labels + array("i", [label]),
            images=response.images,
        )
        return prompt, closed

    def _rows(
        self,
        examples: Sequence[Example],
        encoded: Sequence[EncodedConversation | None],
        stats: DataStats,
        truncate: bool,
    ) -> list[Row | None]:
        if not truncate:
            return [None if one is None else self._join(one) for one in encoded]
        if self.encoding.on_too_long == "raise":
            refuse_long(examples, (0 if one is None else one.length for one in encoded), self.cutoff_len)
        return [
            None if one is None else self._row(example, one, stats)
            for example, one in zip(examples, encoded, strict=True)
        ]

    def _row(self, example: Example, encoded: EncodedConversation, stats: DataStats) -> Row | None:
        if encoded.length > self.cutoff_len:
            if self.encoding.on_too_long == "drop":
                stats.add(TOO_LONG, example)
                return None
            of_images = encoded.images
            encoded = self._truncate(example, encoded, stats)
            if of_images and not self._keeps(example, of_images, encoded, stats):
                return None
        row = self._join(encoded)
        if row["labels"] == masked_labels(len(row["labels"])):
            stats.add(NOTHING_TO_LEARN, example)
            return None
        if encoded.ends and not any(label in encoded.ends for label in reversed(row["labels"])):
            stats.add(NO_END, example)
        return row

    def _truncate(self, example: Example, encoded: EncodedConversation, stats: DataStats) -> EncodedConversation:
        available, turns = self.cutoff_len - (encoded.closing is not None), encoded.turns
        last_first = self.encoding.mask_history
        truncated = fit_turns(turns, available, self.encoding.truncation, last_first)
        if len(truncated) < len(turns):
            stats.add(LEFT_OUT, example)
        before = turns[len(turns) - len(truncated) :] if last_first else turns[: len(truncated)]
        if any(len(now.ids) < len(was.ids) for now, was in zip(chain(*truncated), chain(*before), strict=True)):
            stats.add(SHORTENED, example)
        return EncodedConversation(truncated, encoded.closing if truncated else None, encoded.ends)

    def _keeps(
        self, example: Example, images: Sequence[ImageFile], encoded: EncodedConversation, stats: DataStats
    ) -> bool:
        """Return whether all images left in a truncated row are complete; otherwise the row is dropped."""
        left = {(one.place, one.path): one.end - one.begin for one in encoded.images}
        sizes = {(one.place, one.path): one.end - one.begin for one in images}
        if encoded.turns and all(sizes[key] == size for key, size in left.items()):
            return True
        stats.add(IMAGES_TOO_LONG if sum(sizes.values()) > self.cutoff_len else IMAGE_TRUNCATED, example)
        return False

    def _join(self, encoded: EncodedConversation) -> Row:
        """Concatenate the segments of a conversation and its closing token."""
        segments, closing = list(chain(*encoded.turns)), encoded.closing
        ids, labels = concatenate_ids(one.ids for one in segments), concatenate_ids(one.labels for one in segments)
        if closing is not None:
            ids.append(closing)
            labels.append(closing if self._trains_closing(segments[-1]) else IGNORE_INDEX)
        row: Row = {"input_ids": ids, "labels": labels}
        if any(one.weights for one in segments):
            weights = [one.weights or [1.0] * len(one.ids) for one in segments]
            of_closing = [] if closing is None else (weights[-1] or [1.0])[-1:]
            row["loss_weights"] = array("d", chain(*weights, of_closing))
        if images := images_of_segments(segments):
            row["images"] = images_column(images)
        return row

    def _trains_closing(self, response: Segment) -> bool:
        """Return whether the closing token is trained: by default if the response that it ends is trained."""
        is_trained = not response.ids or response.is_trained
        return self.encoding.train_on_eos == "all" or (self.encoding.train_on_eos != "none" and is_trained)
