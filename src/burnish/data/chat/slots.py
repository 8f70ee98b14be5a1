"""Encode conversations with a named template: messages are inserted into slots, which are tokenized separately.

A conversation must alternate between a prompt (user, observation) and a response (assistant, function); others are
dropped and counted. Consecutive observations, the results of parallel tool calls, are joined into one prompt.

A text is a tuple of parts that alternate between template and record, beginning with the template:
("<|im_start|>user\\n", "hello", "<|im_end|>\\n"). The parts are joined for tokenization. They are kept for truncation,
which removes text of the record only.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeAlias

from burnish.data.chat.jinja import write_jinja
from burnish.data.chat.labels import Segment, TemplateChoices, Turn, concatenate_ids
from burnish.data.chat.table import CONTENT, Slots, TemplateSpec, Token
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS, describe_tools
from burnish.data.chat.tools.tools import ToolError, read_calls
from burnish.data.images.family import Family
from burnish.data.stats import DataStats, drop_reason
from burnish.data.template_arguments import THINKING
from burnish.data.tokens.encoder import Encoder
from burnish.loop.types import IMAGE, REQUEST_ROLES, RESPONSE_ROLES, VIDEO, Example, Ids, Message

Parts: TypeAlias = tuple[str, ...]
Element: TypeAlias = "int | Parts"
EncodedSlots: TypeAlias = "list[list[int | Parts]]"
"""The elements that open a conversation, then those of each message: token ids, and texts as tuples of parts."""
Borders: TypeAlias = "list[tuple[int, int]]"


def with_options(spec: TemplateSpec, options: TemplateChoices) -> TemplateSpec:
    """Return the template with changes from the options."""
    if options.tool_format is not None:
        # As in LLaMA-Factory: with another tool format, calls have plain slots instead of the template's.
        end = () if spec.efficient_eos else (Token("eos_token", "eos"),)
        spec = replace(
            spec, tool_format=options.tool_format, tool_list_format=options.tool_format, function=(CONTENT, *end)
        )
    if options.default_system is not None:
        spec = replace(spec, default_system=options.default_system)
    return spec


class BrokenConversation(ValueError):
    """Raised for messages that a template cannot render. The message completes a sentence "dropped: ..."."""


def broken_rule(messages: Sequence[Message]) -> str | None:
    """Return the rule that a conversation violates, as the rest of a sentence "dropped: ...", or None."""
    if not messages:
        return "no messages"
    if (turn := next((place for place, message in enumerate(messages) if message.role == "system"), None)) is not None:
        return f"a system message after turn {turn} (the template supports it only at the beginning)"
    roles = (REQUEST_ROLES, RESPONSE_ROLES)
    if any(message.role not in roles[place % 2] for place, message in enumerate(messages)):
        return "prompts (user, observation) and responses (assistant, function) do not alternate"
    return "the last message is not a response" if len(messages) % 2 else None


class SlotFormat:
    """A named template with a tokenizer.

    Args:
        spec: the template, with changes from the options.
        options: ``TemplateOptions`` and ``LearnOptions``.
        family: model family of a vision model, otherwise None.
    """

    writes_openings = True

    def __init__(
        self, spec: TemplateSpec, options: TemplateChoices, tokenizer: Any, family: Family | None = None
    ) -> None:
        self.family = family
        self.spec = spec
        self.options = options
        self.tokenizer = tokenizer
        self.enable_thinking, self.preserve_thinking = options.enable_thinking, options.preserve_thinking
        self.answers_last = options.mask_history
        self.read_special_tokens()
        self._between = spec.between_observations
        self._thought = re.compile("(.*?)".join(map(re.escape, spec.thought_words)), re.DOTALL)
        self._thought_words = re.compile(f"({'|'.join(map(re.escape, spec.thought_words))})")
        TOOL_FORMATS.get(spec.tool_format)

    def read_special_tokens(self) -> None:
        """Read the tokenizer's special tokens. Called again after they change."""
        controls = () if self.family is None else self.family.controls
        self.encoder = Encoder(self.tokenizer, _words(self.spec), str(self.spec), controls)
        slots = chain(*(getattr(self.spec, name) for name in ("prefix", "system", *REQUEST_ROLES, *RESPONSE_ROLES)))
        self._tokens = {slot: self._token(slot) for slot in slots if isinstance(slot, Token)}

    def answering_last(self) -> SlotFormat:
        form = copy(self)
        form.answers_last = True
        return form

    @property
    def forgets_thoughts(self) -> bool:
        """Whether the reasoning of responses before the last one is removed."""
        return self.answers_last and not self.preserve_thinking

    @property
    def arguments(self) -> frozenset[str]:
        return THINKING if self.spec.reasoning else frozenset()

    def with_arguments(self, values: Mapping[str, Any]) -> SlotFormat:
        form = copy(self)
        form.enable_thinking = values.get("enable_thinking", self.enable_thinking)
        form.preserve_thinking = values.get("preserve_thinking", self.preserve_thinking)
        return form

    def end_words(self) -> tuple[str, ...]:
        return self.spec.stop_words

    @property
    def closing_word(self) -> str | None:
        return self.tokenizer.eos_token if self.spec.efficient_eos else None

    def identity(self) -> Any:
        return asdict(self.spec)

    def jinja(self) -> str:
        return write_jinja(self.spec, self.options, self.tokenizer, self.forgets_thoughts, self.family)

    def turns(self, examples: Sequence[Example], stats: DataStats) -> list[list[Turn] | None]:
        """Return the turns of each conversation, or None for a dropped one (counted in ``stats``)."""
        examples = [self._with_observations_joined(example) for example in examples]
        conversations = [self._try(example, stats) for example in examples]
        ids = self._ids(conversations)
        return [
            None if written is None else self._turns(example.messages, written, ids)
            for example, written in zip(examples, conversations, strict=True)
        ]

    def prompt(self, example: Example) -> list[int]:
        """Return the ids up to the beginning of the next response. A final response in the example is ignored.

        Raises:
            ToolError: if tools or calls cannot be formatted.
            BrokenConversation: if messages do not alternate.
        """
        messages = self._with_observations_joined(example).request
        with_empty_response = (*messages, Message("assistant", ""))
        if rule := broken_rule(with_empty_response):
            raise BrokenConversation(rule)
        written = self._conversation(replace(example, messages=with_empty_response))[:-1]
        ids = self._ids([written])
        return [token for elements in written for element in elements for token in _tokens(element, ids)]

    def _with_observations_joined(self, example: Example) -> Example:
        messages = example.messages
        if not any(one.role == other.role == "observation" for one, other in pairwise(messages)):
            return example
        joined: list[Message] = []
        for message in messages:
            if joined and joined[-1].role == message.role == "observation":
                content = joined[-1].text + self._between + message.text
                joined[-1] = replace(joined[-1], content=content)
            else:
                joined.append(message)
        return replace(example, messages=tuple(joined))

    def _try(self, example: Example, stats: DataStats) -> EncodedSlots | None:
        rule = broken_rule(example.messages)
        if rule is None:
            try:
                return self._conversation(example)
            except ToolError as error:
                rule = str(error)
        stats.add(drop_reason(rule), example)
        return None

    def _conversation(self, example: Example) -> EncodedSlots:
        """Return the opening and each message in its slots, with reasoning removed or completed as configured."""
        messages = [self._with_own_thought_words(message) for message in example.messages]
        last = len(messages) - 1
        for place in range(1, len(messages), 2) if self.spec.reasoning else ():
            if self.enable_thinking is False or (self.forgets_thoughts and place < last):
                text = self._thought.sub("", messages[place].text).lstrip("\n")
                messages[place] = replace(messages[place], content=text)
        opening, first = self._opening(example, messages[0])
        written = [opening, first, *(self._slots(message, self._content(message)) for message in messages[1:])]
        for place in range(last if self.forgets_thoughts else 1, last + 1, 2) if self.spec.reasoning else ():
            if not any(word.strip() in messages[place].text for word in self.spec.thought_words):
                if self.enable_thinking:  # the empty reasoning block is trained
                    written[place + 1].insert(0, (self.spec.empty_thought,))
                else:
                    written[place].append((self.spec.empty_thought,))
        return written

    def _with_own_thought_words(self, message: Message) -> Message:
        """Return a message whose separate reasoning is between the words of this template instead of ``<think>``."""
        (begin, end), own = TemplateSpec.thought_words, self.spec.thought_words
        is_separate = message.has_reasoning and self.spec.reasoning and isinstance(message.content, str)
        if not is_separate or own[0].strip() == begin.strip():
            return message
        thought, _, text = message.text.removeprefix(begin).partition(end.strip())
        return replace(message, content=thought.strip().join(own) + text.lstrip("\n"))

    def _opening(self, example: Example, message: Message) -> tuple[list[Element], list[Element]]:
        """Return the opening of a conversation with its system message, and the first message in its slots."""
        opening, content = self._fill(self.spec.prefix, ()), self._content(message)
        system = self._system(example)
        if system is not None and not self.spec.system_in_user:
            opening += self._fill(self.spec.system, system)
        elif system is not None and message.role == "user":
            wrapped = self._fill(self.spec.system[:1], system)[0]
            assert isinstance(wrapped, tuple)
            content = _continue(wrapped, content)
        return opening, self._slots(message, content)

    def _slots(self, message: Message, content: Parts) -> list[Element]:
        slots: Slots = getattr(self.spec, message.role)
        return self._fill(slots, content)

    def _system(self, example: Example) -> Parts | None:
        """Return the system message with the list of tools, or None if there is neither."""
        if not (example.system or self.spec.default_system or example.tools):
            return None
        tools = describe_tools(self.encoder.hide(example.tools), self.spec.tool_list_format) if example.tools else ""
        if example.system:
            return ("", self.encoder.hide(example.system), tools)
        if self.spec.tools_open_system and not self.spec.default_system:
            tools = tools.lstrip("\n")
        return (self.spec.default_system + tools,)

    def _content(self, message: Message) -> Parts:
        openings = (self.family.opening(one) if self.family else "" for one in message.images if one.frames)
        if message.role == "observation" and self._between in message.text and self._between != "\n":
            answers = message.text.split(self._between)
            first, *others = (self._seen(self.encoder.hide(answer), openings) for answer in answers)
            return ("", *first, *chain.from_iterable((self._between, *answer) for answer in others))
        if message.role in REQUEST_ROLES:
            return ("", *self._seen(self.encoder.hide(message.text), openings))
        text = self.encoder.hide(message.text, assistant=True)
        if message.role == "assistant":
            # Faster than one regular expression for two words with different beginnings.
            has_thought = any(word in text for word in self.spec.thought_words)
            if has_thought:
                pieces = self._thought_words.split(text)
                texts = (self._seen(p, openings) if at % 2 == 0 else (p,) for at, p in enumerate(pieces))
                return ("", *chain.from_iterable(texts))
            return ("", *self._seen(text, openings))
        before, calls = read_calls(text, self.spec.thought_words, self.spec.tool_call_words)
        return ("", before, TOOL_FORMATS[self.spec.tool_format].write(calls))

    def _seen(self, text: str, openings: Iterator[str]) -> Parts:
        """Split a text of the record into parts, with the template's text for each image and video between them.

        Args:
            openings: opening texts of the remaining videos.
        """
        if self.family is None or not (IMAGE in text or VIDEO in text):
            return (text,)
        image, video = self.family.template_text, self.family.video_template_text
        pieces = re.split(f"([{IMAGE}{VIDEO}])", text)
        return tuple(piece if at % 2 == 0 else image if piece == IMAGE else next(openings) + video
                     for at, piece in enumerate(pieces))  # fmt: skip

    def _fill(self, slots: Slots, content: Parts) -> list[Element]:
        elements: list[Element] = []
        for slot in slots:
            if isinstance(slot, Token):
                elements += self._tokens[slot]
            elif CONTENT in slot:
                head, tail = slot.split(CONTENT, 1)
                elements.append(_continue(_continue((head,), content), (tail,)))
            else:
                elements.append((slot,))
        return elements

    def _token(self, token: Token) -> list[Element]:
        """Return the token's id. If the vocabulary lacks it: its name as text, or nothing for an optional token."""
        if token.kind in ("bos", "eos"):
            name = getattr(self.tokenizer, f"{token.kind}_token")
            return [] if name is None else [self.tokenizer.convert_tokens_to_ids(name)]
        if token.name in self.tokenizer.get_vocab():
            return [self.tokenizer.convert_tokens_to_ids(token.name)]
        return [(token.name,)] if token.kind == "named" else []

    def _ids(self, conversations: Sequence[EncodedSlots | None]) -> Mapping[str, Ids]:
        """Tokenize all texts of a batch in one call. Returns text -> ids."""
        return self.encoder.encode(
            "".join(element)
            for written in conversations
            for elements in written or ()
            for element in elements
            if not isinstance(element, int)
        )

    def _turns(self, messages: Sequence[Message], written: EncodedSlots, ids: Mapping[str, Ids]) -> list[Turn]:
        first = [*written[0], *written[1]]
        opening = sum(len(_tokens(element, ids)) for element in written[0])
        segments = [
            Segment(
                concatenate_ids(_tokens(element, ids) for element in elements),
                partial(self._removable, elements, ids),
                message,
                0 if place else opening,
            )
            for place, (message, elements) in enumerate(zip(messages, [first, *written[2:]], strict=True))
        ]
        return list(zip(segments[::2], segments[1::2], strict=True))

    def _removable(self, elements: Sequence[Element], ids: Mapping[str, Ids]) -> list[bool]:
        """Flag the tokens of a prompt or a response that belong to a message's content."""
        texts = [element for element in dict.fromkeys(elements) if not isinstance(element, int)]
        edges = [list(accumulate(map(len, text))) for text in texts]
        located = self.encoder.encode_with_boundaries(["".join(text) for text in texts], edges)
        borders: dict[Element, Borders] = {text: found for text, (_, found) in zip(texts, located, strict=True)}
        return [mark for e in elements for mark in _marks(len(_tokens(e, ids)), borders.get(e, []))]


def _marks(length: int, borders: Borders) -> list[bool]:
    """Flag the tokens of an element that come from the record.

    Args:
        length: number of tokens.
        borders: end of each part; parts of the template and of the record alternate.
    """
    marks = [False] * length
    for (_, begun), (ended, _) in zip(borders[::2], borders[1::2], strict=False):
        marks[begun:ended] = [True] * max(0, ended - begun)
    return marks


def _words(spec: TemplateSpec) -> list[str]:
    """Return the special tokens that a response may contain: those around a reasoning block or a tool call.

    The most common ones are allowed in every template, since datasets are shared between models.
    """
    markers = (*spec.thought_words, *spec.tool_call_words, *TemplateSpec.thought_words, *TemplateSpec.tool_call_words)
    return [variant for word in markers for variant in (word, word.strip())]


def _continue(parts: Parts, more: Parts) -> Parts:
    """Concatenate two tuples of parts, merging template text at the border into one part."""
    if len(parts) % 2 and more:
        return (*parts[:-1], parts[-1] + more[0], *more[1:])
    return (*parts, *more)


def _tokens(element: Element, ids: Mapping[str, Ids]) -> Ids:
    return array("i", [element]) if isinstance(element, int) else ids["".join(element)]
