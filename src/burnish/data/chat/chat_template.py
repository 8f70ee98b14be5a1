"""Encode conversations with a Jinja chat template: the tokenizer's own, or one from a file.

The ids equal those of ``tokenizer.apply_chat_template``. ``answers.py`` locates the responses in the rendered text.
Special tokens in user text are hidden before rendering. Conversations that the template cannot render, that begin with
a response or that end without one are dropped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.answers import NO_CALLS, Chat, Rendered, Renderer, Tools, common_end, common_start
from burnish.data.chat.labels import EMPTY_MESSAGE, Segment, TemplateChoices, Turn
from burnish.data.chat.rendering import UnreadableTemplate
from burnish.data.chat.table import TemplateSpec
from burnish.data.chat.tools.tools import ToolError, function_schema, read_calls, read_tools
from burnish.data.images.family import Family
from burnish.data.stats import DataStats, RecordReason, drop_reason, keep_reason
from burnish.data.template_arguments import RESERVED, set_variables, variables_of
from burnish.data.tokens.encoder import Encoder
from burnish.loop.types import RESPONSE_ROLES, Example, Ids, Message

_THOUGHT, _CALL = TemplateSpec.thought_words, TemplateSpec.tool_call_words
_MARKERS = tuple(variant for word in (*_THOUGHT, *_CALL) for variant in (word, word.strip()))
WITH_TOOLS = (
    "Set template to a named template that fits the model, such as qwen, llama3 or mistral: these format tools. "
    "Otherwise, use a chat template that supports tools, or remove the tool calls."
)
CONSECUTIVE_USER_MESSAGES = keep_reason("consecutive user messages without a response")
UNUSED_TOOLS = keep_reason("the chat template does not show tools, so the model does not see those of the record")

_MAX_FORMS = 64
"""Maximum number of cached formats, one per set of arguments."""


class JinjaFormat:
    """A Jinja chat template with a tokenizer.

    Args:
        chat_template: Jinja text, or several by name as some tokenizers have ("default", "tool_use").
        options: template options.
        name: name of the template in messages.
        family: model family of a vision model, otherwise None.
    """

    writes_openings = False
    forgets_thoughts = False  # the template itself decides how to render earlier reasoning

    def __init__(
        self, chat_template: str | Mapping[str, str], options: TemplateChoices, tokenizer: Any, name: str,
        family: Family | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.family = tokenizer, family
        self.name, self.options = name, options
        by_name = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template)
        self.templates = {name: _with_options(text, options) for name, text in by_name.items()}
        self.learns_every_end = options.train_on_eos == "all"
        self.read_special_tokens()

    def read_special_tokens(self) -> None:
        """Read the tokenizer's special tokens. Called again after they change."""
        controls = () if self.family is None else self.family.controls
        self.encoder = Encoder(self.tokenizer, _MARKERS, str(self.templates), controls)
        self.renderer = Renderer(self.templates, self.tokenizer, not_ends=(*_MARKERS, *controls), family=self.family)
        self._forms: dict[str, JinjaFormat] = {}  # arguments as JSON text -> form
        if not self.renderer.writes_messages():
            what = f"The chat template ({self.name}) does not output the content of user and assistant messages."
            raise UserError(what, why=self.renderer.refusal, remedy="Correct it, or set a different template.")

    def answering_last(self) -> JinjaFormat:
        return self

    @property
    def arguments(self) -> frozenset[str]:
        return variables_of("\0".join(self.templates.values())) - RESERVED

    def with_arguments(self, values: Mapping[str, Any]) -> JinjaFormat:
        key = json.dumps(values, sort_keys=True)
        if key not in self._forms:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            head = self.encoder.hide(set_variables(values))
            templates = {name: head + text for name, text in self.templates.items()}
            # The constructor prepends the options again, which has no effect on a template that contains them.
            self._forms[key] = JinjaFormat(templates, self.options, self.tokenizer, self.name, self.family)
        return self._forms[key]

    def jinja(self) -> str | dict[str, str]:
        """Return the chat template that renders the trained text; a dictionary by name if there are several."""
        closing = ""
        if self.closing_word:
            closing = "{%- if not add_generation_prompt %}{{- " + json.dumps(self.closing_word) + " }}{%- endif %}"
        texts = {name: text + closing for name, text in self.templates.items()}
        return texts["default"] if list(texts) == ["default"] else texts

    def identity(self) -> Any:
        return self.templates

    def end_words(self) -> tuple[str, ...]:
        return (self.renderer.end_word,) if self.renderer.end_word else ()

    @property
    def closing_word(self) -> str | None:
        """The EOS token if the template ends responses without a control token, otherwise None."""
        return None if self.renderer.end_word else self.tokenizer.eos_token

    def turns(self, examples: Sequence[Example], stats: DataStats) -> list[list[Turn] | None]:
        """Return the turns of each conversation, or None for a dropped one (counted in ``stats``)."""
        rendered = self._render_examples(examples, stats)
        written = [one for one in rendered if one is not None]
        edges = [[edge for span in one.spans for edge in span] for one in written]
        located = iter(self.encoder.encode_with_boundaries([one.text for one in written], edges))
        return [
            None if one is None else self._turns(example, one, *next(located))
            for example, one in zip(examples, rendered, strict=True)
        ]

    def prompt(self, example: Example) -> list[int]:
        """Return the ids up to the beginning of the next response. A final response in the example is ignored.

        Raises:
            UnreadableTemplate: if the template cannot render the conversation.
        """
        chat = self._chat(example)
        if chat and chat[-1]["role"] == "assistant":
            chat.pop()
        text = self.renderer.render(chat, self._tools(example), prompt=True)
        return self.encoder.encode([text])[text].tolist()

    def _render_examples(self, examples: Sequence[Example], stats: DataStats) -> list[Rendered | None]:
        """Return the rendered conversations, None for dropped ones (counted in ``stats``)."""
        inputs = [self._input(example) for example in examples]
        made = self.renderer.render_all([each for each in inputs if not isinstance(each, ValueError)])
        found: list[Rendered | None] = []
        for example, each in zip(examples, inputs, strict=True):
            rendered = each if isinstance(each, ValueError) else next(made)
            if isinstance(rendered, ValueError):
                is_of_template = not isinstance(each, ValueError)
                reason = self._reason(example, rendered) if is_of_template else drop_reason(str(rendered))
                stats.add(reason, example)
            elif any(first.role == second.role == "user" for first, second in pairwise(example.messages)):
                stats.add(CONSECUTIVE_USER_MESSAGES, example)
            elif example.tools and not self._shows_tools:
                stats.add(UNUSED_TOOLS, example)
            found.append(None if isinstance(rendered, ValueError) else rendered)
        return found

    def _reason(self, example: Example, error: ValueError) -> RecordReason:
        """Return the reason why an example is dropped that the template failed on."""
        uses_tools = any(message.role in ("function", "observation") for message in example.messages)
        if not uses_tools or self._supports_tools:
            return drop_reason(str(error))
        why = "" if str(error) == NO_CALLS else f" ({error})"
        return drop_reason(f"{NO_CALLS}{why}", remedy=WITH_TOOLS)

    @cached_property
    def _supports_tools(self) -> bool:
        """Whether the template renders a tool call and its result."""
        call = Message("function", json.dumps({"name": "add", "arguments": {"a": 1}}))
        messages = (Message("user", "x"), call, Message("observation", "1"), Message("assistant", "1"))
        example = Example(messages=messages, tools=json.dumps([{"name": "add", "parameters": {}}]))
        (found,) = self.renderer.render_all([(self._chat(example), self._tools(example))])
        return not isinstance(found, ValueError)

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the text of a conversation depends on its tools."""
        example = Example(messages=(Message("user", "x"), Message("assistant", "1")))
        tools = self._tools(replace(example, tools=json.dumps([{"name": "add", "parameters": {}}])))
        without, shown = self.renderer.render_all([(self._chat(example), None), (self._chat(example), tools)])
        return isinstance(shown, ValueError) or isinstance(without, ValueError) or shown.text != without.text

    def _input(self, example: Example) -> tuple[Chat, Tools] | ValueError:
        """Return the template's input for an example, or the reason why it is dropped."""
        if example.response is None:
            return UnreadableTemplate("the last message is not a response")
        if example.messages[0].role in RESPONSE_ROLES:
            return UnreadableTemplate("the first message is a response")
        try:
            return self._chat(example), self._tools(example)
        except (UnreadableTemplate, ToolError) as error:
            return error

    def _turns(self, example: Example, rendered: Rendered, ids: Ids, borders: list[tuple[int, int]]) -> list[Turn]:
        """Return the turns of one conversation.

        Args:
            example: the conversation.
            rendered: its rendering.
            ids: token ids of its text.
            borders: begin and end of each span among the tokens, as returned by ``Encoder.boundaries``.
        """
        # A token across the border of a response belongs to the response, because the model has to generate it.
        spans = [(ended, begun) for (ended, _), (_, begun) in zip(borders[::2], borders[1::2], strict=True)]
        turns: list[Turn] = []
        first = before = 0  # first token, and first message, of the next prompt
        for place, (begin, end) in zip(rendered.answers, spans, strict=True):
            last = len(ids) if place == rendered.answers[-1] else end
            question, answer = _messages(example, rendered, place)
            removable = partial(self._removable, rendered, range(before, place), first, begin)
            start = self._prompt_start(rendered, question, place, first, begin)
            prompt = Segment(ids[first:begin], removable, question, start)
            removable = partial(self._removable, rendered, [place], begin, last)
            turns.append((prompt, Segment(ids[begin:last], removable, answer, trailing=last - end)))
            first, before = end, place + 1
        return turns

    def _prompt_start(self, rendered: Rendered, question: Message, place: int, first: int, begin: int) -> int:
        """Return the position of the last message within the prompt of a turn, or 0 if it is not needed.

        Args:
            place: index of the response among the messages.
            first, begin: first token of the prompt, and of the response.
        """
        is_plain = question.train is None and question.weight == 1.0
        if (is_plain and not self.learns_every_end) or place < 2:
            return 0
        try:
            before = common_start(self.renderer.render(rendered.chat[: place - 1], rendered.tools), rendered.text)
        except UnreadableTemplate:
            return 0  # some templates raise an error for a system message without a user message
        ended = self.encoder.boundaries(rendered.text, [before])[0][0]
        return min(max(ended - first, 0), begin - first)

    def _removable(self, rendered: Rendered, places: Iterable[int], first: int, last: int) -> list[bool]:
        """Flag the tokens [first, last) that belong to the content of these messages. Tool calls are not flagged."""
        chat, text = rendered.chat, rendered.text
        marks = [False] * last
        for place in places:
            around = None if "tool_calls" in chat[place] else self.renderer.around(chat, place, rendered.tools)
            if around is None:
                continue
            start, stop = common_start(around[0], text), len(text) - common_end(around[1], text)
            (_, begun), (ended, _) = self.encoder.boundaries(text, [start, max(start, stop)])
            marks[begun : min(ended, last)] = [True] * max(0, min(ended, last) - begun)
        return marks[first:last]

    def _chat(self, example: Example) -> Chat:
        """Return the messages in the format of chat templates, with special tokens in their text hidden."""
        hide, content = self.encoder.hide, self.renderer.content
        chat: Chat = [{"role": "system", "content": content(hide(example.system))}] if example.system else []
        open_calls: list[Any] = []  # ids of calls without a tool response so far
        for message in example.messages:
            if message.role == "function":
                before, calls = read_calls(hide(message.text, assistant=True), _THOUGHT, _CALL)
                called = [
                    # Mistral's templates require ids of nine characters; others ignore them.
                    {
                        "type": "function",
                        "id": f"call{len(chat):03}{number:02}",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for number, call in enumerate(calls)
                ]
                open_calls = [call["id"] for call in called]
                chat.append({"role": "assistant", "content": content(before), "tool_calls": called})
            elif message.role == "observation":
                of_call = {"tool_call_id": open_calls.pop(0)} if open_calls else {}
                chat.append({"role": "tool", "content": content(hide(message.text)), **of_call})
            else:
                text = hide(message.text, assistant=message.role == "assistant")
                chat.append({"role": message.role, "content": content(text)})
        return chat

    def _tools(self, example: Example) -> Tools:
        if not example.tools:
            return None
        return [function_schema(tool) for tool in read_tools(self.encoder.hide(example.tools))] or None


def _messages(example: Example, rendered: Rendered, place: int) -> tuple[Message, Message]:
    """Return prompt and response message of a turn. The prompt is empty if a response follows another one."""
    place -= len(rendered.chat) - len(example.messages)
    question = example.messages[place - 1]
    return question if question.role not in RESPONSE_ROLES else EMPTY_MESSAGE, example.messages[place]


def _with_options(chat_template: str, options: TemplateChoices) -> str:
    """Prepend Jinja code for the options to the template, so that it is saved with the template."""
    head = ""
    if options.default_system:
        message = "{'role': 'system', 'content': " + json.dumps(options.default_system, ensure_ascii=False) + "}"
        head += (
            "{%- if messages[0]['role'] != 'system' %}{%- set messages = [" + message + "] + messages %}{%- endif %}"
        )
    if options.enable_thinking is False:
        # Only "false" is written. Otherwise the template keeps its own default, which is also used when serving.
        head += "{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}"
    return head + chat_template
