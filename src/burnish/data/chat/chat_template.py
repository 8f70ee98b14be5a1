"""A conversation under a chat template in Jinja: the tokenizer's own, or a user's file.

In: examples with messages. Out: their turns, with the ids of ``tokenizer.apply_chat_template``. Counted and left out:
conversations that the template refuses, that begin with an answer, or that end without one. ``answers.py`` finds the
spans of the answers in the rendered text. Special tokens in the text of a user are hidden before rendering.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.answers import Chat, Rendered, Renderer, Tools, common_end, common_start
from burnish.data.chat.labels import NO_MESSAGE, Segment, TemplateChoices, Turn
from burnish.data.chat.rendering import UnreadableTemplate
from burnish.data.chat.table import TemplateSpec
from burnish.data.chat.tools.tools import ToolError, function_schema, read_calls, read_tools
from burnish.data.images.family import Family
from burnish.data.stats import DataStats
from burnish.data.tokens.encoder import Encoder
from burnish.loop.types import Example, Ids, Message

_THOUGHT, _CALL = TemplateSpec.thought_words, TemplateSpec.tool_call_words
_WORDS = tuple(variant for word in (*_THOUGHT, *_CALL) for variant in (word, word.strip()))
_ANSWERING = ("assistant", "function")
TWO_QUESTIONS = "kept: consecutive user messages without a response"


class JinjaFormat:
    """A chat template over one tokenizer.

    Args:
        chat_template: Jinja text, or several by name as tokenizers may have ("default", "tool_use").
        options: ``TemplateOptions``.
        name: its name in messages.
        family: of the model, if it sees.
    """

    def __init__(
        self, chat_template: str | Mapping[str, str], options: TemplateChoices, tokenizer: Any, name: str,
        family: Family | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.family = tokenizer, family
        self.name = name
        by_name = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template)
        self.templates = {name: _as_asked(text, options) for name, text in by_name.items()}
        self.learns_every_end = options.train_on_eos == "all"
        self.fit()

    def fit(self) -> None:
        """Read the tokenizer's special tokens; called again when they have changed."""
        controls = () if self.family is None else self.family.controls
        self.encoder = Encoder(self.tokenizer, _WORDS, str(self.templates), controls)
        self.renderer = Renderer(self.templates, self.tokenizer, not_ends=(*_WORDS, *controls), family=self.family)
        if not self.renderer.writes_messages():
            what = f"The chat template ({self.name}) does not output the content of user and assistant messages."
            raise UserError(what, why=self.renderer.refusal, remedy="Correct it, or set another template.")

    def answering_last(self) -> JinjaFormat:
        return self  # what it makes of earlier thoughts is its own business

    def jinja(self) -> str | dict[str, str]:
        """The chat template that renders the trained text; several by name where the tokenizer has several."""
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
        """The token that closes a row where the template ends answers without a control token: eos."""
        return None if self.renderer.end_word else self.tokenizer.eos_token

    def turns(self, examples: Sequence[Example], stats: DataStats) -> list[list[Turn] | None]:
        """The turns of each conversation, None where it has none to learn from (counted in ``stats``)."""
        rendered = self._rendered(examples, stats)
        written = [one for one in rendered if one is not None]
        edges = [[edge for span in one.spans for edge in span] for one in written]
        located = iter(self.encoder.located([one.text for one in written], edges))
        return [
            None if one is None else self._turns(example, one, *next(located))
            for example, one in zip(examples, rendered, strict=True)
        ]

    def prompt(self, example: Example) -> list[int]:
        """The ids up to the beginning of the next answer.

        Raises:
            UnreadableTemplate: if the template refuses the conversation.
        """
        chat = self._chat(example)
        if chat and chat[-1]["role"] == "assistant":
            chat.pop()
        text = self.renderer.render(chat, self._tools(example), prompt=True)
        return self.encoder.encode([text])[text].tolist()

    def _rendered(self, examples: Sequence[Example], stats: DataStats) -> list[Rendered | None]:
        """The renderings of conversations, None where there is nothing to learn from one (counted in ``stats``)."""
        inputs = [self._input(example) for example in examples]
        made = self.renderer.rendered([each for each in inputs if not isinstance(each, ValueError)])
        found: list[Rendered | None] = []
        for example, each in zip(examples, inputs, strict=True):
            rendered = each if isinstance(each, ValueError) else next(made)
            if isinstance(rendered, ValueError):
                stats.add(f"dropped: {rendered}", example)
            elif any(first.role == second.role == "user" for first, second in pairwise(example.messages)):
                stats.add(TWO_QUESTIONS, example)
            found.append(None if isinstance(rendered, ValueError) else rendered)
        return found

    def _input(self, example: Example) -> tuple[Chat, Tools] | ValueError:
        """The template's input for an example, or why the example is dropped."""
        if not example.messages or example.messages[-1].role not in _ANSWERING:
            return UnreadableTemplate("the last message is not a response")
        if example.messages[0].role in _ANSWERING:
            return UnreadableTemplate("the first message is a response")
        try:
            return self._chat(example), self._tools(example)
        except (UnreadableTemplate, ToolError) as error:
            return error

    def _turns(self, example: Example, rendered: Rendered, ids: Ids, borders: list[tuple[int, int]]) -> list[Turn]:
        """The turns of one conversation.

        Args:
            ids: the tokens of its text.
            borders: begin and end of each span among them, in the form of ``Encoder.boundaries``.
        """
        # A token across the border of an answer belongs to the answer, because the model has to produce it.
        begins, ends = [ended for ended, _ in borders[::2]], [begun for _, begun in borders[1::2]]
        turns = []
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            first, last = ends[index - 1] if index else 0, end if index < len(ends) - 1 else len(ids)
            question, answer = _messages(example, rendered, index)
            place, before = rendered.answers[index], rendered.answers[index - 1] + 1 if index else 0
            turns.append(
                (
                    Segment(
                        ids[first:begin],
                        partial(self._removable, rendered, range(before, place), first, begin),
                        question,
                        self._asked_from(rendered, question, index, first, begin),
                    ),
                    Segment(
                        ids[begin:last],
                        partial(self._removable, rendered, [place], begin, last),
                        answer,
                        trailing=last - end,
                    ),
                )
            )
        return turns

    def _asked_from(self, rendered: Rendered, question: Message, index: int, first: int, begin: int) -> int:
        """The position in the source of a turn at which its question begins; 0 where nobody uses it."""
        place = rendered.answers[index] - 1
        is_plain = question.train is None and question.weight == 1.0
        if (is_plain and not self.learns_every_end) or place < 1:
            return 0
        try:
            before = common_start(self.renderer.render(rendered.chat[:place], rendered.tools), rendered.text)
        except UnreadableTemplate:
            return 0  # a template that refuses a system message without a question
        ended = self.encoder.boundaries(rendered.text, [before])[0][0]
        return min(max(ended - first, 0), begin - first)

    def _removable(self, rendered: Rendered, places: Iterable[int], first: int, last: int) -> list[bool]:
        """Mark the tokens [first, last) of the text that belong to the content of these messages. Tool calls do not."""
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
        """The messages in the form that chat templates take, with special tokens in their text hidden."""
        hide, content = self.encoder.hide, self.renderer.content
        chat: Chat = [{"role": "system", "content": content(hide(example.system))}] if example.system else []
        open_calls: list[Any] = []  # the ids of calls whose answer has not come yet
        for message in example.messages:
            if message.role == "function":
                before, calls = read_calls(hide(message.text, assistant=True), _THOUGHT, _CALL)
                called = [
                    # Mistral's templates ask for ids of nine characters; others ignore them.
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


def _messages(example: Example, rendered: Rendered, index: int) -> tuple[Message, Message]:
    """The messages of a turn; the question is empty where an answer follows another answer."""
    place = rendered.answers[index] - (len(rendered.chat) - len(example.messages))
    question = example.messages[place - 1]
    return question if question.role not in _ANSWERING else NO_MESSAGE, example.messages[place]


def _as_asked(chat_template: str, options: TemplateChoices) -> str:
    """The template with the changes from the options at its beginning, so that they are saved with it."""
    head = ""
    if options.default_system:
        message = "{'role': 'system', 'content': " + json.dumps(options.default_system, ensure_ascii=False) + "}"
        head += (
            "{%- if messages[0]['role'] != 'system' %}{%- set messages = [" + message + "] + messages %}{%- endif %}"
        )
    if options.enable_thinking is False:
        # Only "false" is written. Otherwise the template's own default stays, because it is served with that default.
        head += "{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}"
    return head + chat_template
