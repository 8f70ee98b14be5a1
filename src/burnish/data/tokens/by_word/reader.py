"""Text -> ids, word by word; a word that was tokenised before is looked up and not tokenised again.

In: texts. Out: exactly the ids of the tokenizer, or None for a text that cannot be read this way; then the caller runs
the tokenizer itself. Words follow Zipf's law, so most words of a text are repeats, and a look-up takes a small part of
the time in which a tokenizer reads a word.

``word_boundaries.py`` finds the word boundaries of a text, ``premises.py`` checks that they hold for a tokenizer, and
``piece_table.py`` looks up the pieces between two boundaries. Many texts are processed together in numpy, as UTF-8
with marks between them.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from burnish.core.types import Ids
from burnish.data.tokens.by_word.piece_table import PADDING, ROOM, PieceTable
from burnish.data.tokens.by_word.pre_tokens import by_tokenizer, is_long
from burnish.data.tokens.by_word.ragged import Found, Numbers, laid, merged
from burnish.data.tokens.by_word.word_boundaries import BEHIND, MARKS, TEXT, TOKEN, word_boundaries

# P pieces of all texts of a block, K tokens of all of them.

_BLOCK = 1 << 16  # characters that are read together, so that numpy's arrays stay in the processor's cache
_ANY_WORD = "a"


class Words:
    """Reads texts with one tokenizer, and keeps the words that it has read so far.

    Args:
        backend: the tokenizer proper.
        added: the content of each added token, and its id.
        refused: a text that holds one of these cannot be divided at its added tokens.
        ascii_only: also refuse all texts that are not ASCII.
        read: returns the ids of pieces between word boundaries; of pieces that do not begin with a space only where
            ``pre_tokens`` are given.
        pre_tokens: divides a piece into pre-tokens. None where a piece at the beginning of a text, or after an added
            token, is read differently from other pieces.
    """

    def __init__(
        self, backend: Any, added: dict[str, int], refused: Sequence[str], ascii_only: bool,
        read: Callable[[Sequence[bytes]], Found],
        pre_tokens: Callable[[str], list[str] | None] | None = None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._added = {bytes([TOKEN]) + content.encode(): [token_id] for content, token_id in added.items()}
        self._control = re.compile(f"({any_of(added)})".encode())
        self._token = next(iter(added), "")
        self._refused, self._ascii_only = refused, ascii_only
        self._read, self._pre_tokens = read, pre_tokens
        self._table = PieceTable(self._read_new)
        self._borders: dict[tuple[bytes, int], tuple[int, int]] = {}
        self._room = ROOM

    def ids(self, texts: Sequence[str]) -> list[Ids | None]:
        """The ids of each text, None where it cannot be divided or nothing is gained by it."""
        found: list[Ids | None] = [None] * len(texts)
        for block in self._blocks(texts):
            for at, ids in zip(block, self._block([texts[at] for at in block]).by_text(), strict=True):
                found[at] = ids
        return found

    def located(
        self, texts: Sequence[str], positions: Sequence[Sequence[int]]
    ) -> list[tuple[Ids, list[tuple[int, int]]] | None]:
        """The ids of each text, and its character positions among them, in the form of ``Encoder.boundaries``."""
        found: list[tuple[Ids, list[tuple[int, int]]] | None] = [None] * len(texts)
        for block in self._blocks(texts):
            read = self._block([texts[at] for at in block])
            for number, (at, ids) in enumerate(zip(block, read.by_text(), strict=True)):
                if ids is not None:
                    places = read.places(number, texts[at], positions[at])
                    found[at] = ids, [self._border(*place) for place in places]
        return found

    def _blocks(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield blocks of numbers of texts that can be divided."""
        block: list[int] = []
        size = 0
        for at, text in enumerate(texts):
            if not any(word in text for word in self._refused) and (not self._ascii_only or text.isascii()):
                block.append(at)
                size += len(text)
            if size > _BLOCK:
                yield block
                block, size = [], 0
        if block:
            yield block

    def _block(self, texts: Sequence[str]) -> _Block:
        parts = self._control.split(b"".join([b"\xff" + text.encode() for text in texts]))
        parts[1::2] = [b"\xfd" + token + b"\xfe" for token in parts[1::2]]
        marked = b"".join(parts)
        begins = word_boundaries(marked, is_fine=self._pre_tokens is not None)
        ends = np.append(begins[1:], len(marked))
        return _Block(marked, begins, *self._table.look_up(marked + PADDING, begins, ends))

    def _read_new(self, pieces: Sequence[bytes]) -> Found:
        tokens = laid([self._added[piece] for piece in pieces if piece[0] == TOKEN])
        others = self._read_text([piece for piece in pieces if piece[0] != TOKEN])
        return merged(tokens, others, [piece[0] == TOKEN for piece in pieces])

    def _read_text(self, pieces: Sequence[bytes]) -> Found:
        if self._pre_tokens:
            return self._read([piece.lstrip(MARKS) for piece in pieces])
        openings = laid([self._opening(piece) for piece in pieces if piece[0] in MARKS])
        others = self._read([piece for piece in pieces if piece[0] not in MARKS])
        return merged(openings, others, [piece[0] in MARKS for piece in pieces])

    def _opening(self, piece: bytes) -> list[int] | None:
        """The ids of a piece that does not begin with a space, where such pieces are read differently from others."""
        text = piece[1:].decode()
        if is_long(text):
            return None
        if piece[0] == TEXT:
            return by_tokenizer(self._backend, text)
        return by_tokenizer(self._backend, self._token + text)[1:]

    def _border(self, before: int, count: int, piece: bytes, position: int) -> tuple[int, int]:
        """Locate a position within a piece among the tokens of its text.

        Args:
            before, count: tokens before the piece, and its own.
            position: in bytes, after the piece's mark.
        """
        mark, plain = piece[0], piece.lstrip(MARKS)
        if position in (0, len(plain)):
            at = before + count if position else before
            return at, at
        if mark == TOKEN:
            return before, before + count
        key = (piece, position)
        if key not in self._borders:
            if self._room < 0:
                self._borders, self._room = {}, ROOM
            self._borders[key] = self._inside(mark, plain.decode(), len(plain[:position].decode()))
            self._room -= len(piece)
        ended, begun = self._borders[key]
        return before + ended, before + begun

    def _inside(self, mark: int, piece: str, position: int) -> tuple[int, int]:
        """Locate a position within a piece among the piece's tokens, with the tokenizer's offsets."""
        # A piece is read after something that it may follow, as in its text.
        prefix = {TEXT: "", BEHIND: self._token}.get(mark, _ANY_WORD)
        before = 0
        if self._pre_tokens:
            prefix = ""
            start, end = _cuts_around(self._pre_tokens(piece) or [piece], position)
            before = len(self._read([piece[:start].encode()])[0])
            piece, position = piece[start:end], position - start
        if not position:
            return before, before
        before -= len(by_tokenizer(self._backend, prefix))
        offsets = self._backend.encode(prefix + piece, add_special_tokens=False).offsets
        position += len(prefix)
        ended = bisect_right([end for _, end in offsets], position)
        return before + ended, before + bisect_left([start for start, _ in offsets], position)


class _Block:
    """A block of texts that have been read.

    Args:
        marked: the bytes of all of them.
        begins: (P,) the begins of pieces; a piece goes up to the next one, and its first byte may be a mark.
        ids: (K,) of all pieces.
        counts: (P,) tokens of each piece; -1 for one that should not be read by itself.
    """

    def __init__(self, marked: bytes, begins: Numbers, ids: Numbers, counts: Numbers) -> None:
        self._marked, self._begins, self._counts = marked, begins, counts
        self._first_bytes = np.frombuffer(marked, np.uint8)[begins]
        self._texts = np.flatnonzero(self._first_bytes == TEXT)  # the first piece of each text
        self._before = np.append(0, np.maximum(counts, 0).cumsum())  # (P + 1,) tokens before each piece
        self._raw, self._item = ids.tobytes(), ids.itemsize

    def by_text(self) -> Iterator[Ids | None]:
        """The ids of each text, None where a piece of it has none."""
        is_refused = np.logical_or.reduceat(self._counts < 0, self._texts)
        borders = (np.append(self._before[self._texts], self._before[-1]) * self._item).tolist()
        for has_none, (start, end) in zip(is_refused.tolist(), pairwise(borders), strict=True):
            yield None if has_none else array("i", self._raw[start:end])

    def places(self, number: int, text: str, positions: Sequence[int]) -> Iterator[tuple[int, int, bytes, int]]:
        """The piece around each position in a text.

        Returns:
            (before, count, piece, position) per position: tokens of the text before the piece around it, and of the
            piece; the piece; and the number of its bytes, without its mark, before the position.
        """
        begins, before, counts, texts, marks, unmarked = self._lists
        first, behind = texts[number], texts[number + 1]
        first_mark, behind_marks = (bisect_left(marks, begins[piece]) for piece in (first, behind))
        for position in positions:
            place = begins[first] + (position if text.isascii() else len(text[:position].encode()))
            place += bisect_right(unmarked, place - first_mark, first_mark, behind_marks) - first_mark
            at = bisect_right(begins, place, first, behind) - 1
            piece = self._marked[begins[at] : begins[at + 1]]
            inside = place - begins[at] - (piece[0] in MARKS)
            yield before[at] - before[first], counts[at], piece, inside

    @cached_property
    def _lists(self) -> tuple[list[int], ...]:
        """Lists, which are faster than arrays to read item by item: begins of pieces and the block's end; tokens before
        each piece; tokens of each piece; the first piece of each text and the end; positions of marks; and these
        positions without the marks before them."""
        begins = [*self._begins.tolist(), len(self._marked)]
        texts = [*self._texts.tolist(), len(self._begins)]
        marks = self._begins[self._first_bytes >= TOKEN]
        unmarked = marks - np.arange(len(marks))
        return begins, self._before.tolist(), self._counts.tolist(), texts, marks.tolist(), unmarked.tolist()


def _cuts_around(pre_tokens: Sequence[str], position: int) -> tuple[int, int]:
    """The borders of pre-tokens around a position in their piece, without borders that follow whitespace.

    Some tokenizers leave whitespace out of the offsets of a token, so it would belong to neither side.
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


def any_of(texts: Sequence[str] | dict[str, int]) -> str:
    """Make a pattern that matches any of the texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"  # (?!) matches nowhere
