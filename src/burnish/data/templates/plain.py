"""Messages and texts encoded unchanged, as TRL's trainers do it.

A conversation has the ids of ``tokenizer.apply_chat_template``, with its tools and the record's own arguments of the
template. A text has the ids of the tokenizer, with eos at its end; special tokens in it count. Trained is the whole
row, what follows the context (messages with ``train=False``, or a prompt), or the tokens of the assistant: those that
the template marks with ``{% generation %}``, and where it has no marks, those that ``answers.py`` finds.

The response begins at the first token that differs from the tokens of the prompt alone.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

from jinja2 import TemplateError

from burnish.core.errors import UserError
from burnish.core.sequences import shared_beginning
from burnish.core.types import IGNORE_INDEX, Example, Ids, Row
from burnish.data.tally import Tally
from burnish.data.templates.answers import Chat, Renderer, UnreadableTemplate
from burnish.data.templates.bounds import bounded
from burnish.data.templates.encoding import ConversationEncoder
from burnish.data.templates.preferences import pair_rows, verdict_rows
from burnish.data.templates.segments import EncodedConversation, Segment, Turn, masked
from burnish.data.templates.table import TemplateSpec
from burnish.data.tokens.encoder import Encoder

PARTED = "kept: the tokens of its prompt are not the first tokens of the prompt with its answer; training begins where "
PARTED += "the two differ"
KL_IDS = "KL_completion_ids"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOT_ENDS = tuple(
    form for word in (*TemplateSpec.thought_words, *TemplateSpec.tool_call_words) for form in (word, word.strip())
)


@dataclass(frozen=True)
class PlainOptions:
    """Args: limit: the longest row in tokens, None for no limit. truncation, on_too_long: see ``truncate.py``.
    train_on_prompt: train the prompt of a completion too. assistant_only: train the assistant's tokens alone."""

    limit: int | None
    truncation: str
    on_too_long: str = "truncate"
    train_on_prompt: bool = False
    assistant_only: bool = False

    train_on_eos = "turn"

    @property
    def mask_history(self) -> bool:
        """Whether the last tokens of a row are kept, rather than the first."""
        return self.truncation == "keep_end"


class PlainTemplate(ConversationEncoder):
    """Args: tokenizer: with its chat template and eos set."""

    def __init__(self, options: PlainOptions, tokenizer: Any) -> None:
        super().__init__(options, tokenizer, sys.maxsize if options.limit is None else options.limit)
        self.options = options
        self.encoder = Encoder(tokenizer)
        template = tokenizer.chat_template
        self._templates = dict(template) if isinstance(template, dict) else {"default": template or ""}
        self._is_marked = any(_MARK.search(text) for text in self._templates.values())
        self._renderers: dict[str, Renderer] = {}

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the rows of the same examples would change."""
        known = [self._templates, self.encoder.identity, str(self.tokenizer.special_tokens_map), asdict(self.options)]
        return sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()

    def encode_pairs(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        if not any("chosen_ids" in example.extra for example in examples):
            return super().encode_pairs(examples, tally)
        chosen, rejected = ([_of_ids(one.extra, f"{side}_ids") for one in examples] for side in ("chosen", "rejected"))
        return pair_rows(examples, chosen, rejected, self.options, self.cutoff_len, tally)

    def encode_verdicts(self, examples: Sequence[Example], tally: Tally) -> list[Row | None]:
        if not any("completion_ids" in example.extra for example in examples):
            return super().encode_verdicts(examples, tally)
        own = [_of_ids(example.extra, "completion_ids") for example in examples]
        beside = [_of_ids(one.extra, KL_IDS) if one.extra.get(KL_IDS) else None for one in examples]
        return verdict_rows(examples, own, beside, self.options, self.cutoff_len, tally)

    # --- texts --------------------------------------------------------------------------------------------------------

    def _texts(self, examples: Sequence[Example], tally: Tally) -> Iterator[EncodedConversation | None]:
        texts = [e.text if e.completion is None else (e.prompt or "") + e.completion for e in examples]
        ids = self._ids([self._with_eos(text or "") for text in texts])
        prompts = iter(self._ids([e.prompt or "" for e in examples if e.completion is not None]))
        for example, whole in zip(examples, ids, strict=True):
            begin = 0 if example.completion is None else self._begin(next(prompts), whole, example, tally)
            yield self._trained_from(begin, whole)

    def _with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        return text if eos is None or text.endswith(eos) else text + eos

    def _ids(self, texts: list[str]) -> list[Ids]:
        return [array("i", ids) for ids in self.tokenizer(text=texts)["input_ids"]] if texts else []

    # --- conversations ------------------------------------------------------------------------------------------------

    def _chats(
        self, examples: Sequence[Example], tally: Tally, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        for example in examples:
            if "input_ids" in example.extra:
                yield self._labelled(example.extra)
                continue
            messages, kwargs = example.messages, _arguments(example)
            chat = [dict(m.raw or {"role": m.role, "content": m.text}) for m in messages]
            context = next((n for n, message in enumerate(messages) if message.train is not False), len(messages))
            mask = None
            if self.options.assistant_only:
                ids, mask = self._marked(example, chat, kwargs) if self._is_marked else self._found(chat, kwargs)
                _refuse_without_assistant(chat, mask)
            else:
                ids = array("i", self._rendered(example, chat, **kwargs)["input_ids"])
            begin = 0
            if context:
                prompt = self._rendered(example, chat[:context], add_generation_prompt=True, **kwargs)["input_ids"]
                begin = self._begin(prompt, ids, example, tally)
            yield self._trained_from(begin, ids, mask)

    def _labelled(self, columns: Mapping[str, Any]) -> EncodedConversation:
        """Token ids with their labels: as they are given, or those that the masks leave."""
        ids = array("i", columns["input_ids"])
        labels = array("i", columns.get("labels", ids))
        masks = ["assistant_masks"] if self.options.train_on_prompt else ["completion_mask", "assistant_masks"]
        for name in masks if "labels" not in columns else ():
            labels = _where(columns[name], labels) if name in columns else labels
        return EncodedConversation([(_segment(ids[:0], labels[:0]), _segment(ids, labels))])

    def _rendered(self, example: Example, chat: Chat, **kwargs: Any) -> Mapping[str, Any]:
        try:
            with bounded(self.tokenizer):
                found: Mapping[str, Any] = self.tokenizer.apply_chat_template(
                    chat, tokenize=True, return_dict=True, **kwargs
                )
        except TemplateError as error:
            what = f"The chat template cannot write a record: {error}".rstrip(".")
            raise UserError(f"{what}. Its messages: {str(chat)[:200]}", where=example.place) from error
        return found

    def _begin(self, prompt: Sequence[int], whole: Ids, example: Example, tally: Tally) -> int:
        begin = shared_beginning(prompt, whole)
        if begin < len(prompt):
            tally.add(PARTED, example)
        return begin

    def _trained_from(self, begin: int, ids: Ids, mask: Sequence[int] | None = None) -> EncodedConversation:
        """One turn. Args: begin: the first token of the response. mask: 1 for each token that may be trained."""
        labels = ids[:]
        if not self.options.train_on_prompt:
            labels[:begin] = masked(begin)
        if mask is not None:
            labels = _where(mask, labels)
        return EncodedConversation([(_segment(ids[:begin], labels[:begin]), _segment(ids[begin:], labels[begin:]))])

    # --- the assistant's tokens ---------------------------------------------------------------------------------------

    def note(self) -> str | None:
        """A warning about the template's ``{% generation %}`` marks, where they leave out the end of a turn."""
        if not self._is_marked:
            return None
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ids, marks = self._marked(Example(), chat, {})
        ends = self.tokenizer.eos_token_id
        behind = [token for token, is_marked in zip(ids, marks, strict=True) if not is_marked][-2:]
        if 1 in marks and ends in behind and ids[len(marks) - 1 - marks[::-1].index(1)] != ends:
            return (
                "The chat template's `{% generation %}` marks leave out the token that ends the assistant's turn: the "
                "model does not learn to stop. Move `{% endgeneration %}` behind it."
            )
        return None

    def _marked(self, example: Example, chat: Chat, kwargs: dict[str, Any]) -> tuple[Ids, list[int]]:
        found = self._rendered(example, chat, return_assistant_tokens_mask=True, **kwargs)
        return array("i", found["input_ids"]), list(found["assistant_masks"])

    def _found(self, chat: Chat, kwargs: dict[str, Any]) -> tuple[Ids, list[int]]:
        variables = {name: value for name, value in kwargs.items() if name != "tools"}
        try:
            rendered = self._renderer(variables).rendered(chat, kwargs.get("tools"))
        except UnreadableTemplate as error:
            what = f"The assistant's messages cannot be found in the rendered text: {error}. {str(chat)[:200]}"
            raise RuntimeError(what) from error
        edges = list(chain.from_iterable(rendered.spans))
        ids, borders = self.encoder.located([rendered.text], [edges])[0]
        mask = [0] * len(ids)
        for (begin, _), (_, end) in zip(borders[::2], borders[1::2], strict=True):
            mask[begin:end] = [1] * (end - begin)
        return ids, mask

    def _renderer(self, variables: Mapping[str, Any]) -> Renderer:
        """The renderer for these arguments, which are written into the template, because answers may depend on them."""
        opening = "".join(f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in sorted(variables.items()))
        if opening not in self._renderers:
            templates = {name: opening + text for name, text in self._templates.items()}
            self._renderers[opening] = Renderer(templates, self.tokenizer, not_ends=_NOT_ENDS)
        return self._renderers[opening]


def _arguments(example: Example) -> dict[str, Any]:
    """Arguments of the chat template beside the messages: tools, and the record's own arguments."""
    own = example.extra.get("chat_template_kwargs") or {}
    tools = json.loads(example.tools) if example.tools else None
    return {"tools": tools or None, **{name: value for name, value in own.items() if value is not None}}


def _refuse_without_assistant(chat: Chat, mask: Sequence[int]) -> None:
    if 1 not in mask:
        raise RuntimeError(
            "You're using `assistant_only_loss=True`, but at least one example has no assistant tokens: either it "
            "has no message of the assistant's, or the chat template's `{% generation %}` marks hold none of it. "
            f"The example begins: {str(chat)[:200]}"
        )


def _segment(ids: Ids, labels: Ids) -> Segment:
    return Segment(ids, lambda: [True] * len(ids), labels=labels)


def _where(mask: Sequence[int], labels: Ids) -> Ids:
    return array("i", [label if bit else IGNORE_INDEX for label, bit in zip(labels, mask, strict=True)])


# --- columns of token ids ---------------------------------------------------------------------------------------------


def _of_ids(columns: Mapping[str, Any], name: str) -> Turn:
    prompt, response = array("i", columns.get("prompt_ids") or []), array("i", columns[name])
    return _segment(prompt, masked(len(prompt))), _segment(response, response)
