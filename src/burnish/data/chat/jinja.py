"""Export a named template as a Jinja chat template, so that a model is served with its training format.

The result is for ``tokenizer.chat_template``. It renders the text whose tokens were trained: the default system
message, all earlier turns, tools and calls in the template's format, and reasoning as it was trained. Responses are
inside ``{% generation %}`` blocks. The header of a response is written before a response, or at the end with
``add_generation_prompt``.

There are two possible differences. First, training tokenizes slot by slot, whereas a chat template is tokenized as one
text: without a control token between two slots, a tokenizer may merge the end of one with the start of the next, and a
tokenizer whose normalizer prepends a space (``Prepend``) does so before each slot. Second, phi4_mini prints the JSON of
the tools exactly as the record spells it, which a chat template never sees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from burnish.data.chat.labels import TemplateChoices
from burnish.data.chat.table import CONTENT, Slots, TemplateSpec, Token
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS, exact_jinja
from burnish.data.images.family import Family

_TEXT_OF = (
    "{%- macro text_of(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}MEDIA{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)
_WITHOUT_THOUGHT = """
{%- macro without_thought(content) -%}
{%- set left = namespace(text='', open='', inside=false) -%}
{%- for piece in content.split(OPENS) -%}
{%- if loop.first -%}{%- set left.text = piece -%}
{%- elif CLOSES in piece -%}
{%- set left.text = left.text + piece.split(CLOSES)[1:] | join(CLOSES) -%}{%- set left.open = '' -%}
{%- else -%}{%- set left.open = left.open + OPENS + piece -%}{%- endif -%}
{%- endfor -%}
{{- (left.text + left.open).lstrip('\\n') -}}
{%- endmacro -%}
"""


@dataclass(frozen=True)
class _Slot:
    """The slots of a role as text: before the content, after it, and the header of the following response."""

    head: str
    tail: str
    header: str = ""
    is_spaced: bool = False  # the tokenizer inserts a space before the content, unless it begins with one


def write_jinja(
    spec: TemplateSpec, options: TemplateChoices, tokenizer: Any, forgets_thoughts: bool, family: Family | None = None
) -> str:
    """Return the Jinja chat template of ``spec`` with ``options``, using the tokenizer's own tokens.

    Args:
        forgets_thoughts: whether the reasoning of responses before the last one is removed.
        family: model family of a vision model, whose placeholders are written for images and videos.
    """
    user = _with_header(_slot(spec.user, tokenizer), [_slot(s, tokenizer).tail for s in (spec.assistant, spec.system)])
    return "".join(
        (
            _TEXT_OF.replace("MEDIA", _media(family)),
            *dict.fromkeys(exact_jinja(TOOL_FORMATS[n].macros) for n in (spec.tool_format, spec.tool_list_format)),
            _thought_macro(spec) if spec.reasoning else "",
            _opening(spec, tokenizer),
            "{%- set state = namespace(observed='') -%}",
            "{%- for message in turns -%}",
            "{%- set content = text_of(message['content']) -%}",
            "{%- set answered = not loop.last and loop.nextitem['role'] == 'assistant' "
            "or loop.last and add_generation_prompt -%}",
            "{%- if message['role'] == 'user' -%}",
            _system_in_user(spec, tokenizer),
            _question(user),
            "{%- elif message['role'] == 'tool' -%}",
            _observation(_with_same_header(_slot(spec.observation, tokenizer), user.header), spec.between_observations),
            "{%- elif message['role'] == 'assistant' -%}",
            _answer(spec, options, tokenizer, forgets_thoughts),
            "{%- else -%}{{- raise_exception('This template does not support the role ' ~ message['role'] ~ '.') -}}",
            "{%- endif -%}",
            "{%- endfor -%}",
            _thought_of_prompt(spec, options),
        )
    )


def _media(family: Family | None) -> str:
    """Return Jinja that prints the placeholder of a part that is an image or a video. The processor of transformers
    expands it, and puts images first itself in a family whose images precede the text."""
    if family is None or family.in_front:
        return ""
    image = family.template_text.replace(family.chat_template_text, family.mark)
    texts = {"image": image, "image_url": image}
    if family.video_mark_id >= 0:
        texts["video"] = family.video_template_text
    return "".join(
        "{%- elif part['type'] == " + jinja_string(kind) + " -%}" + jinja_print(text) for kind, text in texts.items()
    )


def jinja_string(text: str) -> str:
    """Return ``text`` as a Jinja string literal."""
    return json.dumps(text, ensure_ascii=False)


def jinja_print(text: str) -> str:
    """Return a Jinja statement that prints ``text`` literally."""
    return "{{- " + jinja_string(text) + " -}}" if text else ""


def slot_text(slot: str | Token, tokenizer: Any) -> str:
    """Return the text of a slot for this tokenizer, "" for a token that it lacks."""
    if isinstance(slot, str):
        return slot
    if slot.kind in ("bos", "eos"):
        return getattr(tokenizer, f"{slot.kind}_token") or ""
    return slot.name if slot.kind == "named" or slot.name in tokenizer.get_vocab() else ""


def _slot(slots: Slots, tokenizer: Any) -> _Slot:
    head, tail = _slot_text(slots, tokenizer).split(CONTENT, 1)
    opens = any(isinstance(slot, str) and slot.startswith(CONTENT) for slot in slots)
    return _Slot(head, tail, is_spaced=opens and _gets_space("x", tokenizer))


def _slot_text(slots: Slots, tokenizer: Any) -> str:
    """Return the text of slots.

    A SentencePiece tokenizer inserts a space before each text it encodes. Training encodes slot by slot, so the spaces
    are written explicitly here, where the slots become one text.
    """
    return "".join(
        f" {slot}" if isinstance(slot, str) and _gets_space(slot, tokenizer) else slot_text(slot, tokenizer)
        for slot in slots
    )


def _gets_space(text: str, tokenizer: Any) -> bool:
    """Return whether the tokenizer inserts a space before ``text`` unless there is one already."""
    if not text or text.startswith(CONTENT):
        return False
    plain, spaced = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, f" {text}"))
    return bool(plain == spaced)


def _with_header(slot: _Slot, ends: list[str]) -> _Slot:
    """Split the text after a user message into the end of the message and the header of the response.

    User messages end like other messages. If none of their endings is found, all text after the content is the header
    ("\\n### Response:"), except for a closing bracket such as "[/INST]".
    """
    if "[/INST]" in slot.tail or "[/TOOL_RESULTS]" in slot.tail:
        return slot
    end = max((end for end in ends if slot.tail.startswith(end)), key=len, default="")
    return replace(slot, tail=end, header=slot.tail[len(end) :])


def _with_same_header(slot: _Slot, header: str) -> _Slot:
    """Return the slot of tool responses with the same response header as user messages."""
    if not slot.tail.endswith(header):
        return slot
    return replace(slot, tail=slot.tail.removesuffix(header), header=header)


def _opening(spec: TemplateSpec, tokenizer: Any) -> str:
    """Return Jinja that sets ``turns`` and ``system`` and prints the prefix and a leading system message."""
    system = _slot(spec.system, tokenizer)
    default = jinja_string(spec.default_system)
    lstrip = (
        "{%- set tool_text = tool_text.lstrip('\\n') if not system else tool_text -%}" if spec.tools_open_system else ""
    )
    text = _content(system, "system ~ tool_text")
    return "".join(
        (
            f"{{%- set system = {default} -%}}",
            "{%- set turns = messages -%}",
            "{%- if messages and messages[0]['role'] == 'system' -%}",
            f"{{%- set system = text_of(messages[0]['content']) or {default} -%}}",
            "{%- set turns = messages[1:] -%}",
            "{%- endif -%}",
            "{%- set tool_text -%}{%- if tools -%}"
            + exact_jinja(TOOL_FORMATS[spec.tool_list_format].tools)
            + "{%- endif -%}{%- endset -%}",
            lstrip,
            jinja_print(_slot_text(spec.prefix, tokenizer)),
            ""
            if spec.system_in_user
            else "{%- if system or tools -%}"
            + jinja_print(system.head)
            + text
            + jinja_print(system.tail)
            + "{%- endif -%}",
        )
    )


def _system_in_user(spec: TemplateSpec, tokenizer: Any) -> str:
    if not spec.system_in_user:
        return ""
    head, tail = slot_text(spec.system[0], tokenizer).split(CONTENT, 1)  # tokenized as one text with the user message
    opened = f"{jinja_string(head)} ~ system ~ tool_text ~ {jinja_string(tail)} ~ content"
    return "{%- if loop.first and (system or tools) -%}{%- set content = " + opened + " -%}{%- endif -%}"


def _question(slot: _Slot, content: str = "content") -> str:
    header = "{%- if answered -%}" + jinja_print(slot.header) + "{%- endif -%}" if slot.header else ""
    return jinja_print(slot.head) + _content(slot, content) + jinja_print(slot.tail) + header


def _content(slot: _Slot, content: str) -> str:
    """Return Jinja that prints the content of a slot; ``content`` is a Jinja expression."""
    if not slot.is_spaced:
        return "{{- " + content + " -}}"
    text = f"({content})"
    return "{%- if " + text + " and not " + text + ".startswith(' ') -%}{{- ' ' -}}{%- endif -%}{{- " + text + " -}}"


def _observation(slot: _Slot, between: str) -> str:
    """Return Jinja that prints consecutive tool responses as one message."""
    joined = f"state.observed ~ {jinja_string(between)} ~ content"
    return (
        f"{{%- set state.observed = {joined} if state.observed else content -%}}"
        "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}"
        + _question(slot, "state.observed")
        + "{%- set state.observed = '' -%}{%- endif -%}"
    )


def _answer(spec: TemplateSpec, options: TemplateChoices, tokenizer: Any, forgets: bool) -> str:
    answer, function = _slot(spec.assistant, tokenizer), _slot(spec.function, tokenizer)
    prefix, trained = _thoughts(spec, options, forgets)
    return "".join(
        (
            prefix,
            "{%- generation -%}",
            trained,
            "{%- if message['tool_calls'] -%}{%- set calls = message['tool_calls'] -%}",
            jinja_print(function.head),
            _content(function, "content"),
            exact_jinja(TOOL_FORMATS[spec.tool_format].calls),
            jinja_print(function.tail),
            "{%- else -%}",
            jinja_print(answer.head) + _content(answer, "content") + jinja_print(answer.tail),
            "{%- endif -%}",
            _closing_of_row(spec, tokenizer),
            "{%- endgeneration -%}",
        )
    )


def _thoughts(spec: TemplateSpec, options: TemplateChoices, forgets: bool) -> tuple[str, str]:
    """Return Jinja that adds or removes reasoning: before the trained part of a response, and at its start.

    Args:
        forgets: whether the reasoning of responses before the last one is removed.
    """
    if not spec.reasoning:
        return "", ""
    opens, closes = (jinja_string(word.strip()) for word in spec.thought_words)
    history = "(not loop.last or add_generation_prompt)"
    removed = "true" if options.enable_thinking is False else history if forgets else "false"
    lacking = f"{opens} not in content and {closes} not in content"
    if forgets:
        lacking += f" and not {history}"
    empty = "{%- if " + lacking + " -%}" + jinja_print(spec.empty_thought) + "{%- endif -%}"
    settle = (
        "{%- if " + removed + " -%}{%- set content = without_thought(content) -%}{%- endif -%}"
        if removed != "false"
        else ""
    )
    return (settle, empty) if options.enable_thinking else (settle + empty, "")


def _thought_macro(spec: TemplateSpec) -> str:
    opens, closes = map(jinja_string, spec.thought_words)
    return "".join(_WITHOUT_THOUGHT.replace("OPENS", opens).replace("CLOSES", closes).split("\n"))


def _closing_of_row(spec: TemplateSpec, tokenizer: Any) -> str:
    if not spec.efficient_eos:
        return ""
    return (
        "{%- if loop.last and not add_generation_prompt -%}" + jinja_print(tokenizer.eos_token or "") + "{%- endif -%}"
    )


def _thought_of_prompt(spec: TemplateSpec, options: TemplateChoices) -> str:
    """Return Jinja that ends the prompt with an empty reasoning block if the model should respond without reasoning.

    Serving programs pass the variable ``enable_thinking``. Without it, reasoning is as in training.
    """
    if not spec.reasoning:
        return ""
    quiet = "enable_thinking is false" if options.enable_thinking else "enable_thinking is not true"
    known = "enable_thinking is defined and " if options.enable_thinking else "enable_thinking is not defined or "
    return (
        "{%- if add_generation_prompt and ("
        + known
        + quiet
        + ") -%}"
        + jinja_print(spec.empty_thought)
        + "{%- endif -%}"
    )
