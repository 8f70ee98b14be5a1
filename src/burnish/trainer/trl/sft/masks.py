"""Masks of the assistant's tokens in a conversation.

In: messages and the arguments of the chat template. Out: ids, and 1 for each token of the assistant. Where the template
marks answers with ``{% generation %}``, those marks count. Elsewhere an answer is found by construction, with its end
of turn (``data/chat/answers.py``), so that every template works. Refused: a conversation without tokens of the
assistant.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

from transformers.utils import logging

from burnish.data.chat.answers import Renderer
from burnish.data.chat.rendering import Conversation, UnreadableTemplate, marked_ids
from burnish.data.chat.table import TemplateSpec
from burnish.data.tokens.encoder import Encoder

logger = logging.get_logger("transformers.trainer")

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOT_ENDS = tuple(
    form for word in (*TemplateSpec.thought_words, *TemplateSpec.tool_call_words) for form in (word, word.strip())
)


class AssistantMasks:
    """Computes the masks of conversations. Args: tokenizer: with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)  # one for all conversations, because it caches words
        template = tokenizer.chat_template
        self.templates = dict(template) if isinstance(template, dict) else {"default": template or ""}
        self.is_marked = any(_MARK.search(text) for text in self.templates.values())
        self.renderers: dict[str, Renderer] = {}

    def __call__(self, chat: list[Any], arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Ids and mask of a conversation.

        Args:
            arguments: ``tools`` and whatever else the template takes.
        Raises:
            RuntimeError: where there is no token of the assistant.
        """
        ids, mask = self._marked(chat, arguments) if self.is_marked else self._constructed(chat, arguments)
        if 1 not in mask:
            raise RuntimeError(
                "You're using `assistant_only_loss=True`, but at least one example has no assistant tokens: either it "
                "has no message of the assistant's, or the chat template's `{% generation %}` marks hold none of it. "
                f"The example begins: {str(chat)[:200]}"
            )
        return ids, mask

    def note(self) -> str | None:
        """A note for the user on the template's marks."""
        if not self.is_marked:
            return None
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ids, marks = self._marked(chat, {})
        ends = self.tokenizer.eos_token_id
        behind = [token for token, is_marked in zip(ids, marks, strict=True) if not is_marked][-2:]
        if 1 in marks and ends in behind and ids[len(marks) - 1 - marks[::-1].index(1)] != ends:
            return (
                "The chat template's `{% generation %}` marks leave out the token that ends the assistant's turn: the "
                "model does not learn to stop. Move `{% endgeneration %}` behind it."
            )
        return None

    def _marked(self, chat: list[Any], arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
        variables = {name: value for name, value in arguments.items() if name != "tools"}
        return marked_ids(self.tokenizer, Conversation(chat, arguments.get("tools"), variables=variables))

    def _constructed(self, chat: list[Any], arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
        variables = {name: value for name, value in arguments.items() if name != "tools"}
        (rendered,) = self._renderer(variables).rendered([(chat, arguments.get("tools"))])
        if isinstance(rendered, UnreadableTemplate):
            raise RuntimeError(f"The assistant's messages cannot be found: {rendered}. {str(chat)[:200]}")
        edges = list(chain.from_iterable(rendered.spans))
        ids, borders = self.encoder.located([rendered.text], [edges])[0]
        mask = [0] * len(ids)
        for (begin, _), (_, end) in zip(borders[::2], borders[1::2], strict=True):
            mask[begin:end] = [1] * (end - begin)
        return ids.tolist(), mask

    def _renderer(self, variables: dict[str, Any]) -> Renderer:
        """The renderer for these arguments, which are written into the template, because answers may depend on them."""
        opening = "".join(f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in sorted(variables.items()))
        if opening not in self.renderers:
            templates = {name: opening + text for name, text in self.templates.items()}
            self.renderers[opening] = Renderer(templates, self.tokenizer, not_ends=_NOT_ENDS)
        return self.renderers[opening]
