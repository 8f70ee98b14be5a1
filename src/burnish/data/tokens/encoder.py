"""Tokenization in which only the chat template can write control tokens.

A rendered conversation is tokenized as a whole, so its ids equal those of the tokenizer's own ``apply_chat_template``.
On request, character positions are located among the tokens.

User text passes through ``Encoder.hide`` before rendering: a special token spelled out in it ("<|im_end|>") is replaced
by two private-use characters, which templates leave alone, and is tokenized as ordinary text later. So user text can
neither end nor begin a turn, whatever the template does to it. Only tokens that the tokenizer marks as special are
hidden; other added tokens (``<tool_call>`` of Qwen) keep their meaning.
"""

from __future__ import annotations

import re
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from burnish.config.errors import UNUSABLE, UserError, is_unusable
from burnish.loop.types import Ids
from burnish.utils.sequences import shared_beginning

_MARK = "\ufdd0"  # a Unicode noncharacter, never assigned; it is hidden too if a text contains it
_FIRST = 0xF0000  # private use area: the character after the mark is this one plus the index of the token
_ANCHOR = "\n"


class Encoder:
    """Encodes texts with one tokenizer.

    Args:
        tokenizer: any transformers tokenizer; fast tokenizers encode a batch with all their threads.
        keep: special tokens that an assistant's text may contain, such as those around a reasoning block.
        template: the text that the template writes around messages. A token that the user added to the vocabulary
            (``tokenizer.new_tokens``) may occur in data unless the template uses it.
        controls: further control tokens (those of images), whether or not the tokenizer marks them as special.
    """

    def __init__(
        self, tokenizer: Any, keep: Sequence[str] = (), template: str = "", controls: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {*controls}
        own = set(tokenizer.all_special_tokens)
        free = {token for token in getattr(tokenizer, "new_tokens", ()) if token not in template} - own
        specials = sorted((special | own) - free, key=len, reverse=True)
        self._tokens = special | own | free
        self._codes = {text: _MARK + chr(_FIRST + index) for index, text in enumerate([*specials, _MARK])}
        self._texts = {code: text for text, code in self._codes.items()}
        self._hints = {text[0] for text in self._codes if text}
        hidden, kept = _alternatives_pattern([*specials, _MARK]), _alternatives_pattern(filter(None, keep))
        self._hidden, self._hidden_or_kept = re.compile(hidden), re.compile(f"({kept})|{hidden}")
        self._control = re.compile(f"({_alternatives_pattern(self._tokens)})")
        self._shown = re.compile(f"{_MARK}.", re.DOTALL)

    @cached_property
    def identity(self) -> str:
        """A hash that changes if the ids of any text, or the tokens at its beginning and end, could change."""
        tokenizer = self.tokenizer
        state = self._backend().to_str() if tokenizer.is_fast else _state_of_slow(tokenizer)
        roles = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        hashed = blake2b(f"{state} {sorted(self._texts.values())} {roles}".encode(), digest_size=16)
        return hashed.hexdigest()

    def hide(self, text: str, *, assistant: bool = False) -> str:
        """Hide the special tokens in a text. In an assistant's text, the tokens of ``keep`` are left as they are."""
        if not any(hint in text for hint in self._hints):  # ten times faster than searching for all tokens
            return text
        pattern = self._hidden_or_kept if assistant else self._hidden
        return pattern.sub(lambda found: found[0] if assistant and found[1] else self._codes[found[0]], text)

    def with_control_tokens(self, text: str) -> str:
        """Return text for ``encode`` in which special tokens keep their meaning: only the mark itself is hidden."""
        return text.replace(_MARK, self._codes[_MARK]) if _MARK in text else text

    def show(self, text: str) -> str:
        """Undo ``hide``."""
        return self._shown.sub(lambda found: self._texts.get(found[0], found[0]), text)

    def encode(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Encode each distinct text once. Texts without hidden tokens are encoded in one call of the tokenizer."""
        distinct = list(dict.fromkeys(texts))
        plain = [text for text in distinct if _MARK not in text]
        ids: dict[str, Ids] = dict(zip(plain, self._batch(plain), strict=True)) if plain else {}
        return ids | {text: array("i", self._around_hidden(text)) for text in distinct if _MARK in text}

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of plain text that continues other text, without a leading space.

        SentencePiece tokenizers insert a space before the first word. The text is therefore tokenized after a line
        break, which merges with nothing, and the ids of the line break are removed.
        """
        anchor, ids = self.plain(_ANCHOR), self.plain(_ANCHOR + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.plain(text)

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text, treating special tokens as ordinary text."""
        with self._tokenizing():
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def boundaries(self, text: str, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Locate character positions among the tokens of ``text``.

        Returns:
            A pair (ended, begun) per position. Tokens before index ``ended`` end at or before the position; tokens
            from index ``begun`` on start at or after it. A token that spans the position is between the two indices.
        """
        return self.encode_with_boundaries([text], [positions])[0][1]

    def encode_with_boundaries(
        self, texts: Sequence[str], positions: Sequence[Sequence[int]]
    ) -> list[tuple[Ids, list[tuple[int, int]]]]:
        """Return the ids of each text and the ``boundaries`` of its positions, with one call of the tokenizer."""
        found: dict[int, tuple[Ids, list[tuple[int, int]]]] = {}
        ordinary = [at for at, text in enumerate(texts) if self.tokenizer.is_fast and _MARK not in text]
        some = [texts[at] for at in ordinary]
        with self._tokenizing():
            encodings = self._backend().encode_batch(some, add_special_tokens=False) if some else []
        for at, encoding in zip(ordinary, encodings, strict=True):
            starts, ends = [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]
            borders = [(bisect_right(ends, position), bisect_left(starts, position)) for position in positions[at]]
            found[at] = array("i", encoding.ids), borders
        for at in set(range(len(texts))) - set(ordinary):
            beginnings = [texts[at][:position] for position in positions[at]]
            ids = self.encode([texts[at], *beginnings])
            found[at] = ids[texts[at]], [shared_start(ids[beginning], ids[texts[at]]) for beginning in beginnings]
        return [found[at] for at in range(len(texts))]

    def _batch(self, texts: list[str]) -> list[Ids]:
        with self._tokenizing():
            if not self.tokenizer.is_fast:
                return [array("i", self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
            encodings = self._backend().encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids) for encoding in encodings]

    @contextmanager
    def _tokenizing(self) -> Iterator[None]:
        """Convert an error of the tokenizer, or a panic in its library, to a UserError about its files."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, UNUSABLE) or not is_unusable(error):
                raise
            what = f"its tokenizer cannot encode text: {error}."
            where = str(getattr(self.tokenizer, "name_or_path", ""))
            raise UserError(what, where, remedy="Download its tokenizer files again.") from error

    def _backend(self) -> Any:
        """Return the underlying ``tokenizers`` object. Its batch calls are faster than transformers' wrapper."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend

    def _around_hidden(self, text: str) -> list[int]:
        """Return the ids of a text with hidden special tokens.

        Control tokens of the template, and those that data may contain, become one id each. The text between them is
        tokenized as ordinary text.
        """
        ids: list[int] = []
        for piece in self._control.split(text):
            if piece in self._tokens:
                ids.append(self.tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                shown = self.show(piece)
                ids += self.encode_continuation(shown) if ids else self.plain(shown)
        return ids


def _state_of_slow(tokenizer: Any) -> str:
    """Vocabulary, settings and files (merges, sentencepiece models) of a tokenizer that runs in Python."""
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int | float)}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_vocabulary(folder)
        files = {path.name: blake2b(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}
    return f"{type(tokenizer)} {sorted(tokenizer.get_vocab().items())} {sorted(settings.items())} {files}"


def _alternatives_pattern(texts: Iterable[str]) -> str:
    """Return a pattern that matches any of the texts, longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"  # (?!) matches nowhere


def shared_start(prefix: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """Locate the end of a prefix among the ids of the whole text.

    Args:
        prefix: ids of a prefix of the text.
        whole: ids of the whole text.
    Returns:
        A pair (ended, begun): tokens before ``ended`` are within the prefix, tokens from ``begun`` on are after it. A
        token that spans the end of the prefix is between the two indices.
    """
    same = shared_beginning(prefix, whole)
    return same, same if same == len(prefix) else min(same + 1, len(whole))
