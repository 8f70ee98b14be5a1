"""Text -> ids under byte-level BPE, pre-token by pre-token: one that was tokenised before is looked up.

In: a text without added tokens. Out: its ids, as the tokenizer itself gives them. The tokenizer's own expression cuts
the text into pre-tokens, and each is read by the tokenizer's own model. Here the expression is Python's, and matches in
ASCII only, where the character classes of all regular expressions are the same; beyond ASCII each character has a
stand-in in ASCII of the same class, for which the tokenizer's own expressions are asked.

What a normalizer might change, or a letter that is an ASCII one in another case ("ſ"), has no stand-in: a piece with
such a character is read by the tokenizer as a whole.
"""

from __future__ import annotations

import re
from array import array
from codecs import charmap_decode
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, TypeAlias
from unicodedata import category, is_normalized

Ids: TypeAlias = "array[int]"
"""Token ids, or labels, of 32 bits: laid end to end and written at the speed of memory, as no list is."""

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
"""Of the pre-tokenizers of GPT-2, Qwen2 and Qwen3, Llama 3, Qwen3.5. Each matches all of any text, piece by piece."""

ROOM = 1 << 20  # characters of what is remembered under one key or another: some 150,000 words, 30 MB
_LONGEST = 48  # characters: what is longer seldom comes again
_LONG_WORD = 24  # characters
_NONE = "\0"  # the stand-in of a character that has none


class Whole(Exception):
    """The text is read faster, or only, by the tokenizer as a whole."""


class Memory(dict[str, bytes]):
    """Text -> array bytes of ids; a text that is not in it is read when it is asked for, and kept if it is short.

    Args:
        read: what gives the ids of a text.
    """

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self._room = ROOM

    def __missing__(self, text: str) -> bytes:
        found = self._read(text)
        if len(text) <= _LONGEST:
            if self._room < 0:
                self.clear()
                self._room = ROOM
            self[text] = found
            self._room -= len(text)
        return found


class PreTokens:
    """Pieces of text under one byte-level tokenizer, and the pre-tokens it has read so far.

    Args:
        backend: the tokenizer proper.
        pattern: one of ``PATTERNS``.
    """

    def __init__(self, backend: Any, pattern: str) -> None:
        self._backend, self._model = backend, backend.model
        self._cut = re.compile(_in_ascii(pattern), re.ASCII).findall
        self._stand_ins = _StandIns(pattern, is_normalised=backend.normalizer is not None)
        self._known = Memory(self._by_model)

    def read(self, piece: str) -> bytes:
        """Array bytes of the ids. Raises Whole for a long piece that cannot be cut."""
        pre_tokens = self.of(piece)
        if pre_tokens is None:
            refuse_long(piece)
            return by_tokenizer(self._backend, piece)
        return b"".join(map(self._known.__getitem__, pre_tokens))

    def of(self, piece: str) -> list[str] | None:
        """The pre-tokens of a piece, None where a character has no stand-in."""
        if piece.isascii():
            found: list[str] = self._cut(piece)
            return found
        shape = piece.translate(self._stand_ins)
        if _NONE in shape:
            return None
        borders = accumulate(map(len, self._cut(shape)), initial=0)
        return [piece[start:end] for start, end in pairwise(borders)]

    def _by_model(self, pre_token: str) -> bytes:
        named, _ = charmap_decode(pre_token.encode(), "strict", _BYTE_NAMES)
        return array("i", [token.id for token in self._model.tokenize(named)]).tobytes()


def by_tokenizer(backend: Any, text: str) -> bytes:
    """Array bytes of the ids of a text, without the offsets, which cost time."""
    return array("i", backend.encode_batch_fast([text], add_special_tokens=False)[0].ids).tobytes()


def refuse_long(word: str) -> None:
    """Raises Whole for a word of a script without spaces: it is one long word after the other, and none comes again."""
    if len(word) > _LONG_WORD and not word.isascii():
        raise Whole


# The character that stands for each byte in a byte-level vocabulary: printable ones of Latin-1 for themselves, the
# others counted up from 256. Source: OpenAI, gpt-2/src/encoder.py, bytes_to_unicode.
_COUNTED = {byte: chr(256 + at) for at, byte in enumerate([*range(33), *range(127, 161), 173])}
_BYTE_NAMES = "".join(_COUNTED.get(byte, chr(byte)) for byte in range(256))


class _StandIns(dict[int, str]):
    """Code of a character -> a character of ASCII that the pattern takes for the same; itself within ASCII."""

    def __init__(self, pattern: str, is_normalised: bool) -> None:
        from tokenizers import Regex, pre_tokenizers

        super().__init__({code: chr(code) for code in range(128)})
        self._is_normalised = is_normalised
        letters = r"[\p{L}\p{M}]" if r"\p{M}" in pattern else r"\p{L}"
        # In this order: the first that matches. A tab is whitespace of the kind that no pattern names.
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
    """Whether NFC may change a character, by itself or with what stands before it, in any version of Unicode.

    What joins the character before it is a mark, a Hangul jamo, or a letter of a script that is newer than this
    version. Source: Unicode Standard Annex 15, section 9, NFC_Quick_Check.
    """
    is_jamo, is_rare = "\u1100" <= character <= "\u11ff", "\U00010000" <= character < "\U0001f000"
    return is_jamo or is_rare or category(character)[0] in "MC" or not is_normalized("NFC", character)


def _in_ascii(pattern: str) -> str:
    """A pattern of tokenizers in the words of Python's, for text in ASCII."""
    pattern = pattern.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")
    in_brackets = re.sub(
        r"\[[^\]]*\]", lambda found: found[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), pattern
    )
    return in_brackets.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
