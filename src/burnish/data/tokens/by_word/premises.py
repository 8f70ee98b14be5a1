"""Premises of reading word by word (``reader.py``), checked against a tokenizer.

In: a tokenizer of transformers. Out: its ``Words``, or None where a premise is not met: the tokenizer is not BPE, its
normalizer or pre-tokenizer does something that is not known here, or its vocabulary holds a token that is more than one
word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from burnish.data.tokens.by_word.pre_tokens import GPT2, PATTERNS, PreTokens, is_long
from burnish.data.tokens.by_word.ragged import Found, laid
from burnish.data.tokens.by_word.reader import Words

_SPACE = "▁"  # U+2581, which SentencePiece writes for a space


def words_of(tokenizer: Any, lone: Callable[[], bytes | None] = lambda: None) -> Words | None:
    """Make the ``Words`` of a tokenizer, None where its texts cannot be divided into words.

    Args:
        lone: returns ``lone_byte`` of the tokenizer's state.
    """
    if not tokenizer.is_fast:
        return None
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    # Tokens with ``normalized`` are searched for in another pass, after the normalizer.
    late = [token.content for token in added.values() if token.normalized]
    ids = {token.content: token_id for token_id, token in added.items() if not token.normalized}
    if pattern := _byte_level_pattern(normalizer, pre_tokenizer):
        ascii_only = normalizer is not None and bool(late)
        pre_tokens = PreTokens(backend, pattern, lone)
        return Words(backend, ids, late, ascii_only, pre_tokens.read, pre_tokens.of)
    is_spaced = _writes_spaces(normalizer, pre_tokenizer) and not model.ignore_merges
    if late or not is_spaced:
        return None
    vocabulary = backend.get_vocab(False)
    if _SPACE not in vocabulary or any(_SPACE in token.lstrip(_SPACE) for token in vocabulary):
        return None
    return Words(backend, ids, [_SPACE], False, _spaced_pieces(model))


def lone_byte(state: str) -> bytes | None:
    """Find a byte that is in no token of a byte-level vocabulary but its own.

    Args:
        state: the tokenizer as JSON, with each token and each merge.
    """
    names = (chr(byte) for byte in _IN_NO_UTF8 if state.count(chr(byte)) == state.count(f'"{chr(byte)}":') == 1)
    return next((name.encode("latin-1") for name in names), None)


_IN_NO_UTF8 = (*range(0xF5, 0x100), 0xC0, 0xC1)  # named by themselves in a byte-level vocabulary


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _byte_level_pattern(normalizer: Any, pre_tokenizer: Any) -> str | None:
    """The pattern of a byte-level pre-tokenizer, None where it is of another kind or not known."""
    if normalizer not in (None, {"type": "NFC"}) or pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if steps[-1]["use_regex"]:
        return GPT2 if len(steps) == 1 else None
    if len(steps) != 2 or steps[0]["type"] != "Split":
        return None
    split, pattern = steps[0], steps[0]["pattern"].get("Regex")
    is_plain = split["behavior"] == "Isolated" and not split["invert"]
    return pattern if is_plain and pattern in PATTERNS else None


_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _writes_spaces(normalizer: Any, pre_tokenizer: Any) -> bool:
    """Return whether "▁" replaces each space, and nothing else is done to a text, except that one may be prepended."""
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


def _spaced_pieces(model: Any) -> Callable[[Sequence[bytes]], Found]:
    def ids(piece: str) -> list[int] | None:
        return None if is_long(piece) else [token.id for token in model.tokenize(piece.replace(" ", _SPACE))]

    return lambda pieces: laid([ids(piece.decode()) for piece in pieces])
