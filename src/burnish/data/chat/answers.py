"""Locate the responses in the text that a chat template renders.

For each response, the character span [start, end) in the rendered text is found. ``UnreadableTemplate`` is raised for
conversations that the template cannot render, or renders without a response.

Spans are found by comparing renderings, never by searching for strings. If the template marks responses with
``{% generation %}``, these marks are used. Otherwise a response is the text between the end of
``render(messages[:i], add_generation_prompt=True)`` and the end of ``render(messages[:i + 1])``. Some templates render
a message differently once others follow it (Qwen3 removes the reasoning of earlier responses, Mistral moves the tools).
In that case the conversation is rendered with the response replaced by "x" and by "y"; the text common to both
renderings is not part of the response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeAlias

from burnish.data.chat.rendering import (
    PROMPT,
    WHOLE,
    Conversation,
    Part,
    Rendering,
    UnreadableTemplate,
    render,
    text_to_parts,
    with_processor_text,
)
from burnish.data.images.family import Family
from burnish.loop.types import IMAGE, VIDEO

Chat: TypeAlias = list[dict[str, Any]]
Tools: TypeAlias = "list[Any] | None"
_CONVERSATIONS_PER_CALL = 64
"""Number of conversations rendered in one request."""
NO_CALLS = "the chat template does not support tool calls"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """One rendered conversation.

    Args:
        chat: messages passed to the template, with the system message first if there is one.
        tools: tools passed to the template.
        text: output of the template.
        answers: index in ``chat`` of each response.
        spans: [start, end) of each response in ``text``, in characters.
    """

    chat: Chat
    tools: Tools
    text: str
    answers: list[int]
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with a chat template and locates the responses.

    Args:
        templates: Jinja text by name; "tool_use", if present, is used for conversations with tools.
        tokenizer: renders the template. Its added tokens are the control tokens that may end a response.
        not_ends: added tokens that never end a response, such as those around a reasoning block.
        family: model family of a vision model, otherwise None.

    ``end_word`` is the control token that the template writes after a response, or None if there is none.
    """

    def __init__(
        self, templates: Mapping[str, str], tokenizer: Any, not_ends: Sequence[str], family: Family | None = None
    ) -> None:
        self.family = family
        self.templates = templates
        self.tokenizer = tokenizer
        tokens = sorted(set(tokenizer.get_added_vocab()) - set(not_ends), key=len, reverse=True)
        control = "|".join(map(re.escape, tokens)) or "(?!)"  # (?!) matches nowhere
        self._control, self._ends_in_control = re.compile(control), re.compile(f"(?:{control})\\s*$")
        self._writes_calls = False  # until a call was found in a rendered text
        self.refusal = ""  # the template's own error for a prompt with a response
        # Some templates of vision models skip a content that is text instead of a list of parts.
        self.in_parts = False
        self.in_parts = not self.writes_messages()
        sample = self._around_in_sample(1)
        self._end = sample[1] if sample else ""
        found = self._control.search(self._end)
        self.end_word: str | None = found[0] if found else None

    def content(self, text: str) -> Any:
        """Return the content of a message in the form that the template accepts: text or parts."""
        if self.family is not None and (IMAGE in text or VIDEO in text):
            return text_to_parts(text)
        return [{"type": "text", "text": text}] if self.in_parts else text

    def writes_messages(self) -> bool:
        return self._around_in_sample(0) is not None and self._around_in_sample(1) is not None

    def render_all(self, conversations: Sequence[tuple[Chat, Tools]]) -> Iterator[Rendered | UnreadableTemplate]:
        """Yield each conversation with the spans of its responses, or the error if that is impossible."""
        for start in range(0, len(conversations), _CONVERSATIONS_PER_CALL):
            some = conversations[start : start + _CONVERSATIONS_PER_CALL]
            wanted = [Conversation(chat, tools, *self._parts(chat, tools)) for chat, tools in some]
            found = iter(self._render(wanted))
            for (chat, tools), each in zip(some, wanted, strict=True):
                parts = [next(found) for _ in each.parts]
                try:
                    yield self._render_parts(chat, tools, parts, each.marks)
                except UnreadableTemplate as error:
                    yield error

    def _parts(self, chat: Chat, tools: Tools) -> tuple[Sequence[Part], bool]:
        """Return the parts of a conversation to render, and whether to read its generation marks."""
        if GENERATION_MARK.search(self._template(tools)):
            return (WHOLE,), True
        places = _answers(chat)
        return [WHOLE, *chain.from_iterable(((place, True), (place + 1, False)) for place in places)], False

    def _render_parts(self, chat: Chat, tools: Tools, parts: Sequence[Rendering], is_marked: bool) -> Rendered:
        text, answers = _text(parts[0]), _answers(chat)
        self._check_calls(chat, tools)
        if is_marked:
            spans = list(parts[0].spans)
            if len(spans) != len(answers):
                raise UnreadableTemplate(
                    "the number of {% generation %} blocks differs from the number of assistant messages"
                )
        else:
            pairs = zip(parts[1::2], parts[2::2], strict=True)
            spans = [
                self._span(chat, tools, text, place, _text(prompt), _text(with_response))
                for place, (prompt, with_response) in zip(answers, pairs, strict=True)
            ]
        return Rendered(chat, tools, text, answers, [self._with_end(text, *span) for span in spans])

    def render(self, chat: Chat, tools: Tools, prompt: bool = False) -> str:
        """Render a conversation; with ``prompt``, up to the beginning of the next response.

        Raises:
            UserError: if rendering exceeds its time limit.
            UnreadableTemplate: if the template raises an error.
        """
        return _text(self._render([Conversation(chat, tools, [PROMPT if prompt else WHOLE])])[0])

    def _render(self, conversations: Sequence[Conversation]) -> list[Rendering]:
        found: list[Rendering] = []
        for template, group in groupby(conversations, lambda each: self._template(each.tools)):
            found += render(self.tokenizer, list(group), template)
        if self.family is None or self.family.chat_template_text == self.family.mark:
            return found
        return [with_processor_text(each, self.family) for each in found]

    def around(self, chat: Chat, place: int, tools: Tools) -> tuple[str, str] | None:
        """Return the text before and after the content of one message, or None if the template omits the content."""
        one, other = (self.render(self._replace_message(chat, place, tag), tools) for tag in ("x", "y"))
        if one == other:
            return None
        before = one[: common_start(one, other)]
        rest, other_rest = one[len(before) :], other[len(before) :]
        return before, rest[len(rest) - common_end(rest, other_rest) :]

    def _span(
        self, chat: Chat, tools: Tools, text: str, place: int, prompt: str, with_response: str
    ) -> tuple[int, int]:
        """Return [start, end) of the response at ``place`` in ``text``.

        Args:
            chat: the whole conversation.
            text: rendering of the whole conversation.
            place: index of the response in ``chat``.
            prompt: rendering up to the beginning of the response.
            with_response: rendering up to its end.
        """
        if text.startswith(with_response) and with_response.startswith(prompt):
            return len(prompt), len(with_response)
        if text.startswith(prompt) and with_response.endswith(self._end) and "tool_calls" not in chat[place]:
            # Only the response is rendered differently. To find its end, replace it by a letter other than its last
            # one: then the two texts share everything after the response, and nothing more.
            last_letter = with_response.removesuffix(self._end)[-1:]
            exchanged = self.render(self._replace_message(chat, place, "y" if last_letter == "x" else "x"), tools)
            stop = len(text) - common_end(text, exchanged)
            if text.startswith(self._end, stop):
                return len(prompt), stop + len(self._end)
        return self._span_by_exchange(chat, tools, text, place, prompt)

    def _span_by_exchange(self, chat: Chat, tools: Tools, text: str, place: int, prompt: str) -> tuple[int, int]:
        """Return the span if the template renders this response, or text before it, differently in mid-conversation.

        ``lead`` is the text between the prompt and the content of the response. ``end`` is the text after the content
        when the response is the last message.
        """
        last, whole = self.around(chat[: place + 1], place, tools), self.around(chat, place, tools)
        if last is None or whole is None:
            raise UnreadableTemplate("the chat template omits an assistant message")
        lead = last[0][len(prompt) :] if last[0].startswith(prompt) else ""
        # A control token follows the response; gpt-oss ends the last response with a different one.
        control = self._control.match(whole[1])
        end = last[1] if whole[1].startswith(last[1]) else control[0] if control else ""
        before, after = whole[0].removesuffix(lead), whole[1].removeprefix(end)
        if text.startswith(self.render(chat[:place], tools)):
            # The text before the response is unchanged, so the response begins where prompt and text first differ: at
            # the end of the prompt, or within it if the prompt opens a reasoning block that the text no longer has.
            before = text[: min(common_start(prompt, text), len(whole[0]))]
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start <= stop):
            raise UnreadableTemplate("the span of an assistant message cannot be located in the chat template's output")
        return start, stop

    def _with_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Extend a span without a final control token by the control token that follows it.

        Generation marks may end before the end token, and GLM's responses end with the first token of the next
        message. Without that token the model would not learn to stop.
        """
        if not self._ends_in_control.search(text, start, stop) and (found := self._control.match(text, stop)):
            return start, found.end()
        return start, stop

    def _check_calls(self, chat: Chat, tools: Tools) -> None:
        """Raise UnreadableTemplate if the template silently omits tool calls, since the response would be empty."""
        place = next((place for place, message in enumerate(chat) if "tool_calls" in message), None)
        if self._writes_calls or place is None:
            return
        if self.around(chat, place, tools) is None:
            raise UnreadableTemplate(NO_CALLS)
        self._writes_calls = True

    def _around_in_sample(self, place: int) -> tuple[str, str] | None:
        chat = [{"role": role, "content": self.content("x")} for role in ("user", "assistant")]
        try:
            return self.around(chat, place, None)
        except UnreadableTemplate as error:
            if not self.in_parts:
                self.refusal = f"{str(error)[0].upper()}{str(error)[1:].rstrip('.')}."
            return None

    def _replace_message(self, chat: Chat, place: int, tag: str) -> Chat:
        """Return the conversation with one message replaced by ``tag``: its content, or the names of its tool calls."""
        message = dict(chat[place])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "function": {**call["function"], "name": tag}} for call in calls]
        else:
            message["content"] = self.content(tag)
        return [*chat[:place], message, *chat[place + 1 :]]

    def _template(self, tools: Tools) -> str:
        return self.templates["tool_use" if tools and "tool_use" in self.templates else "default"]


def _answers(chat: Chat) -> list[int]:
    return [place for place, message in enumerate(chat) if message["role"] == "assistant"]


def _text(found: Rendering) -> str:
    if found.error is not None:
        raise found.error
    return found.text


def common_start(one: str, other: str) -> int:
    """Return the number of characters that two texts share at their start."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # binary search: texts are long, and comparing slices is fast
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def common_end(one: str, other: str) -> int:
    """Return the number of characters that two texts share at their end."""
    return common_start(one[::-1], other[::-1])
