"""Parse generated ids incrementally into content, reasoning and tool calls; also handles stop strings.

A complete response is parsed as a stream with one chunk, so that streaming never changes the result.

    reply = Reply(form, tokenizer, offered=schemas, stop=["\\n\\n"])
    for piece in reply.feed(ids): ...
    for piece in reply.end(): ...

Text whose meaning is not yet certain is held back: an incomplete character, or the possible beginning of a stop string,
a reasoning marker or a tool call. A call is returned when it is complete. Text that looked like a call but is not one
is content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from burnish.data.chat.tools.tool_calls import Call, ToolSchemas
from burnish.inference.replies.reply_forms import ReplyForm

PieceKind: TypeAlias = Literal["content", "thought", "call"]
_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 4
"""Number of tokens after which an incomplete character is returned as it is."""


@dataclass(frozen=True)
class ReplyPiece:
    """A part of a reply.

    Args:
        kind: "content", "thought" (reasoning) or "call".
        text: text of content or reasoning.
        call: the tool call.
        tokens: number of ids fed since the previous piece.
    """

    kind: PieceKind
    text: str = ""
    call: Call | None = None
    tokens: int = 0


@dataclass
class ParsedReply:
    """A complete reply."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[ReplyPiece]) -> ParsedReply:
        for piece in pieces:
            if piece.call is not None:
                self.calls.append(piece.call)
            elif piece.kind == "thought":
                self.thought += piece.text
            else:
                self.content += piece.text
        return self


class Reply:
    """Parser of one response.

    Args:
        form: format of reasoning and tool calls.
        offered: offered functions, with the JSON schemas of their parameters; without any, nothing is parsed as a call.
        stop: strings that end the response and are not part of it.
        stop_ids: tokens that end the response and are never text.
        in_thought: whether the prompt has opened a reasoning block (``opens_thought``).
        skips_special: omit control tokens from the text.
        only_one_call: end the response with its first call.

    ``has_stopped`` is true after a stop string or the only call; the caller may then cancel generation.
    """

    def __init__(
        self, form: ReplyForm, tokenizer: Any, *, offered: ToolSchemas | None = None, stop: Sequence[str] = (),
        stop_ids: Iterable[int] = (), in_thought: bool = False, skips_special: bool = True,
        only_one_call: bool = False,
    ) -> None:  # fmt: skip
        marks = [*form.thought_words, *form.around_calls]
        if form.reader is not None and offered:
            marks += [*form.reader.openings, form.reader.closing]
        self._outputs = CharacterDecoder(tokenizer, [mark for mark in marks if mark], stop_ids, skips_special)
        self._stops = _Stops(stop)
        self._parts = _ReplySplitter(form, offered or {}, in_thought)
        self._only_one_call = only_one_call
        self._since = 0
        self.has_stopped = False

    def feed(self, ids: Sequence[int]) -> list[ReplyPiece]:
        """Parse the next ids. Returns the pieces that are certain."""
        if self.has_stopped:
            return []
        self._since += len(ids)
        text = self._stops.feed(self._outputs.feed(ids))
        found = self._count_reasoning(self._parts.feed(text))
        return [*found, *self.end()] if self._stops.is_found and not self.has_stopped else found

    def end(self) -> list[ReplyPiece]:
        """Return the text that was held back, after the last id."""
        if self.has_stopped:
            return []
        text = "" if self._stops.is_found else self._stops.feed(self._outputs.end())
        text += "" if self._stops.is_found else self._stops.end()
        found = self._count_reasoning([*self._parts.feed(text), *self._parts.end()])
        self.has_stopped = True
        return found

    def _count_reasoning(self, pieces: Iterable[ReplyPiece]) -> list[ReplyPiece]:
        found: list[ReplyPiece] = []
        for piece in pieces:
            found.append(ReplyPiece(piece.kind, piece.text, piece.call, self._since))
            self._since = 0
            if piece.call is not None and self._only_one_call:
                self.has_stopped = True
                break
        return found


def read_whole(
    ids: Sequence[int], form: ReplyForm, tokenizer: Any, *, offered: ToolSchemas | None = None,
    stop_ids: Iterable[int] = (), in_thought: bool = False,
) -> ParsedReply:  # fmt: skip
    """Parse a complete response."""
    reply = Reply(form, tokenizer, offered=offered, stop_ids=stop_ids, in_thought=in_thought)
    return ParsedReply().add([*reply.feed(ids), *reply.end()])


# --- decoding ---------------------------------------------------------------------------------------------------------


class CharacterDecoder:
    """Decodes ids to text incrementally, without incomplete characters.

    The text of a token depends on the one before it, so a few tokens are decoded again.

    Args:
        marks: texts whose control tokens are kept when others are omitted.
        stop_ids: tokens that are never text.
        skips_special: omit control tokens.
    """

    def __init__(self, tokenizer: Any, marks: Sequence[str], stop_ids: Iterable[int], skips_special: bool) -> None:
        self.tokenizer = tokenizer
        left_out = set(tokenizer.all_special_ids) if skips_special else set()
        visible = {i for i in left_out if any(tokenizer.convert_ids_to_tokens(i) in mark for mark in marks)}
        self._left_out = (left_out - visible) | set(stop_ids)
        self._ids: list[int] = []  # the last ids that were returned, and those after them
        self._num_returned = 0  # number of ids in ``_ids`` that were returned

    def feed(self, ids: Sequence[int]) -> str:
        return "".join(self._next(i) for i in ids if i not in self._left_out)

    def _next(self, token: int) -> str:
        self._ids.append(token)
        whole = self._decode(self._ids)
        is_half = whole.endswith(_BROKEN) and len(self._ids) - self._num_returned <= _LONGEST_CHARACTER
        return "" if is_half else self._new_text(whole)

    def end(self) -> str:
        return self._new_text(self._decode(self._ids)) if len(self._ids) > self._num_returned else ""

    def _new_text(self, whole: str) -> str:
        new = whole[len(self._decode(self._ids[: self._num_returned])) :]
        self._ids = self._ids[self._num_returned :]
        self._num_returned = len(self._ids)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


# --- stop strings -----------------------------------------------------------------------------------------------------


class _Stops:
    """Returns text up to the first stop string. A possible beginning of one is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._pending + text
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.is_found, self._pending = True, ""
            return text[: min(places)]
        end = len(text) - _may_begin(text, self._stop)
        self._pending = text[end:]
        return text[:end]

    def end(self) -> str:
        text, self._pending = self._pending, ""
        return text


def _may_begin(text: str, markers: Iterable[str]) -> int:
    """Return the number of characters at the end of ``text`` that may begin one of ``markers``."""
    longest = 0
    for word in markers:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest


# --- content, reasoning, calls ----------------------------------------------------------------------------------------


class _ReplySplitter:
    """Splits text into content, reasoning and tool calls."""

    def __init__(self, form: ReplyForm, offered: ToolSchemas, in_thought: bool) -> None:
        self.form, self.offered = form, offered
        self._opens, self._closes = form.thought_words
        self._reader = form.reader if offered else None
        head = form.around_calls[0]
        self._openings = (*((head,) if head else ()), *self._reader.openings_for(offered)) if self._reader else ()
        self._state: PieceKind = "thought" if in_thought else "content"
        self._text = ""  # not returned yet
        self._tail = ""  # text that the template writes after the calls that were parsed
        self._has_content = False  # something other than whitespace was returned as content
        self._drops_blank = True  # whitespace before a marker is dropped: at the beginning and after calls
        self._trims = in_thought  # whitespace at the beginning of the next part belongs to a marker

    def feed(self, text: str) -> Iterator[ReplyPiece]:
        self._text += text
        step = True
        while step and self._text:
            if self._trims:
                self._text = self._text.lstrip("\n")
                self._trims = not self._text
            found, step = {"content": self._content, "thought": self._thought, "call": self._call}[self._state]()
            yield from found

    def end(self) -> Iterator[ReplyPiece]:
        """Yield the rest: unclosed reasoning remains reasoning, an incomplete call becomes content."""
        text, self._text = self._text, ""
        if self._state == "call":
            yield from self._calls(text)
        elif text:
            yield ReplyPiece(self._state, text)

    def _content(self) -> tuple[list[ReplyPiece], bool]:
        """Return pieces, and whether the remaining text should be parsed again."""
        marks = self._marks()
        found = min(((self._text.find(mark), mark) for mark in marks if mark in self._text), default=None)
        if found is None:
            end = len(self._text) - _may_begin(self._text, marks)
            if marks and self._drops_blank and not self._text[:end].strip():
                return [], False  # whitespace before reasoning or a call is not content
            return self._release(end), False
        place, mark = found
        is_blank = not self._text[:place].strip()
        pieces = self._release(place)
        pieces = [] if is_blank and self._drops_blank else pieces
        if mark == self._tail:
            self._text, self._tail, self._trims = self._text[len(mark) :], "", True
        elif mark == self._opens:
            self._text, self._state, self._trims = self._text[len(mark) :], "thought", True
        else:
            self._state = "call"
        return pieces, True

    def _marks(self) -> list[str]:
        """Return the markers that may begin another part. Reasoning and some calls can only begin a response."""
        is_start = not self._has_content
        calls = self._openings if self._reader and (is_start or not self._reader.only_at_start) else ()
        marks = [*calls, *([self._opens] if self._opens and is_start else [])]
        if self._tail:
            marks.append(self._tail)
        if is_start:
            # At the start, a marker counts only if nothing but whitespace precedes it.
            stripped = self._text.lstrip()
            only = {self._opens, *(calls if self._reader and self._reader.only_at_start else ())}
            return [
                mark for mark in marks if mark not in only or stripped.startswith(mark) or mark.startswith(stripped)
            ]
        return marks

    def _release(self, length: int) -> list[ReplyPiece]:
        text, self._text = self._text[:length], self._text[length:]
        self._received_content(text)
        return [ReplyPiece("content", text)] if text else []

    def _received_content(self, text: str) -> None:
        if text.strip():
            self._has_content, self._drops_blank = True, False

    def _thought(self) -> tuple[list[ReplyPiece], bool]:
        place = self._text.find(self._closes)
        if place >= 0:
            text, self._text = self._text[:place].rstrip("\n"), self._text[place + len(self._closes) :]
            self._state, self._trims = "content", True
            return [ReplyPiece("thought", text)] if text else [], True
        # Line breaks before the closing marker are not part of the reasoning.
        end = len(self._text[: len(self._text) - _may_begin(self._text, [self._closes])].rstrip("\n"))
        text, self._text = self._text[:end], self._text[end:]
        return [ReplyPiece("thought", text)] if text else [], False

    def _call(self) -> tuple[list[ReplyPiece], bool]:
        closing = self._reader.closing if self._reader else ""
        place = self._text.find(closing) if closing else -1
        if place < 0:
            return [], False
        end = place + len(closing)
        text, self._text = self._text[:end], self._text[end:]
        pieces = list(self._calls(text))
        self._state = "content"
        if pieces and pieces[-1].call is not None:
            self._tail, self._trims, self._drops_blank = self.form.around_calls[1], True, True
        return pieces, True

    def _calls(self, text: str) -> Iterator[ReplyPiece]:
        """Yield the calls in a text. Text without calls, or with calls of other functions, is content."""
        head, tail = self.form.around_calls
        inside = text.strip().removeprefix(head).strip()
        inside = inside.removesuffix(tail).strip() if tail else inside
        calls = self._reader.read(inside, self.offered) if self._reader else None
        if calls and all(call.name in self.offered and isinstance(call.arguments, Mapping) for call in calls):
            yield from (ReplyPiece("call", call=call) for call in calls)
        elif text:
            self._received_content(text)
            yield ReplyPiece("content", text)
