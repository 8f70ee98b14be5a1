"""Text -> ids, word by word: a word that was tokenised before is looked up and not tokenised again.

In: a text. Out: the very ids of the tokenizer, or None where they cannot be had this way; the caller asks the tokenizer
itself then. Words follow Zipf's law, so that most of a text is repeats, and a look-up costs a small part of what a
tokenizer needs for a word.

A text may be cut where no token can span the cut and no side changes how the other is read:

- at a token that was added to the vocabulary: the tokenizer cuts there first;
- before a space that follows something else than whitespace (``_CUT``). With byte-level BPE that holds under the
  patterns of ``_PATTERNS``: in none of them a space matches but at the start of a pre-token, and a lookahead looks at
  what follows whitespace only. With BPE over "▁" for spaces it holds where no token of the vocabulary has a "▁" behind
  another character, for a merge across the cut would make one.

``words_of`` holds these premises against the tokenizer, and returns None where one of them is not met. A word is read
by the tokenizer's own model; only the pattern that cuts it into pre-tokens is applied here, to ASCII, where the
character classes of all regular expressions are the same.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

_CUT = re.compile(r"(?<=\S)(?= )")
_SPACE = "▁"  # U+2581, which SentencePiece writes for a space
_ANY_WORD = "a"
_LONG_WORD = 12  # characters, on the average of a text: from here on too few words come again
_ITEM = array("i").itemsize
_KEPT_CHARACTERS = 1 << 20  # of the words that are remembered: some 150,000 words, 30 MB

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = (_GPT2, _QWEN2, _LLAMA3, _QWEN3_5)
"""Of the pre-tokenizers of GPT-2, Qwen2 and Qwen3, Llama 3, Qwen3.5."""


class Words:
    """The ids of texts under one tokenizer, and the words it has read so far.

    Args:
        backend: the tokenizer proper.
        added: the content of each added token, and its id.
        refused: a text that holds one of these cannot be cut at its added tokens.
        ascii_only: refuse all other texts too.
        piece: the ids of what stands between two cuts: a space and a word.
        is_free: whether a text at the beginning, or behind an added token, is read as any other piece.
    """

    def __init__(
        self, backend: Any, added: dict[str, int], refused: Sequence[str], ascii_only: bool,
        piece: Callable[[str], list[int]], is_free: bool,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._added = {content: array("i", [token]).tobytes() for content, token in added.items()}
        self._control = re.compile(f"({any_of(added)})")
        self._token = next(iter(added), "")
        self._refused, self._ascii_only = refused, ascii_only
        self._piece, self._is_free = piece, is_free
        self._forget()

    def _forget(self) -> None:
        self._room = _KEPT_CHARACTERS
        # Array bytes of ids. The keys of the first are words that follow a space and are followed by one; of the
        # second, pieces that end their segment; of the third, pieces that begin it.
        self._inner: dict[str, bytes] = {}
        self._last: dict[str, bytes] = {}
        self._first: dict[tuple[str, bool], bytes] = {}
        self._borders: dict[tuple[str, str, int], tuple[int, int]] = {}

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text, None where it cannot be cut or nothing is gained by it."""
        if not self._is_cut_well(text):
            return None
        return _numbers(b"".join(self._by_segment(self._control.split(text)))).tolist()

    def located(self, text: str, positions: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """The ids of a text, and where each character position falls among them, as ``Encoder.boundaries`` says it."""
        if not self._is_cut_well(text):
            return None
        segments = self._control.split(text)
        found = self._by_segment(segments)
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
        return _numbers(b"".join(found)).tolist(), borders

    def _is_cut_well(self, text: str) -> bool:
        if any(word in text for word in self._refused):
            return False
        if text.isascii():
            return True
        # A script without spaces is one long word after the other, and none comes again.
        return not self._ascii_only and len(text) < _LONG_WORD * (1 + text.count(" "))

    def _by_segment(self, segments: Sequence[str]) -> list[bytes]:
        """The ids of each segment; every second one is an added token."""
        if self._room < 0:
            self._forget()
        return [self._added[s] if at % 2 else self._segment(s, at > 0) for at, s in enumerate(segments)]

    def _segment(self, text: str, follows: bool) -> bytes:
        """The ids of a text without added tokens. ``follows``: it stands behind one."""
        if not text:
            return b""
        words = text.split(" ")
        last = words.pop()
        if not words:
            return self._opening(last, follows)
        opening, inner = words[0], words[1:]
        if _is_open(opening):
            return self._pieces(text, follows)
        try:
            found = b"".join(map(self._inner.__getitem__, inner))
        except KeyError:
            # What is known is no open word, so only the others can be.
            if any(_is_open(word) for word in inner if word not in self._inner):
                return self._pieces(text, follows)
            found = self._learned(inner)
        return self._opening(opening, follows) + found + self._closing(last)

    def _pieces(self, text: str, follows: bool) -> bytes:
        """The same for a text in which not every space is a cut."""
        opening, *more = _CUT.split(text)
        if not more:
            return self._opening(opening, follows)
        inner = [piece[1:] for piece in more]
        last = inner.pop()
        return self._opening(opening, follows) + self._learned(inner) + self._closing(last)

    def _learned(self, words: Sequence[str]) -> bytes:
        inner = self._inner
        for word in words:
            if word not in inner:
                inner[word] = _bytes(self._piece(" " + word))
                self._room -= len(word)
        return b"".join(map(inner.__getitem__, words))

    def _closing(self, word: str) -> bytes:
        found = self._last.get(word)
        if found is None:
            found = self._last[word] = _bytes(self._piece(" " + word))
            self._room -= len(word)
        return found

    def _opening(self, text: str, follows: bool) -> bytes:
        found = self._first.get((text, follows))
        if found is None:
            ids = (
                self._piece(text)
                if self._is_free
                else self._ids(self._token + text)[1:]
                if follows
                else self._ids(text)
            )
            found = self._first[text, follows] = _bytes(ids)
            self._room -= len(text)
        return found

    def _border(self, segment: str, position: int, follows: bool) -> tuple[int, int]:
        """Where a position within a segment falls among the segment's tokens."""
        start, end = _cut_before(segment, position), _cut_after(segment, position)
        before = len(self._segment(segment[:start], follows)) // _ITEM
        if start == position:
            return before, before
        # A piece is read behind something that it may follow, as it is in its text.
        prefix = _ANY_WORD if start else self._token if follows else ""
        ended, begun = self._border_in_piece(prefix, segment[start:end], position - start)
        return before + ended, before + begun

    def _border_in_piece(self, prefix: str, piece: str, position: int) -> tuple[int, int]:
        key = (prefix, piece, position)
        if key not in self._borders:
            num_before = len(self._ids(prefix))
            offsets = self._backend.encode(prefix + piece, add_special_tokens=False).offsets
            position += len(prefix)
            ended, begun = (
                bisect_right([e for _, e in offsets], position),
                bisect_left([s for s, _ in offsets], position),
            )
            self._borders[key] = ended - num_before, begun - num_before
            self._room -= len(piece)
        return self._borders[key]

    def _ids(self, text: str) -> list[int]:
        """By the tokenizer itself."""
        return by_tokenizer(self._backend, text)


def by_tokenizer(backend: Any, text: str) -> list[int]:
    """The ids of a text, without the offsets, which cost time."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


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


def _is_open(word: str) -> bool:
    """Whether the space behind a word is no cut: more whitespace stands before it."""
    return not word or word[-1].isspace()


def _numbers(found: bytes) -> array[int]:
    numbers = array("i")
    numbers.frombytes(found)
    return numbers


def _bytes(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def any_of(texts: Sequence[str] | dict[str, int]) -> str:
    """A pattern that matches any of the texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"  # (?!) matches nowhere


# --- which tokenizers read word by word -------------------------------------------------------------------------------


def words_of(tokenizer: Any) -> Words | None:
    """The words of a tokenizer, None where its texts cannot be cut into them."""
    if not tokenizer.is_fast:
        return None
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    # Tokens with ``normalized`` are looked for in another pass, behind the normalizer.
    late = [token.content for token in added.values() if token.normalized]
    ids = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    if pattern := _byte_level_pattern(normalizer, pre_tokenizer):
        ascii_only = normalizer is not None and bool(late)
        return Words(backend, ids, late, ascii_only, _ByteLevelPiece(backend, model, pattern), True)
    is_spaced = _writes_spaces(normalizer, pre_tokenizer) and not model.ignore_merges
    if late or not is_spaced or not _parts_words(backend):
        return None
    return Words(backend, ids, [_SPACE], False, _spaced_piece(model), False)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _byte_level_pattern(normalizer: Any, pre_tokenizer: Any) -> str | None:
    """The pattern of a byte-level pre-tokenizer, None where it is none or is not known."""
    if normalizer not in (None, {"type": "NFC"}) or pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if steps[-1]["use_regex"]:
        return _GPT2 if len(steps) == 1 else None
    if len(steps) != 2 or steps[0]["type"] != "Split":
        return None
    split, pattern = steps[0], steps[0]["pattern"].get("Regex")
    is_plain = split["behavior"] == "Isolated" and not split["invert"]
    return pattern if is_plain and pattern in _PATTERNS else None


class _ByteLevelPiece:
    """The ids of a piece under byte-level BPE: cut into pre-tokens here if it is ASCII, else by the tokenizer."""

    def __init__(self, backend: Any, model: Any, pattern: str) -> None:
        self._backend, self._model = backend, model
        self._pre_tokens = re.compile(_in_ascii(pattern), re.ASCII)
        self._known: dict[str, list[int]] = {}
        self._room = _KEPT_CHARACTERS

    def __call__(self, piece: str) -> list[int]:
        if not piece.isascii():
            return by_tokenizer(self._backend, piece)
        return [token for pre_token in self._pre_tokens.findall(piece) for token in self._of(pre_token)]

    def _of(self, pre_token: str) -> list[int]:
        found = self._known.get(pre_token)
        if found is None:
            if self._room < 0:
                self._known, self._room = {}, _KEPT_CHARACTERS
            found = [token.id for token in self._model.tokenize(pre_token.translate(_BYTE_NAMES))]
            self._known[pre_token] = found
            self._room -= len(pre_token)
        return found


# The characters that stand for the bytes of ASCII in a byte-level vocabulary: printable ones for themselves, the
# others counted up from 256. Source: OpenAI, gpt-2/src/encoder.py, bytes_to_unicode.
_BYTE_NAMES = {byte: chr(256 + at) for at, byte in enumerate([*range(33), 127])}


def _in_ascii(pattern: str) -> str:
    """A pattern of tokenizers in the words of Python's, for text in ASCII."""
    pattern = pattern.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")
    in_brackets = re.sub(
        r"\[[^\]]*\]", lambda found: found[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"), pattern
    )
    return in_brackets.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _writes_spaces(normalizer: Any, pre_tokenizer: Any) -> bool:
    """Whether "▁" stands for each space, and nothing else is done to a text but that one may be put before it."""
    if normalizer is None:
        return bool(
            pre_tokenizer
            and pre_tokenizer["type"] == "Metaspace"
            and pre_tokenizer["replacement"] == _SPACE
            and not pre_tokenizer["split"]
        )
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    # Gemma's pre-tokenizer splits at spaces, of which its normalizer has left none.
    return steps in ([_REPLACE], [_PREPEND, _REPLACE]) and pre_tokenizer in (None, _SPLIT)


def _parts_words(backend: Any) -> bool:
    vocabulary = backend.get_vocab(False)
    return _SPACE in vocabulary and not any(_SPACE in token.lstrip(_SPACE) for token in vocabulary)


def _spaced_piece(model: Any) -> Callable[[str], list[int]]:
    return lambda piece: [token.id for token in model.tokenize(piece.replace(" ", _SPACE))]
