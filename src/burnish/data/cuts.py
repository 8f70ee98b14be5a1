"""Where texts may be cut: no token spans the cut, and neither side changes how the other is read.

In: the bytes of texts, with marks where a text begins and around added tokens. Out: where pieces begin.

- At a token that was added to the vocabulary: the tokenizer cuts there first.
- Before a space that follows something else than whitespace. With byte-level BPE that holds under the patterns of
  ``pre_tokens.py``: in none of them a space matches but at the start of a pre-token, and a lookahead looks at what
  follows whitespace only. With BPE over "▁" for spaces it holds where no token of the vocabulary has a "▁" behind
  another character, for a merge across the cut would make one.
- With byte-level BPE also where a run of letters or of digits ends: in none of the patterns anything follows them in a
  pre-token. A letter is one of ASCII before anything else of ASCII, or a Chinese one before a mark of punctuation.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from burnish.data.found_ids import Numbers, stretches

# P pieces of all texts.

TEXT, TOKEN, BEHIND = 0xFF, 0xFD, 0xFE
MARKS = bytes([TEXT, TOKEN, BEHIND])
"""What follows begins a text, is an added token, stands behind one. No UTF-8 holds such bytes."""

# Reasons to cut between two bytes: what stands left and what stands right must share one. Anything is cut before a
# mark, what is printed before a space (beyond ASCII it has to be looked at), a run of letters or digits at its end.
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
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]  # all there are


def _codes(characters: Iterable[str]) -> Numbers:
    return np.array([int.from_bytes(character.encode(), "big") for character in characters])


_WIDE_SPACES = _codes(space for space in _SPACES if not space.isascii())
_PUNCTUATION = _codes("\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f")
_HAN = _codes("\u4e00\u9fa5")  # letters in every version of Unicode, and what no normalizer changes


def cuts(marked: bytes, is_fine: bool) -> Numbers:
    """(P,) where pieces begin.

    Args:
        marked: UTF-8, with ``MARKS``.
        is_fine: cut as it is right for byte-level BPE only.
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
    """Where a mark of punctuation follows a Chinese character: as behind a letter of ASCII, a pre-token ends there."""
    at = np.flatnonzero((text == 0xE3) | (text == 0xEF))
    at = at[at > 3]
    at = at[np.isin(_three(text, at), _PUNCTUATION)]
    before = _three(text, at - 3)
    found: Numbers = at[(before >= _HAN[0]) & (before <= _HAN[1])]
    return found


def _three(text: Numbers, at: Numbers) -> Numbers:
    """The three bytes from each place on, as one number."""
    first, second, third = (text[at + place].astype(np.int32) for place in range(3))
    code: Numbers = first << 16 | second << 8 | third
    return code
