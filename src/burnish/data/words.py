"""Text -> ids, word by word: a word that was tokenised before is looked up and not tokenised again.

In: a text. Out: the very ids of the tokenizer, or None where they cannot be had this way; the caller asks the tokenizer
itself then. Words follow Zipf's law, so that most of a text is repeats, and a look-up costs a small part of what a
tokenizer needs for a word.

A text may be cut where no token can span the cut and no side changes how the other is read:

- at a token that was added to the vocabulary: the tokenizer cuts there first;
- before a space that follows something else than whitespace (``_CUT``). With byte-level BPE that holds under the
  patterns of ``pre_tokens.py``: in none of them a space matches but at the start of a pre-token, and a lookahead looks
  at what follows whitespace only. With BPE over "▁" for spaces it holds where no token of the vocabulary has a "▁"
  behind another character, for a merge across the cut would make one.

``word_premises.py`` holds these premises against a tokenizer. A word is read by the tokenizer's own model.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from burnish.data.pre_tokens import ROOM, Ids, Memory, Whole, by_tokenizer, refuse_long

_CUT = re.compile(r"(?<=\S)(?= )")
_ANY_WORD = "a"
_ITEM = array("i").itemsize


class Words:
    """The ids of texts under one tokenizer, and the words it has read so far.

    Args:
        backend: the tokenizer proper.
        added: the content of each added token, and its id.
        refused: a text that holds one of these cannot be cut at its added tokens.
        ascii_only: refuse all other texts too.
        read: the ids of what stands between two cuts, a space and a word. Raises Whole where it had better not be read
            by itself.
        pre_tokens: what a piece is cut into, where a text at the beginning, or behind an added token, is read as any
            other piece; None where it is not.
    """

    def __init__(
        self, backend: Any, added: dict[str, int], refused: Sequence[str], ascii_only: bool,
        read: Callable[[str], bytes], pre_tokens: Callable[[str], list[str] | None] | None = None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._added = {content: array("i", [token]).tobytes() for content, token in added.items()}
        self._control = re.compile(f"({any_of(added)})")
        self._token = next(iter(added), "")
        self._refused, self._ascii_only = refused, ascii_only
        self._read, self._pre_tokens = read, pre_tokens
        self._inner = Memory(self._closed)  # words that follow a space and are followed by one
        self._last = Memory(lambda word: read(" " + word))  # words that follow a space and end their segment
        self._first = Memory(read if pre_tokens else self._opening)
        self._behind_token = Memory(read if pre_tokens else self._opening_behind_token)
        self._borders: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._room = ROOM

    def ids(self, text: str) -> Ids | None:
        """The ids of a text, None where it cannot be cut or nothing is gained by it."""
        if not self._may_be_cut(text):
            return None
        try:
            return _numbers(b"".join(self._by_segment(self._control.split(text))))
        except Whole:
            return None

    def located(self, text: str, positions: Sequence[int]) -> tuple[Ids, list[tuple[int, int]]] | None:
        """The ids of a text, and where each character position falls among them, as ``Encoder.boundaries`` says it."""
        if not self._may_be_cut(text):
            return None
        segments = self._control.split(text)
        try:
            found = self._by_segment(segments)
        except Whole:
            return None
        starts = [0, *accumulate(map(len, segments))]
        counts = [0, *accumulate(len(ids) // _ITEM for ids in found)]
        borders = []
        for position in positions:
            at = bisect_right(starts, position) - 1
            inside = position - starts[at]
            if inside and at % 2:
                borders.append((counts[at], counts[at + 1]))
            else:
                ended, begun = self._border(segments[at], inside, at > 0) if inside else (0, 0)
                borders.append((counts[at] + ended, counts[at] + begun))
        return _numbers(b"".join(found)), borders

    def _may_be_cut(self, text: str) -> bool:
        return not any(word in text for word in self._refused) and (not self._ascii_only or text.isascii())

    def _by_segment(self, segments: Sequence[str]) -> list[bytes]:
        """The ids of each segment; every second one is an added token."""
        return [self._added[s] if at % 2 else self._segment(s, at > 0) for at, s in enumerate(segments)]

    def _segment(self, text: str, follows: bool) -> bytes:
        """The ids of a text without added tokens. ``follows``: it stands behind one."""
        if not text:
            return b""
        first = self._behind_token if follows else self._first
        opening, *inner = text.split(" ")
        if not inner:
            return first[opening]
        last = inner.pop()
        try:
            if _is_open(opening):
                raise _OpenWord
            return first[opening] + b"".join(map(self._inner.__getitem__, inner)) + self._last[last]
        except _OpenWord:  # not every space is a cut
            pieces = _CUT.split(text)
            return first[pieces[0]] + b"".join(self._last[piece[1:]] for piece in pieces[1:])

    def _opening(self, piece: str) -> bytes:
        refuse_long(piece)
        return by_tokenizer(self._backend, piece)

    def _opening_behind_token(self, piece: str) -> bytes:
        refuse_long(piece)
        return by_tokenizer(self._backend, self._token + piece)[_ITEM:]

    def _closed(self, word: str) -> bytes:
        if _is_open(word):
            raise _OpenWord
        return self._read(" " + word)

    def _border(self, segment: str, position: int, follows: bool) -> tuple[int, int]:
        """Where a position within a segment falls among the segment's tokens."""
        start, end = _cut_before(segment, position), _cut_after(segment, position)
        before = len(self._segment(segment[:start], follows)) // _ITEM
        if start == position:
            return before, before
        piece, position = segment[start:end], position - start
        # A piece is read behind something that it may follow, as it is in its text.
        prefix = "" if self._pre_tokens else _ANY_WORD if start else self._token if follows else ""
        if pre_tokens := self._pre_tokens and self._pre_tokens(piece):
            start, end = _cuts_around(pre_tokens, position)
            before += len(self._read(piece[:start])) // _ITEM
            piece, position = piece[start:end], position - start
        ended, begun = self._border_in_piece(prefix, piece, position) if position else (0, 0)
        return before + ended, before + begun

    def _border_in_piece(self, prefix: str, piece: str, position: int) -> tuple[int, int]:
        key = (prefix, piece, position)
        if key not in self._borders:
            if self._room < 0:
                self._borders, self._room = {}, ROOM
            num_before = len(by_tokenizer(self._backend, prefix)) // _ITEM
            offsets = self._backend.encode(prefix + piece, add_special_tokens=False).offsets
            position += len(prefix)
            ended, begun = (
                bisect_right([e for _, e in offsets], position),
                bisect_left([s for s, _ in offsets], position),
            )
            self._borders[key] = ended - num_before, begun - num_before
            self._room -= len(piece)
        return self._borders[key]


class _OpenWord(Exception):
    """The space behind a word is no cut."""


def _cut_before(text: str, position: int) -> int:
    """The last cut at or before a position, 0 where there is none."""
    at = position + 1
    while (at := text.rfind(" ", 0, at)) > 0:
        if not text[at - 1].isspace():
            return at
    return 0


def _cut_after(text: str, position: int) -> int:
    """The first cut behind a position, the text's end where there is none."""
    at = position
    while (at := text.find(" ", at + 1)) > 0:
        if not text[at - 1].isspace():
            return at
    return len(text)


def _cuts_around(pre_tokens: Sequence[str], position: int) -> tuple[int, int]:
    """The borders of pre-tokens around a position in their piece, of those that no whitespace stands before.

    Some tokenizers leave whitespace out of the offsets of a token, so that it belongs to neither side.
    """
    start = end = 0
    for pre_token in pre_tokens:
        end += len(pre_token)
        if pre_token[-1].isspace():
            continue
        if end > position:
            break
        start = end
    return start, end


def _is_open(word: str) -> bool:
    """Whether the space behind a word is no cut: more whitespace stands before it."""
    return not word or word[-1].isspace()


def _numbers(found: bytes) -> Ids:
    numbers = array("i")
    numbers.frombytes(found)
    return numbers


def any_of(texts: Sequence[str] | dict[str, int]) -> str:
    """A pattern that matches any of the texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"  # (?!) matches nowhere
