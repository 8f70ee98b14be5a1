"""The form of a template's answers: the words around thoughts, and how calls are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.rendering import UnreadableTemplate
from burnish.data.chat.rows import Template
from burnish.data.chat.table import CONTENT, TemplateSpec, Token
from burnish.data.chat.tools.tool_calls import Call, CallReader, Offered
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS


@dataclass(frozen=True)
class ReplyForm:
    """The form of a template's answers.

    Args:
        thought_words: what opens and closes a thought, without blanks around them.
        reader: of tool calls; None where the template has no way to write them that is known.
        around_calls: what the template writes before and after the calls of a turn.
        tool_format: its name, for a person; "" for none.
    """

    thought_words: tuple[str, str] = ("<think>", "</think>")
    reader: CallReader | None = None
    around_calls: tuple[str, str] = ("", "")
    tool_format: str = ""


def form_of(template: Template) -> ReplyForm:
    """The form of a template's answers: from its row of the table or, for a chat template in Jinja, from the way in
    which it writes a call."""
    spec = template.spec
    if spec is not None:
        opens, closes = (word.strip() for word in spec.thought_words)
        reader = TOOL_FORMATS[spec.tool_format].reader
        return ReplyForm((opens, closes), reader, _around(spec, template.tokenizer), spec.tool_format)
    assert isinstance(template.form, JinjaFormat)
    return form_of_jinja(template.form)


def form_of_jinja(form: JinjaFormat) -> ReplyForm:
    """The form of the answers of a chat template, from the way in which it writes a call."""
    name = _written_format(form)
    return ReplyForm(reader=TOOL_FORMATS[name].reader if name else None, tool_format=name)


def _around(spec: TemplateSpec, tokenizer: Any) -> tuple[str, str]:
    """The text around the calls of a turn, without the token that ends every turn."""
    texts = [
        (getattr(tokenizer, f"{slot.kind}_token", "") or "" if slot.kind in ("bos", "eos") else slot.name)
        if isinstance(slot, Token)
        else slot
        for slot in spec.function
    ]
    head, _, tail = "".join(texts).partition(CONTENT)
    ends = {tokenizer.eos_token, tokenizer.bos_token, *spec.stop_words}
    head, tail = head.strip(), tail.strip()
    return "" if head in ends else head, "" if tail in ends else tail


_SAMPLE = Call("get_weather", {"city": "Rome"})
_SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": _SAMPLE.name,
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _written_format(form: JinjaFormat) -> str:
    """The tool format in which a chat template writes a call; "" where it writes none that is known."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": form.renderer.content("Rome?")}]
    called = {"type": "function", "id": "call00000", "function": {"name": _SAMPLE.name, "arguments": _SAMPLE.arguments}}
    answer = {"role": "assistant", "content": form.renderer.content(""), "tool_calls": [called]}
    try:
        prompt = form.renderer.render(asked, [_SAMPLE_TOOL], prompt=True)
        text = form.renderer.render([*asked, answer], [_SAMPLE_TOOL])
    except (UnreadableTemplate, UserError):
        return ""
    same = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    written = text[same:].strip()
    for word in (*form.end_words(), form.tokenizer.eos_token or ""):
        written = written.removesuffix(word).strip() if word else written
    schema = {_SAMPLE.name: _SAMPLE_TOOL["function"]["parameters"]}  # type: ignore[index]
    names = ["qwen", *TOOL_FORMATS.names()]  # ling's calls are written alike
    readers = ((name, TOOL_FORMATS[name].reader) for name in names)
    return next((name for name, reader in readers if reader and _reads(reader, written, schema)), "")


def _reads(reader: CallReader, text: str, schema: Offered) -> bool:
    begin = min((text.find(opening) for opening in reader.openings_for(schema) if opening in text), default=-1)
    return begin >= 0 and reader.read(text[begin:], schema) == [_SAMPLE]


def opens_thought(prompt: Sequence[int], form: ReplyForm, tokenizer: Any) -> bool:
    """Return whether a prompt ends inside a thought, as those of reasoning templates may."""
    opens = form.thought_words[0]
    tail: str = tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return bool(opens) and tail.rstrip().endswith(opens)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The functions of a list of tools, by name, with the schemas of their parameters."""
    inner = [tool["function"] if tool.get("type") == "function" and "function" in tool else tool for tool in tools]
    return {tool["name"]: tool.get("parameters") or {} for tool in inner}
