"""Pieces of text -> their ids, thousands of pieces at once and without a Python object for each.

In: UTF-8 bytes, and the begins and ends of pieces in them. Out: the ids of the pieces, concatenated. A piece of up to
fifteen bytes is stored as two numbers of 64 bits, its bytes and its length, so the key is the piece itself and not a
hash of it. A hash table with open addressing finds the entries of all pieces in a few passes. Longer pieces, and those
that are not in the table, are looked up one by one in a dict; the tokenizer reads those that are not there either.

The size of the table is bounded by ``ROOM``. Long pieces seldom occur again, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from burnish.data.tokens.by_word.ragged import Found, Numbers, starts, stretches

# P pieces, E entries of the table.

ROOM = 1 << 20  # bytes of the pieces that are kept: some 150,000 words, 30 MB
LONGEST = 96  # bytes of a piece that is kept
PADDING = bytes(16)
"""Bytes to append to the text, because sixteen bytes are read from the begin of every piece."""

_SHORT = 15  # bytes; the sixteenth holds their number
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], "<u8")
# Odd numbers with irregular bits: the golden ratio, and a constant of xxHash (https://github.com/Cyan4973/xxHash).
_MIX_LOW, _MIX_HIGH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class PieceTable:
    """The pieces read so far.

    Args:
        read: returns the ids of new pieces.
    """

    def __init__(self, read: Callable[[Sequence[bytes]], Found]) -> None:
        self._read = read
        self._clear()

    def _clear(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._room = ROOM
        # (E,) per entry: its piece as two numbers, the position and the number of its ids, -1 if it has none.
        # Entry 0 is never a piece, because every piece has a length in the highest byte of ``high``.
        self._low, self._high = np.zeros(1, "<u8"), np.zeros(1, "<u8")
        self._first, self._counts = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._ids = np.zeros(0, np.int32)
        self._slots = np.zeros(1 << 12, np.int64)  # slot of the hash table -> entry, 0 for an empty slot

    def __len__(self) -> int:
        return len(self._entries)

    def look_up(self, text: bytes, begins: Numbers, ends: Numbers) -> Found:
        """The ids of pieces of a text.

        Args:
            text: UTF-8, with ``PADDING``.
            begins, ends: (P,) of each piece, in bytes; none is empty.
        """
        if self._room < 0:
            self._clear()
        low, high = _as_numbers(text, begins, ends)
        entries = self._find(low, high)
        unknown = np.flatnonzero(entries == 0)
        pieces = [text[begin:end] for begin, end in zip(begins[unknown].tolist(), ends[unknown].tolist(), strict=True)]
        new = sorted((piece for piece in dict.fromkeys(pieces) if piece not in self._entries), key=len)
        self._learn(new)
        entries[unknown] = np.fromiter(map(self._entries.__getitem__, pieces), np.int64, len(pieces))
        counts = self._counts[entries]
        ids = self._ids[stretches(self._first[entries], counts)]
        self._room -= sum(map(len, new))
        self._forget([piece for piece in new if len(piece) > LONGEST])
        return ids, counts

    def _find(self, low: Numbers, high: Numbers) -> Numbers:
        """(P,) the entry of each piece, 0 where it is not in the slots."""
        last = len(self._slots) - 1
        slots = self._slot_of(low, high)
        entries = self._slots[slots]
        others = np.flatnonzero((self._low[entries] != low) | (self._high[entries] != high))
        while len(others := others[entries[others] > 0]):  # the slot of another piece: try the next one
            slots[others] = (slots[others] + 1) & last
            entries[others] = self._slots[slots[others]]
            there = entries[others]
            others = others[(self._low[there] != low[others]) | (self._high[there] != high[others])]
        return entries

    def _slot_of(self, low: Numbers, high: Numbers) -> Numbers:
        mixed = (low ^ (high * _MIX_HIGH)) * _MIX_LOW
        return (mixed >> np.uint64(65 - len(self._slots).bit_length())).astype(np.int64)

    def _learn(self, pieces: list[bytes]) -> None:
        """Read new pieces and add them. Args: pieces: the short ones first."""
        if not pieces:
            return
        ids, counts = self._read(pieces)
        entry = len(self._counts)
        self._entries.update(zip(pieces, range(entry, entry + len(pieces)), strict=True))
        self._first = np.append(self._first, len(self._ids) + starts(counts))
        self._counts = np.append(self._counts, counts)
        self._ids = np.append(self._ids, ids)
        short = [piece for piece in pieces if len(piece) <= _SHORT]
        ends = np.array([*accumulate(map(len, short), initial=0)])
        low, high = _as_numbers(b"".join(short) + PADDING, ends[:-1], ends[1:])
        padding = np.zeros(len(pieces) - len(short), "<u8")
        self._low, self._high = np.concatenate([self._low, low, padding]), np.concatenate([self._high, high, padding])
        while 3 * len(self._counts) > len(self._slots):
            self._slots = np.zeros(2 * len(self._slots), np.int64)
            entry = 1
        self._enter(np.flatnonzero(self._high[entry:]) + entry)

    def _enter(self, entries: Numbers) -> None:
        """Give each of these entries a slot: the first free one from the slot of its hash on."""
        slots = self._slot_of(self._low[entries], self._high[entries])
        while len(entries):
            free = self._slots[slots] == 0
            self._slots[slots[free]] = entries[free]  # if several need the same slot, the last one gets it
            left = self._slots[slots] != entries
            entries, slots = entries[left], (slots[left] + 1) & (len(self._slots) - 1)

    def _forget(self, pieces: list[bytes]) -> None:
        """Remove pieces. Args: pieces: those that were added last."""
        if not pieces:
            return
        entry = self._entries[pieces[0]]
        for piece in pieces:
            del self._entries[piece]
            self._room += len(piece)
        self._ids = self._ids[: self._first[entry]]
        self._first, self._counts = self._first[:entry], self._counts[:entry]
        self._low, self._high = self._low[:entry], self._high[:entry]


def _as_numbers(text: bytes, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    """(P,) the first eight bytes of each piece, and (P,) the others with its length; 0 and 0 for a long piece."""
    windows = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))  # eight bytes from each position on
    lengths = ends - begins
    low = windows[begins] & _FIRST_BYTES[np.minimum(lengths, 8)]
    rest = np.clip(lengths - 8, 0, 7)
    high = windows[np.minimum(begins + 8, len(windows) - 1)] & _FIRST_BYTES[rest]
    high |= lengths.astype("<u8") << np.uint64(56)
    is_short = lengths <= _SHORT
    return low * is_short, high * is_short
