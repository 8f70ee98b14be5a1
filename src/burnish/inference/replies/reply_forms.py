"""Format of a template's responses: markers of reasoning, and how tool calls are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.rendering import UnreadableTemplate
from burnish.data.chat.rows import Template
from burnish.data.chat.table import CONTENT, TemplateSpec, Token
from burnish.data.chat.tools.tool_calls import Call, CallReader, ToolSchemas
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS


@dataclass(frozen=True)
class ReplyForm:
    """Format of a template's responses.

    Args:
        thought_words: markers that open and close reasoning, without surrounding whitespace.
        reader: parser of tool calls; None if the format of the template's calls is unknown.
        around_calls: text that the template writes before and after the calls of a turn.
        tool_format: name of the tool format, "" if unknown.
    """

    thought_words: tuple[str, str] = ("<think>", "</think>")
    reader: CallReader | None = None
    around_calls: tuple[str, str] = ("", "")
    tool_format: str = ""


def form_of(template: Template) -> ReplyForm:
    """Return the format of a template's responses.

    A named template defines it. For a Jinja chat template, it is detected from how the template renders a call.
    """
    spec = template.spec
    if spec is not None:
        opens, closes = (word.strip() for word in spec.thought_words)
        reader = TOOL_FORMATS[spec.tool_format].reader
        return ReplyForm((opens, closes), reader, _around(spec, template.tokenizer), spec.tool_format)
    assert isinstance(template.form, JinjaFormat)
    return form_of_jinja(template.form)


def form_of_jinja(form: JinjaFormat) -> ReplyForm:
    """Return the response format of a chat template, detected from how it renders a call."""
    name = _written_format(form)
    return ReplyForm(reader=TOOL_FORMATS[name].reader if name else None, tool_format=name)


def _around(spec: TemplateSpec, tokenizer: Any) -> tuple[str, str]:
    """Return the text around the calls of a turn, without the end token of the turn."""
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
    """Return the tool format in which a chat template renders a call, or "" if it is unknown."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": form.renderer.content("Rome?")}]
    called = {"type": "function", "id": "call00000", "function": {"name": _SAMPLE.name, "arguments": _SAMPLE.arguments}}
    answer = {"role": "assistant", "content": form.renderer.content(""), "tool_calls": [called]}
    try:
        prompt = form.renderer.render(messages, [_SAMPLE_TOOL], prompt=True)
        text = form.renderer.render([*messages, answer], [_SAMPLE_TOOL])
    except (UnreadableTemplate, UserError):
        return ""
    same = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    written = text[same:].strip()
    for word in (*form.end_words(), form.tokenizer.eos_token or ""):
        written = written.removesuffix(word).strip() if word else written
    schema = {_SAMPLE.name: _SAMPLE_TOOL["function"]["parameters"]}  # type: ignore[index]
    names = ["qwen", *TOOL_FORMATS.names()]  # first, because ling renders calls in the same way
    readers = ((name, TOOL_FORMATS[name].reader) for name in names)
    return next((name for name, reader in readers if reader and _reads(reader, written, schema)), "")


def _reads(reader: CallReader, text: str, schema: ToolSchemas) -> bool:
    begin = min((text.find(opening) for opening in reader.openings_for(schema) if opening in text), default=-1)
    return begin >= 0 and reader.read(text[begin:], schema) == [_SAMPLE]


def opens_thought(prompt: Sequence[int], form: ReplyForm, tokenizer: Any) -> bool:
    """Return whether a prompt ends inside a reasoning block, as those of reasoning templates may."""
    opens = form.thought_words[0]
    tail: str = tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return bool(opens) and tail.rstrip().endswith(opens)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return function name -> schema of its parameters, for a list of tools."""
    inner = [tool["function"] if tool.get("type") == "function" and "function" in tool else tool for tool in tools]
    return {tool["name"]: tool.get("parameters") or {} for tool in inner}
