"""Text -> token ids, with control tokens from the template alone.

In: texts in which the template has put its control strings around what a user wrote. Out: ids, and for those who ask,
where a character falls among the tokens. A whole text is tokenised at once, or word by word where that is the same
(``words.py``), so the ids are those of the tokenizer's own ``apply_chat_template`` on the same text.

What a user wrote goes through ``hide`` first: a special token spelled out in it ("<|im_end|>") is swapped for two
private characters, which no template touches, and becomes ordinary text again when the ids are made. So it can neither
end a turn nor open one, whatever a template does to the text in between. Special means what the tokenizer calls
special; tokens that it merely added (``<tool_call>`` in Qwen's) stay what they are.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import repeat
from typing import Any

from burnish.data.pre_tokens import Ids
from burnish.data.word_premises import lone_byte, words_of
from burnish.data.words import Words, any_of

_MARK = "\ufdd0"  # a Unicode noncharacter, never assigned; hidden itself should a text hold it
_FIRST = 0xF0000  # private use: the character after the mark counts from here
_ANCHOR = "\n"


class Encoder:
    """The ids of texts under one tokenizer.

    Args:
        tokenizer: any transformers tokenizer; fast ones work on a batch with all their threads.
        keep: what may stand in an assistant's text although it is a special token, such as the words that open and
            close a thought.
        template: what surrounds those texts, as text. A token that the user added to the vocabulary
            (``tokenizer.new_tokens``) is there for the data, unless it stands in the template.
    """

    def __init__(self, tokenizer: Any, keep: Sequence[str] = (), template: str = "") -> None:
        self.tokenizer = tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        own = set(tokenizer.all_special_tokens)
        free = {token for token in getattr(tokenizer, "new_tokens", ()) if token not in template} - own
        specials = sorted((special | own) - free, key=len, reverse=True)
        self._tokens = special | own | free
        self._codes = {text: _MARK + chr(_FIRST + index) for index, text in enumerate([*specials, _MARK])}
        self._texts = {code: text for text, code in self._codes.items()}
        self._hints = {text[0] for text in self._codes if text}
        hidden, kept = any_of([*specials, _MARK]), any_of(list(filter(None, keep)))
        self._hidden, self._hidden_or_kept = re.compile(hidden), re.compile(f"({kept})|{hidden}")
        self._control = re.compile(f"({any_of(sorted(self._tokens, key=len, reverse=True))})")
        self._shown = re.compile(f"{_MARK}.", re.DOTALL)

    @property
    def identity(self) -> str:
        """Changes whenever the ids of some text would."""
        return self._state[0]

    @cached_property
    def _state(self) -> tuple[str, bytes | None]:
        """The hash of everything that ids depend on, and the ``lone_byte``; the JSON itself takes megabytes."""
        tokenizer = self.tokenizer
        state = (
            self._backend().to_str()
            if tokenizer.is_fast
            else f"{type(tokenizer)} {sorted(tokenizer.get_vocab().items())}"
        )
        hashed = blake2b(f"{state} {sorted(self._texts.values())}".encode(), digest_size=16)
        return hashed.hexdigest(), lone_byte(state)

    def hide(self, text: str, *, assistant: bool = False) -> str:
        """The text with its special tokens made harmless; in an assistant's text the words of ``keep`` stay."""
        if not any(hint in text for hint in self._hints):  # a tenth of the time of a search for all of them
            return text
        pattern = self._hidden_or_kept if assistant else self._hidden
        return pattern.sub(lambda found: found[0] if assistant and found[1] else self._codes[found[0]], text)

    def show(self, text: str) -> str:
        """The text as it was before ``hide``."""
        return self._shown.sub(lambda found: self._texts[found[0]], text)

    def encode(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Text -> ids: each distinct text once, what cannot be read by words in one call of the tokenizer."""
        ids: dict[str, Ids] = {}
        whole = []
        distinct = list(dict.fromkeys(texts))
        plain = [text for text in distinct if _MARK not in text]
        words = self._words()
        for text, found in zip(plain, words.ids(plain) if words else repeat(None), strict=False):
            if found is None:
                whole.append(text)
            else:
                ids[text] = found
        ids |= {text: array("i", self._around_hidden(text)) for text in distinct if _MARK in text}
        return ids | dict(zip(whole, self._batch(whole), strict=True)) if whole else ids

    def continued(self, text: str) -> list[int]:
        """The ids of plain text that goes on where other text ended: no space is put before it.

        SentencePiece tokenizers write a space before whatever comes first. Tokenised behind a line break, which
        merges with nothing, and with the line break taken off again, it does not come first.
        """
        anchor, ids = self.plain(_ANCHOR), self.plain(_ANCHOR + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.plain(text)

    def plain(self, text: str) -> list[int]:
        """The ids of text in which nothing is a special token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def boundaries(self, text: str, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Where each character position falls among the tokens of ``text``.

        Returns:
            (ended, begun) per position: the tokens before index ``ended`` end at or before the character; those from
            index ``begun`` on start at or after it. A token that spans the position lies between the two.
        """
        return self.located([text], [positions])[0][1]

    def located(
        self, texts: Sequence[str], positions: Sequence[Sequence[int]]
    ) -> list[tuple[Ids, list[tuple[int, int]]]]:
        """The ids of each text, and the ``boundaries`` of its positions, in one call of the tokenizer."""
        found: dict[int, tuple[Ids, list[tuple[int, int]]]] = {}
        ordinary = [at for at, text in enumerate(texts) if self.tokenizer.is_fast and _MARK not in text]
        if words := self._words():
            by_words = words.located([texts[at] for at in ordinary], [positions[at] for at in ordinary])
            found = {at: both for at, both in zip(ordinary, by_words, strict=True) if both is not None}
        with_offsets = [at for at in ordinary if at not in found]
        for at, encoding in zip(with_offsets, self._encodings([texts[at] for at in with_offsets]), strict=True):
            starts, ends = [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]
            borders = [(bisect_right(ends, position), bisect_left(starts, position)) for position in positions[at]]
            found[at] = array("i", encoding.ids), borders
        for at in set(range(len(texts))) - set(ordinary):
            beginnings = [texts[at][:position] for position in positions[at]]
            ids = self.encode([texts[at], *beginnings])
            found[at] = ids[texts[at]], [shared_start(ids[beginning], ids[texts[at]]) for beginning in beginnings]
        return [found[at] for at in range(len(texts))]

    @cached_property
    def _read_words(self) -> Words | None:
        return words_of(self.tokenizer, lambda: self._state[1])

    def _words(self) -> Words | None:
        if self._read_words:
            self._backend()  # as it is to be, whatever others asked of it in the meantime
        return self._read_words

    def _batch(self, texts: list[str]) -> list[Ids]:
        if not self.tokenizer.is_fast:
            return [array("i", self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        encodings = self._backend().encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids) for encoding in encodings]

    def _encodings(self, texts: list[str]) -> list[Any]:
        """With offsets, which cost time."""
        return list(self._backend().encode_batch(texts, add_special_tokens=False)) if texts else []

    def _backend(self) -> Any:
        """The tokenizer proper, whose batch calls build none of the masks and warnings of transformers' wrapper."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend

    def _around_hidden(self, text: str) -> list[int]:
        """The ids of a text with hidden specials: the template's control tokens and those that the data may hold, and
        ordinary text between them."""
        ids: list[int] = []
        for piece in self._control.split(text):
            if piece in self._tokens:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                shown = self.show(piece)
                ids += self.continued(shown) if ids else self.plain(shown)
        return ids


def shared_start(prefix: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """How far the ids of a text's beginning go within the ids of the whole text.

    Returns:
        (ended, begun): the tokens before ``ended`` lie within the beginning, those from ``begun`` on after it; a token
        that spans its end lies between the two.
    """
    same = 0
    while same < min(len(prefix), len(whole)) and prefix[same] == whole[same]:
        same += 1
    return same, same if same == len(prefix) else min(same + 1, len(whole))
