"""Text -> ids under byte-level BPE, pre-token by pre-token; one that was tokenised before is looked up.

In: a text without added tokens. Out: its ids, the same as from the tokenizer itself. The tokenizer's regular expression
divides the text into pre-tokens, and the tokenizer's model reads each of them. Here the expression is run by Python, in
ASCII only, where the character classes of all regular expression engines are the same. Each character beyond ASCII is
replaced by an ASCII character of the same class (its stand-in), which the tokenizer's own engine determines.

A character that a normalizer might change, or a letter that is an ASCII letter in another case ("ſ"), has no stand-in:
a piece with such a character is read by the tokenizer as a whole.
"""

from __future__ import annotations

import re
from array import array
from codecs import charmap_decode
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, compress, pairwise
from typing import Any
from unicodedata import category, is_normalized

import numpy as np

from burnish.data.tokens.by_word.ragged import Found, ended, laid, merged

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = (GPT2, QWEN2, LLAMA3, QWEN3_5)
"""Patterns of the pre-tokenizers of GPT-2, Qwen2 and Qwen3, Llama 3, Qwen3.5. The matches of each cover any text."""

ROOM = 1 << 20  # characters of the pre-tokens that are kept: some 150,000 words, 30 MB
_LONGEST = 48  # characters: longer ones seldom occur again
_LONG_WORD = 24  # characters
_TOGETHER = 50  # pre-tokens in one call of the model; with more, each takes longer
_BETWEEN, _NONE = "\0", "\x01"  # separates pieces; marks a character that has no stand-in
_END = -1  # the separator among ids


class PreTokens:
    """Pieces of text under one byte-level tokenizer, and the pre-tokens it has read so far.

    Args:
        backend: the tokenizer proper.
        pattern: one of ``PATTERNS``.
        lone: returns a byte that is in no token but its own, or None; called only where such a byte saves time.
    """

    def __init__(self, backend: Any, pattern: str, lone: Callable[[], bytes | None]) -> None:
        self._backend, self._model = backend, backend.model
        self._cut = re.compile(_in_ascii(pattern), re.ASCII).findall
        self._stand_ins = _StandIns(pattern, is_normalised=backend.normalizer is not None)
        self._lone = lone
        self._known: dict[str, bytes] = {}
        self._room = ROOM

    def read(self, pieces: Sequence[bytes]) -> Found:
        """The ids of pieces in UTF-8; none for a long one that cannot be divided."""
        is_word = [piece[piece[:1] == b" " :].isalpha() for piece in pieces]  # one pre-token under every pattern
        words = self._by_model(list(compress(pieces, is_word)))
        others = self._by_pattern([piece.decode() for piece, is_one in zip(pieces, is_word, strict=True) if not is_one])
        return merged(words, others, is_word)

    def of(self, piece: str) -> list[str] | None:
        """The pre-tokens of a piece, None where it cannot be divided."""
        shape = piece.translate(self._stand_ins)
        return None if _NONE in shape or _BETWEEN in shape else _parted(piece, self._cut(shape))

    def _by_pattern(self, pieces: Sequence[str]) -> Found:
        shapes = [piece if piece.isascii() else piece.translate(self._stand_ins) for piece in pieces]
        can_be_cut = [not (_NONE in shape or _BETWEEN in shape) for shape in shapes]
        cut = self._by_pre_tokens(list(compress(pieces, can_be_cut)), list(compress(shapes, can_be_cut)))
        whole = [piece for piece, is_cut in zip(pieces, can_be_cut, strict=True) if not is_cut]
        read = laid([None if is_long(piece) else by_tokenizer(self._backend, piece) for piece in whole])
        return merged(cut, read, can_be_cut)

    def _by_pre_tokens(self, pieces: Sequence[str], shapes: Sequence[str]) -> Found:
        """The ids of pieces, pre-token by pre-token. Args: shapes: the pieces with stand-ins in place of characters."""
        pre_tokens = _parted("".join(p + _BETWEEN for p in pieces), self._cut("".join(s + _BETWEEN for s in shapes)))
        if self._room < 0:
            self._known, self._room = {}, ROOM
        new = [pre_token for pre_token in dict.fromkeys(pre_tokens) if pre_token not in self._known]
        ids, counts = self._by_model([pre_token.encode() for pre_token in new])
        borders = (np.append(0, counts.cumsum()) * ids.itemsize).tolist()
        raw = ids.tobytes()
        self._known.update(zip(new, (raw[start:end] for start, end in pairwise(borders)), strict=True))
        self._known[_BETWEEN] = array("i", [_END]).tobytes()
        found = np.frombuffer(b"".join(map(self._known.__getitem__, pre_tokens)), np.int32)
        for pre_token in new:
            if len(pre_token) > _LONGEST:
                del self._known[pre_token]
            else:
                self._room -= len(pre_token)
        return ended(found, _END)

    def _by_model(self, pre_tokens: Sequence[bytes]) -> Found:
        if not self._model.ignore_merges:
            return self._by_merges(pre_tokens)
        tokens = [self._model.token_to_id(_named(pre_token)) for pre_token in pre_tokens]  # if the whole is one token
        is_token = [token is not None for token in tokens]
        others = [pre_token for pre_token, is_one in zip(pre_tokens, is_token, strict=True) if not is_one]
        return merged(laid([[token] for token in tokens if token is not None]), self._by_merges(others), is_token)

    def _by_merges(self, pre_tokens: Sequence[bytes]) -> Found:
        """The ids of each pre-token; several in one call, separated by a byte that merges with no other."""
        lone = self._lone() if len(pre_tokens) > _TOGETHER else None
        if lone is None:
            return laid([self._ids(pre_token) for pre_token in pre_tokens])
        some = (pre_tokens[start : start + _TOGETHER] for start in range(0, len(pre_tokens), _TOGETHER))
        found = chain.from_iterable(self._ids(lone.join(each) + lone) for each in some)
        return ended(np.fromiter(found, np.int32), *self._ids(lone))

    def _ids(self, text: bytes) -> list[int]:
        return [token.id for token in self._model.tokenize(_named(text))]


def _named(text: bytes) -> str:
    """The bytes as characters, as a byte-level vocabulary spells them."""
    return charmap_decode(text, "strict", _BYTE_NAMES)[0]


def _parted(text: str, shapes: list[str]) -> list[str]:
    """Split a text into parts as long as those of its shape."""
    if text.isascii():
        return shapes
    borders = accumulate(map(len, shapes), initial=0)
    return [text[start:end] for start, end in pairwise(borders)]


def by_tokenizer(backend: Any, text: str) -> list[int]:
    """The ids of a text, without the offsets, which cost time."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def is_long(word: str) -> bool:
    """Return whether a word seems to be of a script without spaces, whose long "words" seldom occur again."""
    return len(word) > _LONG_WORD and not word.isascii()


# The character for each byte in a byte-level vocabulary: printable bytes of Latin-1 are themselves, the others are
# numbered from 256 on. Source: OpenAI, gpt-2/src/encoder.py, bytes_to_unicode.
_COUNTED = {byte: chr(256 + at) for at, byte in enumerate([*range(33), *range(127, 161), 173])}
_BYTE_NAMES = "".join(_COUNTED.get(byte, chr(byte)) for byte in range(256))


class _StandIns(dict[int, str]):
    """Code of a character -> its stand-in: an ASCII character of the same class in the pattern; in ASCII, itself."""

    def __init__(self, pattern: str, is_normalised: bool) -> None:
        from tokenizers import Regex, pre_tokenizers

        super().__init__({code: chr(code) for code in range(128)})
        self._is_normalised = is_normalised
        letters = r"[\p{L}\p{M}]" if r"\p{M}" in pattern else r"\p{L}"
        # The first that matches counts. A tab stands for whitespace that no pattern names.
        asked = {r"(?i:[a-z\r\n])": _NONE, letters: "a", r"\p{N}": "0", r"\s": "\t"}
        self._classes = [
            (pre_tokenizers.Split(Regex(expression), "removed"), stand_in) for expression, stand_in in asked.items()
        ]

    def __missing__(self, code: int) -> str:
        character = chr(code)
        found = _NONE
        if not (self._is_normalised and _may_change(character)):
            matching = (stand_in for split, stand_in in self._classes if not split.pre_tokenize_str(character))
            found = next(matching, "!")
        self[code] = found
        return found


def _may_change(character: str) -> bool:
    """Return whether NFC may change a character, alone or with the one before it, in any version of Unicode.

    A character that combines with the one before it is a mark, a Hangul jamo, or a letter of a script that is newer
    than this version. Source: Unicode Standard Annex 15, section 9, NFC_Quick_Check.
    """
    is_jamo, is_rare = "\u1100" <= character <= "\u11ff", "\U00010000" <= character < "\U0001f000"
    return is_jamo or is_rare or category(character)[0] in "MC" or not is_normalized("NFC", character)


def _in_ascii(pattern: str) -> str:
    """Translate a tokenizer's pattern to Python's syntax, for ASCII pieces separated by ``_BETWEEN``. The separator is
    a match of its own, and counts as the end of the text for the piece before it."""
    pattern = pattern.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")
    in_brackets = re.sub(
        r"\[[^\]]*\]", lambda found: found[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), pattern
    )
    parting = in_brackets.replace("[^", rf"[^{_BETWEEN}").replace(r"(?!\S)", rf"(?![^\s{_BETWEEN}])")
    return parting.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]") + f"|{_BETWEEN}"
