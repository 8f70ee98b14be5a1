"""Word boundaries: positions that no token spans, where each side is read as if it stood alone.

In: the bytes of texts, with marks at their beginning and around added tokens. Out: the begins of pieces. There is a
boundary

- at a token that was added to the vocabulary: the tokenizer splits the text there first;
- before a space that follows something other than whitespace. For byte-level BPE this holds with the patterns of
  ``pre_tokens.py``: a space matches only at the start of a pre-token, and lookaheads follow whitespace only. For BPE
  with "▁" for spaces it holds where no token of the vocabulary has a "▁" after another character, because a merge
  across the boundary would make such a token;
- for byte-level BPE also at the end of a run of letters or digits, after which no pattern continues a pre-token. Only
  an ASCII letter before another ASCII character counts, and a Chinese one before a punctuation mark.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from burnish.data.tokens.by_word.ragged import Numbers, stretches

# P pieces of all texts.

TEXT, TOKEN, BEHIND = 0xFF, 0xFD, 0xFE
MARKS = bytes([TEXT, TOKEN, BEHIND])
"""Marks: a text begins here; an added token; text after an added token. UTF-8 never contains these bytes."""

# Reasons for a boundary between two bytes; the left and the right byte must have one in common. There is one before
# a mark, between a printed character and a space (beyond ASCII with a closer look), and after letters or digits.
_ANY, _PRINTED, _WIDE, _LETTER, _DIGIT = 1, 2, 4, 8, 16


def _left(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80:
        return _ANY if byte in MARKS else _ANY | _WIDE
    if character.isspace():
        return _ANY
    return _ANY | _PRINTED | (_LETTER if character.isalpha() else _DIGIT if character.isdigit() else 0)


def _right(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80:
        return _ANY if byte in MARKS else 0
    if character == " ":
        return _PRINTED | _WIDE
    return _DIGIT if character.isalpha() else _LETTER if character.isdigit() else _LETTER | _DIGIT


_LEFT, _RIGHT = bytes(map(_left, range(256))), bytes(map(_right, range(256)))
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]  # all of Unicode's


def _codes(characters: Iterable[str]) -> Numbers:
    return np.array([int.from_bytes(character.encode(), "big") for character in characters])


_WIDE_SPACES = _codes(space for space in _SPACES if not space.isascii())
_PUNCTUATION = _codes("\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f")
_HAN = _codes("\u4e00\u9fa5")  # letters in every version of Unicode that no normalizer changes


def word_boundaries(marked: bytes, is_fine: bool) -> Numbers:
    """(P,) the begins of pieces.

    Args:
        marked: UTF-8, with ``MARKS``.
        is_fine: also use the boundaries that hold for byte-level BPE only.
    """
    text = np.frombuffer(marked, np.uint8)
    left, right = (np.frombuffer(marked.translate(kinds), np.uint8) for kinds in (_LEFT, _RIGHT))
    pairs = np.full(len(text), _ANY, np.uint8)
    np.bitwise_and(left[:-1], right[1:], out=pairs[1:])
    if not is_fine:
        pairs &= _ANY | _PRINTED | _WIDE
    is_cut = pairs > 0
    tokens = np.flatnonzero(text == TOKEN) + 1
    is_cut[stretches(tokens, np.flatnonzero(text == BEHIND) - tokens)] = False
    blanks = np.flatnonzero(pairs == _WIDE)
    last = _three(text, blanks - 3)
    is_cut[blanks[np.isin(last, _WIDE_SPACES) | np.isin(last & 0xFFFF, _WIDE_SPACES)]] = False
    if is_fine:
        is_cut[_clauses(text)] = True
    return np.flatnonzero(is_cut)


def _clauses(text: Numbers) -> Numbers:
    """Positions of punctuation marks after a Chinese character; as after an ASCII letter, a pre-token ends there."""
    at = np.flatnonzero((text == 0xE3) | (text == 0xEF))
    at = at[at > 3]
    at = at[np.isin(_three(text, at), _PUNCTUATION)]
    before = _three(text, at - 3)
    found: Numbers = at[(before >= _HAN[0]) & (before <= _HAN[1])]
    return found


def _three(text: Numbers, at: Numbers) -> Numbers:
    """The three bytes from each position on, as one number."""
    first, second, third = (text[at + place].astype(np.int32) for place in range(3))
    code: Numbers = first << 16 | second << 8 | third
    return code
