"""Encoded conversations -> rows: truncated, joined, and dropped where there is nothing to train on.

In: examples of any kind: conversations, prompt and completion, plain text, pairs, answers with a label. Out: rows of
token ids and labels, or None where an example gives nothing to train on. Every row that is dropped or truncated is
counted, with its record's number; a row that is too long is refused where the options ask for that.

How a conversation or a text becomes tokens is for the two subclasses to say: ``rows.Template`` (templates by name or in
Jinja) and ``plain.PlainTemplate`` (messages and texts unchanged, as TRL).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from burnish.data.chat.labels import EncodedConversation, Segment, Turn, concatenated, masked
from burnish.data.chat.preferences import IMAGE_CUT, pair_rows, verdict_rows, with_answer, with_other
from burnish.data.chat.truncate import fit_turns, refuse_long
from burnish.data.images.image_file import ImageFile
from burnish.data.images.in_rows import images_column, images_of_segments
from burnish.data.stats import DataStats
from burnish.loop.types import IGNORE_INDEX, Example, Ids, Row, as_lists

NOTHING_TO_LEARN = "dropped: no trainable tokens"
TOO_LONG = "dropped: longer than cutoff_len"
SHORTENED = "truncated: messages shortened to cutoff_len"
LEFT_OUT = "truncated: turns beyond cutoff_len were removed"
IMAGES_TOO_LONG = "dropped: its images alone are longer than cutoff_len; set a lower image_max_pixels"
NO_TEXT = "dropped: no text"
NO_END = "kept, without a trained end token"


class EncodingChoices(Protocol):
    """The options that rows depend on, whatever encodes them."""

    @property
    def truncation(self) -> str: ...
    @property
    def on_too_long(self) -> str: ...
    @property
    def mask_history(self) -> bool: ...
    @property
    def train_on_eos(self) -> str: ...


class ConversationEncoder:
    """Args: options: how rows are truncated and ended. cutoff_len: the longest row, in tokens."""

    def __init__(self, options: EncodingChoices, tokenizer: Any, cutoff_len: int) -> None:
        self.encoding, self.tokenizer, self.cutoff_len = options, tokenizer, cutoff_len

    def _chats(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        """Encode and label conversations; None where one gives no turn, which is counted.

        Args:
            last_only: the last response alone is trained, as in preferences.
        """
        raise NotImplementedError

    def _texts(self, examples: Sequence[Example], stats: DataStats) -> Iterator[EncodedConversation | None]:
        """Encode and label plain texts, and prompts with completions."""
        raise NotImplementedError

    def encode(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """A row per example, None where it gives nothing to learn; what was dropped or cut is added to ``stats``.

        Conversations become turns; a completion is learned after its prompt, a text as a whole, each with eos.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise"; names every such row of the batch.
        """
        return [as_lists(row) for row in self.encode_flat(examples, stats)]

    def encode_flat(self, examples: Sequence[Example], stats: DataStats, truncate: bool = True) -> list[Row | None]:
        """Like ``encode``, with arrays in place of lists.

        Args:
            truncate: truncate rows to ``cutoff_len``, and drop those without trained tokens; false for packing that
                concatenates rows and splits them.
        """
        return self._rows(examples, self._conversations(examples, stats), stats, truncate)

    def encode_text(self, examples: Sequence[Example], stats: DataStats, truncate: bool = True) -> list[Row | None]:
        """The same for pretraining: plain texts alone, and None for examples of another kind."""
        return self._rows(examples, list(self._texts(examples, stats)), stats, truncate)

    def encode_pairs(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """A row of two sequences per pair of responses, as arrays.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        sides = [
            self._answers([with_answer(example, side) for example in examples], stats)
            for side in ("chosen", "rejected")
        ]
        return pair_rows(examples, sides[0], sides[1], self.encoding, self.cutoff_len, stats)

    def encode_verdicts(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        """A row per response with a label, as arrays; with its prompt and another response where the example has one.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        own = self._answers(examples, stats)
        beside = iter(self._answers([with_other(one) for one in examples if one.other is not None], DataStats()))
        others = [None if example.other is None else next(beside) for example in examples]
        return verdict_rows(examples, own, others, self.encoding, self.cutoff_len, stats)

    def encode_prompts(self, examples: Sequence[Example], stats: DataStats) -> list[Ids | None]:
        """The ids up to the beginning of the next answer; an answer at the end of an example is left out. None for a
        prompt that is empty or longer than ``cutoff_len``: no prompt is cut."""
        found: list[Ids | None] = []
        for example, ids in zip(examples, self._prompt_ids(examples), strict=True):
            if reason := NO_TEXT if not ids else TOO_LONG if len(ids) > self.cutoff_len else "":
                stats.add(reason, example)
            found.append(None if reason else ids)
        return found

    def _prompt_ids(self, examples: Sequence[Example]) -> list[Ids]:
        """The ids of prompts: of a conversation, or of a text."""
        raise NotImplementedError

    def _conversations(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool = False
    ) -> list[EncodedConversation | None]:
        """Encode and label examples of any kind, each with its own; None where one gives no turn.

        Args:
            last_only: the last response alone is trained, as in preferences.
        """
        is_plain = [example.text is not None or example.completion is not None for example in examples]
        texts = self._texts([e for e, plain in zip(examples, is_plain, strict=True) if plain], stats)
        chats = self._chats([e for e, plain in zip(examples, is_plain, strict=True) if not plain], stats, last_only)
        return [next(texts if plain else chats) for plain in is_plain]

    def _answers(self, examples: Sequence[Example], stats: DataStats) -> list[Turn | None]:
        """The prompt of each example, which is everything before the last response, and that response."""
        encoded = self._conversations(examples, stats, last_only=True)
        return [None if one is None else self._as_one_turn(one) for one in encoded]

    def _as_one_turn(self, encoded: EncodedConversation) -> Turn:
        *before, response = chain(*encoded.turns)
        ids = concatenated(segment.ids for segment in before)
        prompt = Segment(
            ids, lambda: [mark for segment in before for mark in segment.content()], labels=masked(len(ids)),
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
            return [None if one is None else self._joined(one) for one in encoded]
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
            encoded = self._truncated(example, encoded, stats)
            if of_images and not self._keeps(example, of_images, encoded, stats):
                return None
        row = self._joined(encoded)
        if row["labels"] == masked(len(row["labels"])):
            stats.add(NOTHING_TO_LEARN, example)
            return None
        if encoded.ends and not any(label in encoded.ends for label in reversed(row["labels"])):
            stats.add(NO_END, example)
        return row

    def _truncated(self, example: Example, encoded: EncodedConversation, stats: DataStats) -> EncodedConversation:
        room, turns = self.cutoff_len - (encoded.closing is not None), encoded.turns
        last_first = self.encoding.mask_history
        kept = fit_turns(turns, room, self.encoding.truncation, last_first)
        if len(kept) < len(turns):
            stats.add(LEFT_OUT, example)
        before = turns[len(turns) - len(kept) :] if last_first else turns[: len(kept)]
        if any(len(now.ids) < len(was.ids) for now, was in zip(chain(*kept), chain(*before), strict=True)):
            stats.add(SHORTENED, example)
        return EncodedConversation(kept, encoded.closing if kept else None, encoded.ends)

    def _keeps(
        self, example: Example, images: Sequence[ImageFile], encoded: EncodedConversation, stats: DataStats
    ) -> bool:
        """Return whether a truncated row has each of its images as a whole; a row that has not is dropped."""
        left = {(one.place, one.path): one.end - one.begin for one in encoded.images}
        sizes = {(one.place, one.path): one.end - one.begin for one in images}
        if encoded.turns and all(sizes[key] == size for key, size in left.items()):
            return True
        stats.add(IMAGES_TOO_LONG if sum(sizes.values()) > self.cutoff_len else IMAGE_CUT, example)
        return False

    def _joined(self, encoded: EncodedConversation) -> Row:
        """Join the segments of a conversation, and the token that closes it."""
        segments, closing = list(chain(*encoded.turns)), encoded.closing
        ids, labels = concatenated(one.ids for one in segments), concatenated(one.labels for one in segments)
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
        """Return whether the token that closes the row is trained: it is, if the response that it ends is."""
        is_trained = not response.ids or response.is_trained
        return self.encoding.train_on_eos == "all" or (self.encoding.train_on_eos != "none" and is_trained)
