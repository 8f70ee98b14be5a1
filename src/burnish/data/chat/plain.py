"""Encode messages and texts unchanged, as TRL's trainers do.

A conversation has the ids of ``tokenizer.apply_chat_template``, with its tools and the record's own template variables.
A text has the ids of the tokenizer with EOS appended; special tokens in it are recognized. The trained tokens are: the
whole row; or everything after the context (messages with ``train=False``, or a prompt); or the assistant's tokens. The
latter are found by the template's ``{% generation %}`` marks, or by ``answers.py`` if it has none.

The response begins at the first token that differs from the tokens of the prompt alone. For a vision model, prompt and
response are tokenized separately, as TRL does; image control tokens in user text are treated as plain text.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.answers import GENERATION_MARK, Rendered, Renderer, common_start
from burnish.data.chat.encoding import ConversationEncoder
from burnish.data.chat.labels import EncodedConversation, Segment, Turn, masked_labels
from burnish.data.chat.preferences import pair_rows, unpaired_rows
from burnish.data.chat.rendering import (
    WHOLE,
    Conversation,
    Rendering,
    UnreadableTemplate,
    chat_ids,
    marked_ids,
    render,
    with_processor_text,
)
from burnish.data.chat.table import TemplateSpec
from burnish.data.images.family import Family
from burnish.data.images.image_file import BadImage, ImageFile
from burnish.data.images.in_rows import Marks, images_column, images_in, shift_positions
from burnish.data.reading.json_files import parse_json
from burnish.data.stats import DataStats, keep_reason
from burnish.data.template_arguments import arguments_of, set_variables
from burnish.data.tokens.encoder import Encoder
from burnish.loop.types import IGNORE_INDEX, Example, Ids, Message, Row
from burnish.utils.sequences import shared_beginning

RETOKENIZED_PROMPT = keep_reason(
    "the prompt is tokenized differently when it is followed by the response; the loss starts at the first "
    "token that differs"
)
KL_IDS = "KL_completion_ids"
_NEVER_END_TOKENS = tuple(
    form for word in (*TemplateSpec.thought_words, *TemplateSpec.tool_call_words) for form in (word, word.strip())
)


@dataclass(frozen=True)
class PlainOptions:
    """Options of ``PlainTemplate``.

    Args:
        limit: maximum row length in tokens, or None.
        truncation: truncation rule, see ``truncate.py``.
        on_too_long: "truncate", "drop" or "raise".
        train_on_prompt: also train the prompt of a completion.
        assistant_only: train the assistant's tokens only.
    """

    limit: int | None
    truncation: str
    on_too_long: str = "truncate"
    train_on_prompt: bool = False
    assistant_only: bool = False

    train_on_eos = "turn"

    @property
    def mask_history(self) -> bool:
        """Whether truncation keeps the last tokens of a row instead of the first."""
        return self.truncation == "keep_end"


class PlainTemplate(ConversationEncoder):
    """Encodes messages and texts unchanged.

    Args:
        options: truncation and trained tokens.
        tokenizer: the tokenizer, with chat template and EOS token set.
        family: model family of a vision model, otherwise None.
    """

    def __init__(self, options: PlainOptions, tokenizer: Any, family: Family | None = None) -> None:
        super().__init__(options, tokenizer, sys.maxsize if options.limit is None else options.limit)
        self.options = options
        self.family, self.marks = family, None if family is None else Marks(family)
        self.encoder = Encoder(tokenizer, controls=() if family is None else family.controls)
        template = tokenizer.chat_template
        self._templates = dict(template) if isinstance(template, dict) else {"default": template or ""}
        self._is_marked = any(GENERATION_MARK.search(text) for text in self._templates.values())
        self._renderers: dict[str, Renderer] = {}
        self._prompt_cache: dict[tuple[str, int], Ids] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash that changes if the rows of the same examples could change."""
        known = [self._templates, self.encoder.identity, str(self.tokenizer.special_tokens_map), asdict(self.options)]
        known += [] if self.family is None else [self.family.identity]
        return sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()

    def encode_pairs(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        if not any("chosen_ids" in example.extra for example in examples):
            self._prompt_cache = {}  # prompts of this batch, shared by both responses
            try:
                return super().encode_pairs(examples, stats)
            finally:
                self._prompt_cache = None
        chosen, rejected = (
            [_turn_from_token_ids(one.extra, f"{side}_ids") for one in examples] for side in ("chosen", "rejected")
        )
        return pair_rows(examples, chosen, rejected, self.options, self.cutoff_len, stats)

    def encode_unpaired(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        if not any("completion_ids" in example.extra for example in examples):
            return super().encode_unpaired(examples, stats)
        own = [_turn_from_token_ids(example.extra, "completion_ids") for example in examples]
        beside = [_turn_from_token_ids(one.extra, KL_IDS) if one.extra.get(KL_IDS) else None for one in examples]
        return unpaired_rows(examples, own, beside, self.options, self.cutoff_len, stats)

    # --- texts --------------------------------------------------------------------------------------------------------

    def _texts(self, examples: Sequence[Example], stats: DataStats) -> Iterator[EncodedConversation | None]:
        texts = [e.text if e.completion is None else (e.prompt or "") + e.completion for e in examples]
        ids = self._ids([self._with_eos(text or "") for text in texts])
        prompts = iter(self._ids([e.prompt or "" for e in examples if e.completion is not None]))
        for example, whole in zip(examples, ids, strict=True):
            begin = 0 if example.completion is None else self._begin(next(prompts), whole, example, stats)
            yield self._single_turn(begin, whole)

    def _with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        return text if eos is None or text.endswith(eos) else text + eos

    def _ids(self, texts: list[str]) -> list[Ids]:
        return [array("i", ids) for ids in self.tokenizer(text=texts)["input_ids"]] if texts else []

    # --- conversations ------------------------------------------------------------------------------------------------

    def _chats(
        self, examples: Sequence[Example], stats: DataStats, last_only: bool
    ) -> Iterator[EncodedConversation | None]:
        chats = [one for one in examples if "input_ids" not in one.extra]
        if self.marks is not None:
            seen = iter(self._seen(chats, self.marks))
            for example in examples:
                yield self._label_tokens(example.extra) if "input_ids" in example.extra else next(seen)
            return
        wholes, prompts = iter(self._tokenize_texts(chats)), iter(self._prompts(chats))
        for example in examples:
            if "input_ids" in example.extra:
                yield self._label_tokens(example.extra)
                continue
            (ids, mask), prompt = next(wholes), next(prompts)
            begin = 0 if prompt is None else self._begin(prompt, ids, example, stats)
            yield self._single_turn(begin, ids, mask)

    def _tokenize_texts(self, examples: Sequence[Example]) -> Iterator[tuple[Ids, Sequence[int] | None]]:
        """Yield the ids of conversations, and a mask of the assistant's tokens if only those are trained."""
        conversations = [_conversation(example) for example in examples]
        if not self.options.assistant_only:
            return ((ids, None) for ids in self._chat_ids(examples, conversations))
        if self._is_marked:
            return (self._tokenize_marked(example, one) for example, one in zip(examples, conversations, strict=True))
        rendered = map(self._answers_in, conversations)
        return (self._between(one, its.text, its.spans) for one, its in zip(conversations, rendered, strict=True))

    def _prompts(self, examples: Sequence[Example]) -> Iterator[Ids | None]:
        """Yield the ids of what precedes each response, or None if everything is trained."""
        contexts = [_context(example.messages) for example in examples]
        known = {} if self._prompt_cache is None else self._prompt_cache
        new = [
            (one, size)
            for one, size in zip(examples, contexts, strict=True)
            if size and (one.source, one.number) not in known
        ]
        conversations = [replace(_conversation(one), parts=[(size, True)]) for one, size in new]
        prompts = self._chat_ids([one for one, _ in new], conversations)
        known |= {(one.source, one.number): ids for (one, _), ids in zip(new, prompts, strict=True)}
        return (known[one.source, one.number] if size else None for one, size in zip(examples, contexts, strict=True))

    def _prompt_rows(self, examples: Sequence[Example], stats: DataStats) -> list[Row | None]:
        chats = [one for one in examples if one.messages]
        written = chats if self.marks is None else map(self.marks.for_template, chats)
        parts = [_until_response(_conversation(one)) for one in written]
        if self.marks is None:
            of_chats: Iterator[Row] = ({"input_ids": ids} for ids in self._chat_ids(chats, parts))
        else:
            of_chats = map(partial(self._prompt_with_images, self.marks), chats, parts)
        texts = iter(self._ids([one.text or one.prompt or "" for one in examples if not one.messages]))
        return [next(of_chats) if one.messages else {"input_ids": next(texts)} for one in examples]

    def stop_token_ids(self) -> list[int]:
        """Return the ids that end generation."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _chat_ids(self, examples: Sequence[Example], conversations: Sequence[Conversation]) -> list[Ids]:
        try:
            return [array("i", ids) for ids in chat_ids(self.tokenizer, conversations)] if conversations else []
        except UnreadableTemplate as error:
            if len(conversations) > 1:  # find the example that caused the error
                pairs = zip(examples, conversations, strict=True)
                return [ids for example, one in pairs for ids in self._chat_ids([example], [one])]
            raise UserError(_not_rendered(error, conversations[0]), where=examples[0].place) from error

    # --- conversations with images ----------------------------------------------------------------------------------

    def _seen(self, examples: Sequence[Example], marks: Marks) -> Iterator[EncodedConversation]:
        """Encode conversations for a vision model."""
        contexts = [_context(example.messages) for example in examples]
        is_masked = self.options.assistant_only
        conversations = [
            replace(
                self._in_parts(_conversation(marks.for_template(one))),
                parts=[(size, True), WHOLE] if size else [WHOLE],
                marks=is_masked,
            )
            for one, size in zip(examples, contexts, strict=True)
        ]
        for example, size, one in zip(examples, contexts, conversations, strict=True):
            *prompt, whole = [with_processor_text(each, marks.family) for each in render(self.tokenizer, [one])]
            if error := next((each.error for each in (*prompt, whole) if each.error is not None), None):
                raise UserError(_not_rendered(error, one), where=example.place) from error
            try:
                made = self._expand_images(example, one, prompt[0].text if size else "", whole, marks)
            except BadImage as error:
                raise UserError(
                    f"The record cannot be tokenized: {str(error).rstrip('.')}.", where=example.place
                ) from error
            found = self._single_turn(*made)
            yield EncodedConversation(
                [(marks.without_placeholders(a), marks.without_placeholders(b)) for a, b in found.turns]
            )

    def _prompt_with_images(self, marks: Marks, example: Example, one: Conversation) -> Row:
        """Return the row of a conversation up to its response, for a vision model."""
        (prompt,) = (with_processor_text(each, marks.family) for each in render(self.tokenizer, [self._in_parts(one)]))
        if prompt.error is not None:
            raise UserError(_not_rendered(prompt.error, one), where=example.place) from prompt.error
        images = images_in(replace(example, messages=example.request))
        ids = self.encoder.encode([prompt.text])[prompt.text] if prompt.text else array("i")
        try:
            made = marks.expand(marks.front(len(images)) + ids, images)
        except BadImage as error:
            raise UserError(
                f"The record cannot be tokenized: {str(error).rstrip('.')}.", where=example.place
            ) from error
        return {"input_ids": made.ids, **({"images": images_column(made.images)} if images else {})}

    def _expand_images(
        self, example: Example, one: Conversation, prompt: str, whole: Rendering, marks: Marks
    ) -> tuple[int, Ids, Sequence[int] | None, Sequence[ImageFile]]:
        """Return the start of the response, the ids, the mask of trainable tokens, and the images among the tokens."""
        text, images = whole.text, images_in(example)
        front = marks.front(len(images))
        if self.options.assistant_only:
            ids, mask = self._between(one, text, whole.spans if self._is_marked else self._answers_in(one).spans)
            start = self.encoder.boundaries(text, [common_start(prompt, text)])[0][0]
            made = marks.expand(front + ids, images, [0] * len(front) + list(mask))
            return made.new_position(len(front) + start), made.ids, made.mask, made.images
        at = common_start(prompt, text)
        pieces = [self.encoder.encode([piece])[piece] if piece else array("i") for piece in (text[:at], text[at:])]
        made = marks.expand(front + pieces[0] + pieces[1], images)
        return made.new_position(len(front) + len(pieces[0])), made.ids, None, made.images

    def _in_parts(self, conversation: Conversation) -> Conversation:
        """Return the messages with their contents as parts, as TRL passes them to the template of a vision model."""
        return replace(conversation, chat=[self._with_parts(message) for message in conversation.chat])

    def _with_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._hidden(part) for part in content]}

    def _hidden(self, part: Any) -> Any:
        """Return a part with image control tokens in its text hidden, since only the template may write them."""
        assert self.family is not None
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return part
        text = part["text"]
        for word in self.family.controls:
            text = text.replace(word, self.encoder.hide(word)) if word in text else text
        return {**part, "text": text}

    def _label_tokens(self, columns: Mapping[str, Any]) -> EncodedConversation:
        """Return given token ids with their labels: the given ones, or those selected by the masks."""
        ids = array("i", columns["input_ids"])
        labels = array("i", columns.get("labels", ids))
        masks = ["assistant_masks"] if self.options.train_on_prompt else ["completion_mask", "assistant_masks"]
        for name in masks if "labels" not in columns else ():
            labels = _mask_labels(columns[name], labels) if name in columns else labels
        return EncodedConversation([(_segment(ids[:0], labels[:0]), _segment(ids, labels))])

    def _begin(self, prompt: Sequence[int], whole: Ids, example: Example, stats: DataStats) -> int:
        begin = shared_beginning(prompt, whole)
        if begin < len(prompt):
            stats.add(RETOKENIZED_PROMPT, example)
        return begin

    def _single_turn(
        self, begin: int, ids: Ids, mask: Sequence[int] | None = None, images: Sequence[ImageFile] = ()
    ) -> EncodedConversation:
        """Return one turn.

        Args:
            begin: position of the first token of the response.
            ids: token ids.
            mask: 1 for each trainable token; None if all are.
            images: images among the tokens.
        """
        labels = ids[:]
        if not self.options.train_on_prompt:
            labels[:begin] = masked_labels(begin)
        if mask is not None:
            labels = _mask_labels(mask, labels)
        prompt = _segment(ids[:begin], labels[:begin], [one for one in images if one.end <= begin])
        answer = _segment(
            ids[begin:], labels[begin:], shift_positions((one for one in images if one.end > begin), -begin)
        )
        return EncodedConversation([(prompt, answer)])

    # --- the assistant's tokens ---------------------------------------------------------------------------------------

    def note(self) -> str | None:
        """Return a warning if the template's ``{% generation %}`` marks exclude the end token of a turn, else None."""
        if not self._is_marked:
            return None
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ids, marks = marked_ids(self.tokenizer, Conversation(chat))
        ends = self.tokenizer.eos_token_id
        behind = [token for token, is_marked in zip(ids, marks, strict=True) if not is_marked][-2:]
        if 1 in marks and ends in behind and ids[len(marks) - 1 - marks[::-1].index(1)] != ends:
            return (
                "The chat template's `{% generation %}` block excludes the token that ends the assistant turn, so the "
                "model does not learn to stop. Move `{% endgeneration %}` after it."
            )
        return None

    def _tokenize_marked(self, example: Example, conversation: Conversation) -> tuple[Ids, list[int]]:
        try:
            ids, mask = marked_ids(self.tokenizer, conversation)
        except UnreadableTemplate as error:
            raise UserError(_not_rendered(error, conversation), where=example.place) from error
        _refuse_without_assistant(conversation, mask)
        return array("i", ids), mask

    def _answers_in(self, conversation: Conversation) -> Rendered:
        """Return the rendered conversation with the spans of its responses."""
        chat: Any = conversation.chat
        (rendered,) = self._renderer(conversation.variables).render_all([(chat, conversation.tools)])
        if isinstance(rendered, UnreadableTemplate):
            raise RuntimeError(f"Assistant messages cannot be located: {rendered}. Messages: {str(chat)[:200]}")
        return rendered

    def _between(
        self, conversation: Conversation, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[Ids, list[int]]:
        """Return the ids of a text, and a mask with 1 for each token inside a span."""
        ids, borders = self.encoder.encode_with_boundaries([text], [list(chain.from_iterable(spans))])[0]
        mask = [0] * len(ids)
        for (begin, _), (_, end) in zip(borders[::2], borders[1::2], strict=True):
            mask[begin:end] = [1] * (end - begin)
        _refuse_without_assistant(conversation, mask)
        return ids, mask

    def _renderer(self, variables: Mapping[str, Any]) -> Renderer:
        """Return the renderer for these template variables, which are set in the template since rendering may depend
        on them."""
        opening = set_variables(dict(sorted(variables.items())))
        if opening not in self._renderers:
            templates = {name: opening + text for name, text in self._templates.items()}
            self._renderers[opening] = Renderer(
                templates, self.tokenizer, not_ends=_NEVER_END_TOKENS, family=self.family
            )
        return self._renderers[opening]


def _conversation(example: Example) -> Conversation:
    """Return the input of the chat template: messages, tools, and the record's own variables."""
    chat = [dict(m.raw or {"role": m.role, "content": m.text}) for m in example.messages]
    try:
        tools = parse_json(example.tools) if example.tools else None
    except json.JSONDecodeError as error:
        raise UserError(f"The tools are not valid JSON: {error.msg}.", where=example.place) from error
    return Conversation(
        chat, tools or None, variables={n: value for n, value in arguments_of(example).items() if value is not None}
    )


def _until_response(conversation: Conversation) -> Conversation:
    """Return the input that renders what precedes the last response, up to where it begins."""
    size = len(conversation.chat) - (conversation.chat[-1]["role"] == "assistant")
    return replace(conversation, parts=[(size, True)])


def _context(messages: Sequence[Message]) -> int:
    """Return the number of messages before the response."""
    return next((n for n, message in enumerate(messages) if message.train is not False), len(messages))


def _not_rendered(error: UnreadableTemplate, conversation: Conversation) -> str:
    return f"The example cannot be tokenized: {error}. Messages: {str(conversation.chat)[:200]}"


def _refuse_without_assistant(conversation: Conversation, mask: Sequence[int]) -> None:
    if 1 not in mask:
        raise RuntimeError(
            "`assistant_only_loss=True` requires assistant tokens in every example. Received an example without an "
            "assistant message, or without one inside the chat template's `{% generation %}` block. "
            f"Messages: {str(conversation.chat)[:200]}"
        )


def _segment(ids: Ids, labels: Ids, images: Sequence[ImageFile] = ()) -> Segment:
    return Segment(ids, lambda: [True] * len(ids), labels=labels, images=images)


def _mask_labels(mask: Sequence[int], labels: Ids) -> Ids:
    return array("i", [label if bit else IGNORE_INDEX for label, bit in zip(labels, mask, strict=True)])


# --- columns of token ids ---------------------------------------------------------------------------------------------


def _turn_from_token_ids(columns: Mapping[str, Any], name: str) -> Turn:
    prompt, response = array("i", columns.get("prompt_ids") or []), array("i", columns[name])
    return _segment(prompt, masked_labels(len(prompt))), _segment(response, response)
