"""Examples -> rows: token ids, and labels for those that are learned.

In: examples of any kind, conversations, prompt and completion, plain text. Out: rows of token ids and labels, or None
where an example gives nothing to learn. Every row that is dropped or cut is counted, with its record's number; a row
that is too long is refused where the options ask for that.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, Final

from burnish.core.types import IGNORE_INDEX, Example, Ids, Row, as_lists
from burnish.data.tally import Tally
from burnish.data.templates import preferences
from burnish.data.templates.labels import TemplateChoices, label_turns, unlearned
from burnish.data.templates.parts import TemplateFormat, ends_of
from burnish.data.templates.table import TemplateSpec
from burnish.data.templates.truncate import Half, fit_turns, refuse_long
from burnish.data.tokens.encoder import shared_start

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


@dataclass(frozen=True)
class Draft:
    """A row before it is truncated.

    Args:
        turns: (question, answer) in order of priority; plain text is one turn.
        closing: the token that closes the row, where its turns have no end token of their own.
        ends: end tokens, one of which is to be learned; empty where none is.
    """

    turns: list[tuple[Half, Half]]
    closing: int | None = None
    ends: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return sum(len(half.ids) for half in chain(*self.turns)) + (self.closing is not None)


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
        is_plain = [example.text is not None or example.completion is not None for example in examples]
        conversations = self._conversations(
            [e for e, plain in zip(examples, is_plain, strict=True) if not plain], tally
        )
        texts = self._texts([e for e, plain in zip(examples, is_plain, strict=True) if plain], tally)
        return self._rows(examples, [next(texts if plain else conversations) for plain in is_plain], tally)

    def encode_text(self, examples: Sequence[Example], tally: Tally, truncate: bool = True) -> list[Row | None]:
        """Encode plain texts, all of them learned, with eos at the end, as arrays.

        Args:
            truncate: truncate rows to ``cutoff_len``; false for packing that concatenates texts and splits them.
        """
        drafts = list(self._texts(examples, tally))
        if truncate:
            return self._rows(examples, drafts, tally)
        return [None if draft is None else self._joined(draft) for draft in drafts]

    def encode_pairs(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """A row of two sequences per pair of answers, as arrays."""
        return preferences.encode_pairs(self, examples, tally)

    def encode_verdicts(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        """A row per answer with a verdict on it, as arrays."""
        return preferences.encode_verdicts(self, examples, tally)

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

    def _conversations(self, examples: Sequence[Example], tally: Tally) -> Iterator[Draft | None]:
        closing, ends = ends_of(self, self.form)
        wanted = frozenset() if self.options.train_on_eos == "none" else ends.token_ids
        for turns in self.form.turns(examples, tally) if examples else ():
            yield None if turns is None else Draft(label_turns(turns, self.options, ends), closing, wanted)

    def _texts(self, examples: Sequence[Example], tally: Tally) -> Iterator[Draft | None]:
        """Drafts of plain texts and completions. They have no template around them, and may hold control tokens."""
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
            learned_from = shared_start(ids[prompt], ids[text])[0] if prompt else 0
            has_end = example.completion is None and bool(ending)
            yield self._text(opening + ids[text], len(opening), len(opening) + learned_from, has_end)

    def _text(self, ids: Ids, opening: int, learned_from: int, has_end: bool) -> Draft:
        """A draft of one turn: the context and the learned part, with eos added if the text does not end in it."""
        eos = self.tokenizer.eos_token_id
        is_open = not has_end and eos is not None and ids[-1] != eos
        source, target = ids[:learned_from], ids[learned_from:] + array("i", [eos] if is_open else [])
        last = len(target) - (has_end or eos is not None)
        return Draft(
            [
                (
                    Half(source, unlearned(len(source)), None, lambda: [at >= opening for at in range(len(source))]),
                    Half(target, target, None, lambda: [at < last for at in range(len(target))]),
                )
            ]
        )

    def opening_ids(self) -> Ids:
        """bos, for tokenizers that put it before every text."""
        bos = self.tokenizer.bos_token_id
        own = self.tokenizer("", add_special_tokens=True)["input_ids"]
        return array("i", [bos] if bos is not None and list(own[:1]) == [bos] else [])

    def _rows(self, examples: Sequence[Example], drafts: Sequence[Draft | None], tally: Tally) -> list[Row | None]:
        if self.options.on_too_long == "raise":
            refuse_long(examples, (0 if draft is None else draft.length for draft in drafts), self.cutoff_len)
        return [
            None if draft is None else self._row(example, draft, tally)
            for example, draft in zip(examples, drafts, strict=True)
        ]

    def _row(self, example: Example, draft: Draft, tally: Tally) -> Row | None:
        if draft.length > self.cutoff_len:
            if self.options.on_too_long == "drop":
                tally.add(TOO_LONG, example)
                return None
            draft = self._fitted(example, draft, tally)
        row = self._joined(draft)
        if row["labels"] == unlearned(len(row["labels"])):
            tally.add(NOTHING_TO_LEARN, example)
            return None
        if draft.ends and not any(label in draft.ends for label in reversed(row["labels"])):
            tally.add(NO_END, example)
        return row

    def _fitted(self, example: Example, draft: Draft, tally: Tally) -> Draft:
        room = self.cutoff_len - (draft.closing is not None)
        kept = fit_turns(draft.turns, room, self.options.truncation)
        if len(kept) < len(draft.turns):
            tally.add(LEFT_OUT, example)
        if any(len(now.ids) < len(was.ids) for now, was in zip(chain(*kept), chain(*draft.turns), strict=False)):
            tally.add(SHORTENED, example)
        return Draft(kept, draft.closing if kept else None, draft.ends)

    def _joined(self, draft: Draft) -> Row:
        """Join the turns in the order of the conversation, and the token that closes it."""
        halves = list(chain(*(reversed(draft.turns) if self.options.mask_history else draft.turns)))
        ids, labels = array("i"), array("i")
        for half in halves:
            ids += half.ids
            labels += half.labels
        if draft.closing is not None:
            ids.append(draft.closing)
            labels.append(draft.closing if self._learns_closing(halves[-1]) else IGNORE_INDEX)
        row: Row = {"input_ids": ids, "labels": labels}
        if any(half.weights for half in halves):
            weights = [half.weights or [1.0] * len(half.ids) for half in halves]
            of_closing = [] if draft.closing is None else (weights[-1] or [1.0])[-1:]
            row["loss_weights"] = array("d", chain(*weights, of_closing))
        return row

    def _learns_closing(self, answer: Half) -> bool:
        """Return whether the token that closes the row is learned: it is, if the answer that it ends is."""
        is_learned = not answer.ids or any(label != IGNORE_INDEX for label in answer.labels)
        return self.options.train_on_eos == "all" or (self.options.train_on_eos != "none" and is_learned)


def _hashed(identity: Any) -> str:
    return sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
