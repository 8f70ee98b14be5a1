"""Parse the messages of a conversation: dictionaries as they are in the file -> typed messages.

Keys and role names come from the tags. OpenAI's tool calls, and ``train`` and ``weight`` of a message, are supported.
Raises BadRecord with the position in the record for a message without role or content, an unknown role, or content that
is not text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from sys import float_info
from typing import Any

from burnish.data.reading.json_files import parse_json
from burnish.data.sets.images import content_of, has_images, raw_content, system_text
from burnish.data.sets.records import ROLES, BadRecord, Layout, Record, as_text, list_columns
from burnish.data.stats import keep_reason, truncation_reason
from burnish.loop.types import RESPONSE_ROLES, Example, Message, RoleName
from burnish.utils.json_files import shorten_value

SHAREGPT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
THOUGHT_WORDS = ("<think>\n", "\n</think>\n\n")
"""Texts around the reasoning in the content of a message, which templates with other words replace by theirs."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold reasoning, as in the APIs of DeepSeek, OpenRouter and gpt-oss."""
TEXT_BESIDE_CALL = truncation_reason(
    "text alongside a tool call was removed (a turn is either text or a tool call)", is_length=False
)


def conversation(record: Record, messages: Sequence[Message]) -> Example:
    """Create an example of messages. A leading system message takes precedence over the system column."""
    has_system = bool(messages) and messages[0].role == "system" and not record.layout.verbatim
    return record.example(
        messages=tuple(messages[1:] if has_system else messages),
        system=system_text(messages[0]) if has_system else record.text_or_none("system"),
        tools=record.json_text("tools"),
    )


def messages_of(record: Record, part: str) -> list[Message]:
    """Return the messages in the column of ``part``."""
    column = record.column(part)
    return [message_of(record.layout, turn, f"{column}[{place}]") for place, turn in enumerate(record.turns(part))]


def as_context(message: Message) -> Message:
    """Return the message as context that is not trained, whatever its role."""
    return replace(message, train=False, weight=1.0)


def message_of(layout: Layout, turn: Mapping[str, Any], place: str) -> Message:
    """Parse one message. ``place`` is its position in error messages."""
    if layout.verbatim:
        return _verbatim(layout, turn, place)
    content_key = layout.tags["content_tag"]
    role, content = _role(layout, turn, place), turn.get(content_key)
    calls = turn.get("tool_calls") or turn.get("function_call")
    key = next((key for key in _REASONING if turn.get(key)), "") if role in RESPONSE_ROLES or calls else ""
    if has_reasoning := bool(key) and "<think>" not in str(content or ""):
        content = _with_reasoning(content, as_text(turn[key], f"{place}.{key}"))
        turn = {**turn, content_key: content}
    if calls:
        role, content = "function", _calls(layout, calls, content, place)
    elif content_key not in turn:
        raise BadRecord(f'"{place}" has no "{content_key}". Found: {list_columns(turn)}.')
    elif role in ("function", "observation") and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    train, weight = _train_and_weight(turn, place)
    seen = content_of(layout, content, f"{place}.{content_key}")
    return Message(role, seen, train, weight, has_reasoning=has_reasoning)


def _verbatim(layout: Layout, turn: Mapping[str, Any], place: str) -> Message:
    """Return a message that is passed to the chat template unchanged.

    Keys whose value is None are removed: they come from other records of the dataset, and templates test whether a key
    exists. ShareGPT's "from" and "value" become "role" and "content".
    """
    if "from" in turn and "role" not in turn:
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **others}
    raw = {key: value for key, value in turn.items() if value is not None or key == "content"}
    content = raw.get("content")
    if content is None and not any(value for key, value in raw.items() if key not in ("role", "content")):
        raise BadRecord(f'"{place}.content" is null.')
    if layout.reader is not None and isinstance(content, list):
        seen = content_of(layout, content, f"{place}.content")
        return Message(_role_in_prompt(raw), seen, raw={**raw, "content": raw_content(content)})
    if has_images(content):
        raise BadRecord(
            f'"{place}.content" contains an image or a video, which the model would not see.',
            "Use a vision-language model. Begin a streamed dataset with a record that has an image.",
        )
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return Message(_role_in_prompt(raw), text, raw=raw)


def _role_in_prompt(raw: Mapping[str, Any]) -> RoleName:
    return ROLES.get(str(raw.get("role")), "assistant")


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def _role(layout: Layout, turn: Mapping[str, Any], place: str) -> RoleName:
    key = layout.tags["role_tag"]
    if key not in turn:
        raise BadRecord(
            f'"{place}" has no role ("{key}"). Found: {list_columns(turn)}.',
            'If the keys have other names, set tags: {"role_tag": ..., "content_tag": ...}.',
        )
    word = turn[key]
    if not isinstance(word, str) or word not in layout.roles:
        known = [spoken for tag, spoken in layout.tags.items() if tag not in ("role_tag", "content_tag")]
        raise BadRecord(
            f'"{place}.{key}" must be one of {list_columns(known)}.',
            "If the file uses other role names, set them in tags.",
            received=shorten_value(word),
        )
    if word not in layout.tags.values():
        reason = keep_reason(f'the role "{word}" is treated as {layout.roles[word]}')
        if reason not in layout.dropped_parts:
            layout.dropped_parts.append(reason)
    return layout.roles[word]


def _calls(layout: Layout, calls: Any, content: Any, place: str) -> str:
    """Return the content of a message with tool calls: the calls as JSON, after the reasoning text if there is one.

    OpenAI stores the arguments of a call as JSON text. Templates expect an object, so the text is parsed.
    """
    each = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) if isinstance(call, dict) else None for call in each]
    named = [f for f in functions if isinstance(f, dict) and f.get("name")]
    if len(named) < len(each):
        raise BadRecord(f'"{place}" calls a tool without a name.', received=shorten_value(calls))
    written = json.dumps(
        [{"name": f["name"], "arguments": _arguments(f.get("arguments"))} for f in named], ensure_ascii=False
    )
    spoken = as_text(content, f"{place}.content").strip() if content else ""
    thought, end, rest = spoken.partition("</think>") if spoken.startswith("<think>") else ("", "", spoken)
    if rest.strip():
        layout.dropped_parts.append(TEXT_BESIDE_CALL)
    return f"{thought}{end}\n\n{written}" if end else written


def _with_reasoning(content: Any, reasoning: str) -> Any:
    """Return the content of a message, text or parts, with its reasoning in front."""
    thought = reasoning.strip().join(THOUGHT_WORDS)
    if isinstance(content, list):
        return [{"type": "text", "text": thought}, *content]
    return thought + (content or "")


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        return parse_json(value)
    except json.JSONDecodeError:
        return value  # not JSON; the template decides what to do with it


def _train_and_weight(turn: Mapping[str, Any], place: str) -> tuple[bool | None, float]:
    """Return (train, weight) of a message. As in OpenAI's format, a weight of 0 excludes the message from the loss."""
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRecord(f'"{place}.train" must be true or false.', received=shorten_value(train))
    if weight is None:
        return train, 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= float_info.max:
        raise BadRecord(f'"{place}.weight" must be a finite number of at least 0.', received=shorten_value(weight))
    return (False, 1.0) if weight == 0 else (train, float(weight))
