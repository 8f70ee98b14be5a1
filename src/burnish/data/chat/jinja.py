"""A named template written as a chat template in Jinja, so that the model is served with the format of its training.

In: a row of the table over a tokenizer. Out: Jinja text for ``tokenizer.chat_template``. It renders the text whose
tokens are trained: the default system message, all earlier turns, tools and calls in the template's format, thoughts
as they were learned. Answers stand between ``{% generation %}`` marks, and the header that invites an answer is
written before an answer, or at the end where ``add_generation_prompt`` asks for it.

Two things may differ. A chat template gives the tokenizer one text, and training tokenizes slot by slot: where there is
no control token between two slots, a tokenizer may merge the end of one with the start of the next; and one whose
normalizer prepends a space (``Prepend``) does so before each slot, also where it has a space. And phi4_mini
repeats the JSON of the tools exactly as the record spells it, which a chat template never sees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from burnish.data.chat.labels import TemplateChoices
from burnish.data.chat.table import CONTENT, Slots, TemplateSpec, Token
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS, exact_jinja

_TEXT_OF = (
    "{%- macro text_of(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
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
    """The slots of a role as text: before the content, after it, and the header of the answer that follows."""

    head: str
    tail: str
    header: str = ""
    is_spaced: bool = False  # the tokenizer puts a space before the content, unless it begins with one


def write_jinja(spec: TemplateSpec, options: TemplateChoices, tokenizer: Any) -> str:
    """Write the chat template of ``spec`` under ``options``, with the tokenizer's own tokens."""
    user = _with_header(_slot(spec.user, tokenizer), [_slot(s, tokenizer).tail for s in (spec.assistant, spec.system)])
    return "".join(
        (
            _TEXT_OF,
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
            _answer(spec, options, tokenizer),
            "{%- else -%}{{- raise_exception('This template knows no role ' ~ message['role'] ~ '.') -}}",
            "{%- endif -%}",
            "{%- endfor -%}",
            _thought_of_prompt(spec, options),
        )
    )


def jinja_string(text: str) -> str:
    """Write ``text`` as a Jinja string."""
    return json.dumps(text, ensure_ascii=False)


def jinja_print(text: str) -> str:
    """Write a Jinja statement that prints ``text`` as it is."""
    return "{{- " + jinja_string(text) + " -}}" if text else ""


def slot_text(slot: str | Token, tokenizer: Any) -> str:
    """The text of a slot for this tokenizer; "" for a token that it does not have."""
    if isinstance(slot, str):
        return slot
    if slot.kind in ("bos", "eos"):
        return getattr(tokenizer, f"{slot.kind}_token") or ""
    return slot.name if slot.kind == "named" or slot.name in tokenizer.get_vocab() else ""


def _slot(slots: Slots, tokenizer: Any) -> _Slot:
    head, tail = _joined(slots, tokenizer).split(CONTENT, 1)
    opens = any(isinstance(slot, str) and slot.startswith(CONTENT) for slot in slots)
    return _Slot(head, tail, is_spaced=opens and _gets_space("x", tokenizer))


def _joined(slots: Slots, tokenizer: Any) -> str:
    """The text of slots. A tokenizer of SentencePiece puts a space before each text that it is given, and training
    gives it slot by slot: the space is written where the slots are one text."""
    return "".join(
        f" {slot}" if isinstance(slot, str) and _gets_space(slot, tokenizer) else slot_text(slot, tokenizer)
        for slot in slots
    )


def _gets_space(text: str, tokenizer: Any) -> bool:
    """Tell whether the tokenizer puts a space before ``text``, and none where it has one."""
    if not text or text.startswith(CONTENT):
        return False
    plain, spaced = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, f" {text}"))
    return bool(plain == spaced)


def _with_header(slot: _Slot, ends: list[str]) -> _Slot:
    """Split the text after a question's content into the end of the question and the header of the answer.

    A question ends as other messages do. Where none of their endings is found, all that follows the content invites
    the answer ("\\n### Response:"), except the closing half of a pair of brackets.
    """
    if "[/INST]" in slot.tail or "[/TOOL_RESULTS]" in slot.tail:
        return slot
    end = max((end for end in ends if slot.tail.startswith(end)), key=len, default="")
    return replace(slot, tail=end, header=slot.tail[len(end) :])


def _with_same_header(slot: _Slot, header: str) -> _Slot:
    """The slot of a tool's answer, which the header of an answer follows as it follows a question."""
    if not slot.tail.endswith(header):
        return slot
    return replace(slot, tail=slot.tail.removesuffix(header), header=header)


def _opening(spec: TemplateSpec, tokenizer: Any) -> str:
    """Jinja that sets ``turns`` and ``system``, and prints the prefix and the system message, if that comes first."""
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
            jinja_print(_joined(spec.prefix, tokenizer)),
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
    head, tail = slot_text(spec.system[0], tokenizer).split(CONTENT, 1)  # one text with the question
    opened = f"{jinja_string(head)} ~ system ~ tool_text ~ {jinja_string(tail)} ~ content"
    return "{%- if loop.first and (system or tools) -%}{%- set content = " + opened + " -%}{%- endif -%}"


def _question(slot: _Slot, content: str = "content") -> str:
    header = "{%- if answered -%}" + jinja_print(slot.header) + "{%- endif -%}" if slot.header else ""
    return jinja_print(slot.head) + _content(slot, content) + jinja_print(slot.tail) + header


def _content(slot: _Slot, content: str) -> str:
    """Jinja that prints the content of a slot. Args: content: an expression."""
    if not slot.is_spaced:
        return "{{- " + content + " -}}"
    text = f"({content})"
    return "{%- if " + text + " and not " + text + ".startswith(' ') -%}{{- ' ' -}}{%- endif -%}{{- " + text + " -}}"


def _observation(slot: _Slot, between: str) -> str:
    """Jinja that prints consecutive answers of tools as one message."""
    joined = f"state.observed ~ {jinja_string(between)} ~ content"
    return (
        f"{{%- set state.observed = {joined} if state.observed else content -%}}"
        "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}"
        + _question(slot, "state.observed")
        + "{%- set state.observed = '' -%}{%- endif -%}"
    )


def _answer(spec: TemplateSpec, options: TemplateChoices, tokenizer: Any) -> str:
    answer, function = _slot(spec.assistant, tokenizer), _slot(spec.function, tokenizer)
    given, learned = _thoughts(spec, options)
    return "".join(
        (
            given,
            "{%- generation -%}",
            learned,
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


def _thoughts(spec: TemplateSpec, options: TemplateChoices) -> tuple[str, str]:
    """Jinja that adds or removes the thought of an answer: before the learned part, and at the start of it."""
    if not spec.reasoning:
        return "", ""
    opens, closes = (jinja_string(word.strip()) for word in spec.thought_words)
    forgets = options.mask_history and not options.preserve_thinking
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
    """Jinja that ends the prompt with the empty thought where the model is to answer without thinking.

    ``enable_thinking`` is the variable that serving programs pass; without it, thinking is as in training.
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
