"""Records of preferences as TRL's data sets hold them -> a prompt and answers, each a text or messages.

In: a record with ``prompt``, ``chosen``, ``rejected``, or two texts or conversations that begin alike. Refused, as a
``BadRecord``: answers that are missing, empty or equal, or that come from somebody who does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.data.reading.json_files import shortened
from burnish.data.sets.preferences import SAME, common_prompt
from burnish.data.sets.records import BadRecord
from burnish.trainer.trl.sft.rows import to_messages
from burnish.utils.sequences import shared_beginning

Answer = str | list[dict[str, Any]]
"""A text, or messages; a prompt is the same."""


def pair_of(record: Mapping[str, Any]) -> tuple[Answer, Answer, Answer]:
    """The prompt and both answers of a record, texts or messages. Raises BadRecord."""
    chosen, rejected = (text_or_messages(record, part) for part in ("chosen", "rejected"))
    prompt = None if record.get("prompt") is None else text_or_messages(record, "prompt")
    if isinstance(prompt, list):
        chosen, rejected = as_messages(chosen), as_messages(rejected)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRecord('"chosen" and "rejected" must be both text or both messages.')
    if chosen == rejected:
        raise BadRecord(SAME)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not isinstance(prompt, str):
            prompt = common_prompt(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        shared = shared_beginning(chosen, rejected)
        begins = prompt if isinstance(prompt, list) else []
        before, chosen, rejected = as_messages(chosen)[:shared], chosen[shared:], rejected[shared:]
        prompt = begins if before and begins[-shared:] == before else [*begins, *before]
        if not prompt:
            raise BadRecord('"chosen" must be a message or a list that begins like "rejected".')
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        check_answer(answer, name)
    return prompt, chosen, rejected


def text_or_messages(record: Mapping[str, Any], column: str) -> Answer:
    """The text or the messages in a column. Raises BadRecord."""
    value = record.get(column)
    value = [value] if isinstance(value, dict) else value
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise BadRecord(f'"{column}" must be text, a message or a list of messages. Received: {shortened(value)}')
    found: Answer = to_messages({"messages": value}).get("messages", value)
    return found


def as_messages(answer: Answer) -> list[dict[str, Any]]:
    """Messages, of a text one of the assistant's."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def check_answer(answer: Answer, name: str) -> None:
    """Refuse an answer that is empty, or from somebody who does not answer. Raises BadRecord."""
    if isinstance(answer, str):
        if not answer.strip():
            raise BadRecord(f'"{name}" is empty.')
        return
    if not answer:
        raise BadRecord(f'"{name}" ends where the other answer begins: it holds no answer of its own.')
    last = answer[-1]
    if last.get("role") in ("user", "system", "tool"):
        raise BadRecord(f'"{name}" is from "{last["role"]}"; an answer comes from "assistant".')
    if not (str(last.get("content") or "").strip() or last.get("tool_calls")):
        raise BadRecord(f'"{name}" is empty.')
