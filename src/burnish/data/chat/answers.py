"""The spans of the answers in the text that a chat template renders.

In: a conversation as chat templates take it. Out: its text, and the span of each answer in it, in characters. Refused
with ``UnreadableTemplate``: conversations that the template refuses or writes without their answers.

Answers are found by construction, never by looking for strings in the text. Where the template marks its answers with
``{% generation %}``, those marks count. Elsewhere an answer is the text that the template adds to the prompt when the
answer is there: from the end of ``render(messages[:i], add_generation_prompt=True)`` to the end of
``render(messages[:i + 1])``. Some templates write a message differently once others follow it (Qwen3 takes out the
thoughts of earlier answers, Mistral moves the tools); then both ends come from rendering the conversation with the
answer replaced by "x" and by "y": the text that both renderings have in common is not the answer.
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
    in_parts,
    marked,
    render,
)
from burnish.data.images.family import Family
from burnish.loop.types import IMAGE

Chat: TypeAlias = list[dict[str, Any]]
Tools: TypeAlias = "list[Any] | None"
_AT_ONCE = 64
"""Conversations that are rendered at once."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """One conversation as rendered by the template.

    Args:
        chat, tools: the template's input, the system message first where there is one.
        text: its output.
        answers: the index in ``chat`` of each answer.
        spans: [start, end) of each answer in ``text``, in characters.
    """

    chat: Chat
    tools: Tools
    text: str
    answers: list[int]
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with a chat template, and finds the spans of the answers.

    Args:
        templates: Jinja text by name; if there is "tool_use", it is taken for conversations with tools.
        tokenizer: renders; its added tokens are the control tokens that may end an answer.
        not_ends: added tokens that never end an answer, such as those around a thought.
        family: of the model, if it sees.

    ``end_word`` is the control token that the template writes after an answer, None where there is none.
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
        self._writes_calls = False  # until a call was seen in the text
        self.refusal = ""  # the template's own error for a question with an answer
        # Some templates for images and text leave out a content that is a text rather than a list of parts.
        self.in_parts = False
        self.in_parts = not self.writes_messages()
        sample = self._around_in_sample(1)
        self._end = sample[1] if sample else ""
        found = self._control.search(self._end)
        self.end_word: str | None = found[0] if found else None

    def content(self, text: str) -> Any:
        """The content of a message in the form that the template takes."""
        if self.family is not None and IMAGE in text:
            return in_parts(text)
        return [{"type": "text", "text": text}] if self.in_parts else text

    def writes_messages(self) -> bool:
        return self._around_in_sample(0) is not None and self._around_in_sample(1) is not None

    def rendered(self, conversations: Sequence[tuple[Chat, Tools]]) -> Iterator[Rendered | UnreadableTemplate]:
        """Render conversations, and find the spans of their answers; an error for each where that is impossible."""
        for start in range(0, len(conversations), _AT_ONCE):
            some = conversations[start : start + _AT_ONCE]
            wanted = [Conversation(chat, tools, *self._parts(chat, tools)) for chat, tools in some]
            found = iter(self._render(wanted))
            for (chat, tools), each in zip(some, wanted, strict=True):
                parts = [next(found) for _ in each.parts]
                try:
                    yield self._rendered(chat, tools, parts, each.marks)
                except UnreadableTemplate as error:
                    yield error

    def _parts(self, chat: Chat, tools: Tools) -> tuple[Sequence[Part], bool]:
        """The parts of a conversation to render, and whether to read its marks."""
        if _GENERATION.search(self._template(tools)):
            return (WHOLE,), True
        places = _answers(chat)
        return [WHOLE, *chain.from_iterable(((place, True), (place + 1, False)) for place in places)], False

    def _rendered(self, chat: Chat, tools: Tools, parts: Sequence[Rendering], is_marked: bool) -> Rendered:
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
                self._span(chat, tools, text, place, _text(prompt), _text(upto))
                for place, (prompt, upto) in zip(answers, pairs, strict=True)
            ]
        return Rendered(chat, tools, text, answers, [self._with_end(text, *span) for span in spans])

    def render(self, chat: Chat, tools: Tools, prompt: bool = False) -> str:
        """Render a conversation; with ``prompt``, up to the beginning of the next answer.

        Raises:
            UserError: if it exceeds its time limit.
            UnreadableTemplate: if the template refuses it.
        """
        return _text(self._render([Conversation(chat, tools, [PROMPT if prompt else WHOLE])])[0])

    def _render(self, conversations: Sequence[Conversation]) -> list[Rendering]:
        found: list[Rendering] = []
        for template, group in groupby(conversations, lambda each: self._template(each.tools)):
            found += render(self.tokenizer, list(group), template)
        if self.family is None or self.family.own == self.family.mark:
            return found
        return [marked(each, self.family) for each in found]

    def around(self, chat: Chat, place: int, tools: Tools) -> tuple[str, str] | None:
        """The text before and after the content of one message; None where the template does not write the content."""
        one, other = (self.render(self._exchanged(chat, place, tag), tools) for tag in ("x", "y"))
        if one == other:
            return None
        before = one[: common_start(one, other)]
        rest, other_rest = one[len(before) :], other[len(before) :]
        return before, rest[len(rest) - common_end(rest, other_rest) :]

    def _span(self, chat: Chat, tools: Tools, text: str, place: int, prompt: str, upto: str) -> tuple[int, int]:
        """[start, end) of the answer at ``place`` in ``text``, the rendering of the whole conversation.

        Args:
            prompt: the rendering up to the beginning of the answer.
            upto: the rendering up to its end.
        """
        if text.startswith(upto) and upto.startswith(prompt):
            return len(prompt), len(upto)
        if text.startswith(prompt) and upto.endswith(self._end) and "tool_calls" not in chat[place]:
            # Only the answer is written differently. To find its end, replace it by a letter other than its last one:
            # then the two texts have everything after the answer in common, and nothing more.
            last_letter = upto.removesuffix(self._end)[-1:]
            exchanged = self.render(self._exchanged(chat, place, "y" if last_letter == "x" else "x"), tools)
            stop = len(text) - common_end(text, exchanged)
            if text.startswith(self._end, stop):
                return len(prompt), stop + len(self._end)
        return self._span_by_exchange(chat, tools, text, place, prompt)

    def _span_by_exchange(self, chat: Chat, tools: Tools, text: str, place: int, prompt: str) -> tuple[int, int]:
        """The same for a template that writes this answer, or the text before it, differently once messages follow.

        ``lead`` is the text between the prompt and the answer's content, and ``end`` the text after it, where the
        answer comes last.
        """
        last, whole = self.around(chat[: place + 1], place, tools), self.around(chat, place, tools)
        if last is None or whole is None:
            raise UnreadableTemplate("the chat template omits an assistant message")
        lead = last[0][len(prompt) :] if last[0].startswith(prompt) else ""
        # A control token follows the answer; gpt-oss ends the last one otherwise.
        control = self._control.match(whole[1])
        end = last[1] if whole[1].startswith(last[1]) else control[0] if control else ""
        before, after = whole[0].removesuffix(lead), whole[1].removeprefix(end)
        if text.startswith(self.render(chat[:place], tools)):
            # The text before the answer has not changed, so the answer begins where prompt and text first differ: at
            # the prompt's end, or within it where the prompt opens a thought that the text no longer has.
            before = text[: min(common_start(prompt, text), len(whole[0]))]
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start <= stop):
            raise UnreadableTemplate("the span of an assistant message cannot be located in the chat template's output")
        return start, stop

    def _with_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Extend a span that does not end in a control token by the control token that follows it.

        Generation marks may stop short of the end token, and GLM's answers end with the next message's first token;
        without it the model would not learn to stop.
        """
        if not self._ends_in_control.search(text, start, stop) and (found := self._control.match(text, stop)):
            return start, found.end()
        return start, stop

    def _check_calls(self, chat: Chat, tools: Tools) -> None:
        """Refuse templates that leave tool calls out silently, because the answer would be empty."""
        place = next((place for place, message in enumerate(chat) if "tool_calls" in message), None)
        if self._writes_calls or place is None:
            return
        if self.around(chat, place, tools) is None:
            raise UnreadableTemplate("the chat template does not support tool calls")
        self._writes_calls = True

    def _around_in_sample(self, place: int) -> tuple[str, str] | None:
        chat = [{"role": role, "content": self.content("x")} for role in ("user", "assistant")]
        try:
            return self.around(chat, place, None)
        except UnreadableTemplate as error:
            if not self.in_parts:
                self.refusal = f"{str(error)[0].upper()}{str(error)[1:].rstrip('.')}."
            return None

    def _exchanged(self, chat: Chat, place: int, tag: str) -> Chat:
        """The conversation with one message changed to ``tag``: its content or, in a call of tools, their names."""
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
    """Number of characters that two texts have in common at their start."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # by bisection: texts are long, and comparing slices is fast
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def common_end(one: str, other: str) -> int:
    """Number of characters that two texts have in common at their end."""
    return common_start(one[::-1], other[::-1])
