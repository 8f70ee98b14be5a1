"""Examples -> rows: token ids, and labels for those that are trained.

In: examples of any kind: conversations, prompt and completion, plain text, pairs, answers with a label. Out: rows of
token ids and labels, or None where an example gives nothing to train on. Every row that is dropped or truncated is
counted, with its record's number; a row that is too long is refused where the options ask for that.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from typing import Any, Final, Protocol

from burnish.data.chat.labels import Ends, TemplateChoices, label_turns
from burnish.data.chat.preferences import pair_rows, verdict_rows, with_answer, with_other
from burnish.data.chat.segments import EncodedConversation, Segment, Turn, concatenated, masked
from burnish.data.chat.table import TemplateSpec
from burnish.data.chat.truncate import fit_turns, refuse_long
from burnish.data.tally import Tally
from burnish.data.tokens.encoder import Encoder, shared_start
from burnish.loop.types import IGNORE_INDEX, Example, Ids, Row, as_lists

NOTHING_TO_LEARN = "dropped: nothing to learn"
TOO_LONG = "dropped: longer than cutoff_len"
SHORTENED = "cut: messages shortened to cutoff_len"
LEFT_OUT = "cut: turns beyond cutoff_len left out"
NO_TEXT = "dropped: it has no text"
NO_END = "kept, without an end token to learn"
OPTIONS_OF_ROWS: Final = (
    "train_on_prompt",
    "mask_history",
    "train_on_eos",
    "enable_thinking",
    "preserve_thinking",
    "truncation",
    "on_too_long",
)


class TemplateFormat(Protocol):
    """The formatting of conversations: by a named template (``slots.py``) or by Jinja (``chat_template.py``)."""

    encoder: Encoder

    @property
    def closing_word(self) -> str | None:
        """The token that closes a row, where turns have no end token of their own."""
        ...

    def fit(self) -> None: ...
    def answering_last(self) -> TemplateFormat:
        """The same where only the last response is trained, so that thoughts of earlier ones may go."""
        ...

    def turns(self, examples: Sequence[Example], tally: Tally) -> list[list[Turn] | None]: ...
    def prompt(self, example: Example) -> list[int]: ...
    def end_words(self) -> tuple[str, ...]: ...
    def jinja(self) -> str | dict[str, str]: ...
    def identity(self) -> Any: ...


class Template:
    """One template over one tokenizer.

    Args:
        name: its name in messages.
        form: the formatting of conversations.
        options: ``TemplateOptions`` and ``EncodingOptions``.
        spec: the row of the table, None for a tokenizer's own chat template.
        cutoff_len: the longest row, if not the option's: packing may need another length.

    ``notes`` are sentences for the user on choices that were made.
    """

    def __init__(
        self, name: str, form: TemplateFormat, options: TemplateChoices, tokenizer: Any, spec: TemplateSpec | None,
        cutoff_len: int | None,
    ) -> None:  # fmt: skip
        self.name, self.form, self.options, self.tokenizer, self.spec = name, form, options, tokenizer, spec
        self.notes: list[str] = []
        self.cutoff_len = cutoff_len or options.cutoff_len

    def encode(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """A row per example, None where it gives nothing to learn; what was dropped or cut is added to ``tally``.

        Conversations become turns; a completion is learned after its prompt, a text as a whole, each with eos.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise"; names every such row of the batch.
        """
        return [as_lists(row) for row in self.encode_flat(examples, tally)]

    def encode_flat(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """Like ``encode``, with arrays in place of lists."""
        return self._rows(examples, self._conversations(examples, tally), tally)

    def encode_text(self, examples: Sequence[Example], tally: Tally, truncate: bool = True) -> list[Row | None]:
        """Encode plain texts, all of them trained, with eos at the end, as arrays.

        Args:
            truncate: truncate rows to ``cutoff_len``; false for packing that concatenates texts and splits them.
        """
        encoded = self._conversations(examples, tally)
        if truncate:
            return self._rows(examples, encoded, tally)
        return [None if one is None else self._joined(one) for one in encoded]

    def encode_pairs(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """A row of two sequences per pair of responses, as arrays.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        sides = [
            self._answers([with_answer(example, side) for example in examples], tally)
            for side in ("chosen", "rejected")
        ]
        return pair_rows(examples, sides[0], sides[1], self.options, self.cutoff_len, tally)

    def encode_verdicts(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """A row per response with a label, as arrays; with its prompt and another response where the example has one.

        Raises:
            UserError: if a row is too long and ``on_too_long`` is "raise".
        """
        own = self._answers(examples, tally)
        others = self._answers([with_other(example) for example in examples], Tally())
        return verdict_rows(examples, own, others, self.options, self.cutoff_len, tally)

    def prompt(self, example: Example) -> list[int]:
        """The ids up to the beginning of the next answer; a final answer in the example is left out."""
        return self.form.prompt(example)

    def stop_token_ids(self, tokenizer: Any = None) -> list[int]:
        """The ids on which a generation ends: eos and the template's stop words."""
        tokenizer = tokenizer or self.tokenizer
        ids = {tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, self.form.end_words())}
        return sorted(ids - {None})

    def end_ids(self) -> frozenset[int]:
        """The ids that end a message: those on which a generation ends, except those that open the next message."""
        opening = self.spec.opening_words if self.spec else ()
        return frozenset(self.stop_token_ids()) - set(map(self.tokenizer.convert_tokens_to_ids, opening))

    def jinja(self) -> str | dict[str, str]:
        """A chat template for the tokenizer, which renders the tokens that are trained here.

        Several by name where the tokenizer has several.
        """
        return self.form.jinja()

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the rows of the same examples would change."""
        options = {name: getattr(self.options, name) for name in OPTIONS_OF_ROWS}
        return _hashed([self.form.identity(), self.form.encoder.identity, options, self.cutoff_len])

    @property
    def form_fingerprint(self) -> str:
        """A hash that changes with the text around the messages, but not with labels or truncation."""
        return _hashed(self.form.identity())

    @property
    def tokenizer_fingerprint(self) -> str:
        """Changes with the ids that a text becomes."""
        return _hashed(self.form.encoder.identity)

    def _conversations(
        self, examples: Sequence[Example], tally: Tally, last_only: bool = False
    ) -> list[EncodedConversation | None]:
        """Encode and label examples of any kind, each with its own; None where one gives no turn.

        Args:
            last_only: the last response alone is trained, as in preferences.
        """
        is_plain = [example.text is not None or example.completion is not None for example in examples]
        texts = self._texts([e for e, plain in zip(examples, is_plain, strict=True) if plain], tally)
        chats = self._chats([e for e, plain in zip(examples, is_plain, strict=True) if not plain], tally, last_only)
        return [next(texts if plain else chats) for plain in is_plain]

    def _chats(
        self, examples: Sequence[Example], tally: Tally, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        form = self.form.answering_last() if last_only else self.form
        word = form.closing_word
        closing = None if word is None else int(self.tokenizer.convert_tokens_to_ids(word))
        ends = Ends(self.end_ids(), closing if self.spec and not last_only else None)
        wanted = frozenset() if self.options.train_on_eos == "none" else ends.token_ids
        for turns in form.turns(examples, tally) if examples else ():
            if turns is None:
                yield None
                continue
            labelled = label_turns(turns[-1:] if last_only else turns, self.options, ends)
            yield EncodedConversation([*turns[:-1], *labelled] if last_only else labelled, closing, wanted)

    def _answers(self, examples: Sequence[Example], tally: Tally) -> list[Turn | None]:
        """The prompt of each example, which is everything before the last response, and that response."""
        encoded = self._conversations(examples, tally, last_only=True)
        return [None if one is None else self._as_one_turn(one) for one in encoded]

    def _as_one_turn(self, encoded: EncodedConversation) -> Turn:
        *before, response = chain(*encoded.turns)
        ids = concatenated(segment.ids for segment in before)
        prompt = Segment(
            ids, lambda: [mark for segment in before for mark in segment.content()], labels=masked(len(ids))
        )
        if encoded.closing is None:
            return prompt, replace(response, weights=None)
        label = encoded.closing if self._trains_closing(response) else IGNORE_INDEX
        closed = Segment(
            response.ids + array("i", [encoded.closing]),
            lambda: [*response.content(), False],
            labels=response.labels + array("i", [label]),
        )
        return prompt, closed

    def _texts(self, examples: Sequence[Example], tally: Tally) -> Iterator[EncodedConversation | None]:
        """Plain texts and completions. They have no template around them, and may hold control tokens."""
        ending = self.spec.text_end if self.spec else ""
        texts = [
            (e.prompt or "") + e.completion if e.completion is not None else e.text and e.text + ending
            for e in examples
        ]
        prompts = [example.prompt or "" for example in examples]
        ids = self.form.encoder.encode(filter(None, (*texts, *prompts)))
        opening = self.opening_ids() if examples else array("i")
        for example, text, prompt in zip(examples, texts, prompts, strict=True):
            if not text:
                tally.add(NO_TEXT, example)
                yield None
                continue
            trained_from = shared_start(ids[prompt], ids[text])[0] if prompt else 0
            has_end = example.completion is None and bool(ending)
            yield self._text(opening + ids[text], len(opening), len(opening) + trained_from, has_end)

    def _text(self, ids: Ids, opening: int, trained_from: int, has_end: bool) -> EncodedConversation:
        """One turn: the context and the trained part, with eos added if the text does not end in it."""
        eos = self.tokenizer.eos_token_id
        is_open = not has_end and eos is not None and ids[-1] != eos
        source, target = ids[:trained_from], ids[trained_from:] + array("i", [eos] if is_open else [])
        last = len(target) - (has_end or eos is not None)
        prompt = Segment(source, lambda: [at >= opening for at in range(len(source))], labels=masked(len(source)))
        return EncodedConversation(
            [(prompt, Segment(target, lambda: [at < last for at in range(len(target))], labels=target))]
        )

    def opening_ids(self) -> Ids:
        """bos, for tokenizers that put it before every text."""
        bos = self.tokenizer.bos_token_id
        own = self.tokenizer("", add_special_tokens=True)["input_ids"]
        return array("i", [bos] if bos is not None and list(own[:1]) == [bos] else [])

    def _rows(
        self, examples: Sequence[Example], encoded: Sequence[EncodedConversation | None], tally: Tally
    ) -> list[Row | None]:
        if self.options.on_too_long == "raise":
            refuse_long(examples, (0 if one is None else one.length for one in encoded), self.cutoff_len)
        return [
            None if one is None else self._row(example, one, tally)
            for example, one in zip(examples, encoded, strict=True)
        ]

    def _row(self, example: Example, encoded: EncodedConversation, tally: Tally) -> Row | None:
        if encoded.length > self.cutoff_len:
            if self.options.on_too_long == "drop":
                tally.add(TOO_LONG, example)
                return None
            encoded = self._truncated(example, encoded, tally)
        row = self._joined(encoded)
        if row["labels"] == masked(len(row["labels"])):
            tally.add(NOTHING_TO_LEARN, example)
            return None
        if encoded.ends and not any(label in encoded.ends for label in reversed(row["labels"])):
            tally.add(NO_END, example)
        return row

    def _truncated(self, example: Example, encoded: EncodedConversation, tally: Tally) -> EncodedConversation:
        room, turns = self.cutoff_len - (encoded.closing is not None), encoded.turns
        last_first = self.options.mask_history
        kept = fit_turns(turns, room, self.options.truncation, last_first)
        if len(kept) < len(turns):
            tally.add(LEFT_OUT, example)
        before = turns[len(turns) - len(kept) :] if last_first else turns[: len(kept)]
        if any(len(now.ids) < len(was.ids) for now, was in zip(chain(*kept), chain(*before), strict=True)):
            tally.add(SHORTENED, example)
        return EncodedConversation(kept, encoded.closing if kept else None, encoded.ends)

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
        return row

    def _trains_closing(self, response: Segment) -> bool:
        """Return whether the token that closes the row is trained: it is, if the response that it ends is."""
        is_trained = not response.ids or response.is_trained
        return self.options.train_on_eos == "all" or (self.options.train_on_eos != "none" and is_trained)


def _hashed(identity: Any) -> str:
    return sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
